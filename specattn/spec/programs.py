"""The captured forwards of a step: target verify, all draft decode steps, draft extend.

Each is a `specattn.graph.Program`: static buffers, and what runs on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specattn.backends.multi_step import BoundMultiStep, Indices, MultiStepDraftBackend
from specattn.batch import Candidates, DraftState, ForwardMode, RowLayout
from specattn.buffers import BufferSet, Fingerprint, buf, fingerprint
from specattn.kernels import ops
from specattn.kernels.reference.sampling import DRAFT, draw_tokens, target_probs, uniform
from specattn.plan import AttnInputs, AttnPlan

if TYPE_CHECKING:
    from specattn.backends.layers import BoundLayers, LayeredBackend
    from specattn.config import SpecConfig
    from specattn.spec.model import DraftModel, TargetModel


@dataclass(frozen=True)
class VerifyOutput:
    """What a verify (or plain decode) forward leaves.

    Parameters
    ----------
    logits : Tensor
        ``[B, n, V]``, the target's logits after every node.
    features : Tensor
        ``[B, n, F]``, the target hidden states the draft model reads; F is 0 without one.
    tail_slots : Tensor
        ``[B, n]`` int32, where the nodes' KV was written.
    """

    logits: Tensor
    features: Tensor
    tail_slots: Tensor


@dataclass(frozen=True)
class _Tokens(BufferSet):
    """One token per query; the dimensions are the layout."""

    tokens: Tensor = buf(lambda d: (d.q_len,), torch.int64)


class VerifyProgram:
    """One target forward over the nodes of each request's tree (plain decoding: over one).

    Parameters
    ----------
    target : TargetModel
        The model.
    backend : LayeredBackend
        Its attention.
    layout : RowLayout
        Of `ForwardMode.TARGET_VERIFY` or `ForwardMode.DECODE`.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32.
    batch : int
        Largest bucket.
    """

    def __init__(
        self,
        target: TargetModel,
        backend: LayeredBackend,
        layout: RowLayout,
        req_to_token: Tensor,
        batch: int,
    ) -> None:
        self.target, self.backend = target, backend
        self.layout, self.req_to_token = layout, req_to_token
        self.inputs = AttnInputs.alloc(batch, layout, req_to_token.device)
        self.tokens = _Tokens.alloc(batch, layout, req_to_token.device)

    def bind(self, bucket: int) -> BoundVerify:
        """Bind to the first ``bucket`` rows."""
        inputs = self.inputs.bind(bucket)
        plan = AttnPlan.over(self.layout, self.req_to_token, inputs)
        return BoundVerify(
            self.target, plan, inputs, self.tokens.bind(bucket), self.backend.bind(plan)
        )


@dataclass(frozen=True)
class BoundVerify:
    """`VerifyProgram` over a bucket."""

    target: TargetModel
    plan: AttnPlan
    inputs: AttnInputs
    tokens: _Tokens
    attend: BoundLayers

    @property
    def graphs(self) -> bool:
        """Whether the attention may be recorded."""
        return self.attend.graphs

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Take ``tokens, positions [count, n]``, ``tail_words``, rows and lengths."""
        layout = self.plan.layout
        _copy_in(values, (self.inputs, layout), (self.tokens, layout))

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule the attention."""
        self.attend.schedule(seq_lens_cpu)

    def fill(self) -> None:
        """Look up the tail's slots, then let the backend derive what it needs."""
        self.plan.fill()
        self.attend.fill()

    def run(self) -> VerifyOutput:
        """Run the target."""
        batch, nodes = self.tokens.tokens.shape
        out = self.target.forward(
            self.tokens.tokens.flatten(), self.inputs.positions.flatten(), self.attend, None
        )
        features = out.hidden_states
        if features is None:
            features = out.logits.new_empty(batch * nodes, 0)
        return VerifyOutput(
            out.logits.unflatten(0, (batch, nodes)),
            features.unflatten(0, (batch, nodes)),
            self.inputs.tail_slots,
        )

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers and the request table."""
        return _fingerprint(self.plan.layout, self.plan.req_to_token, self.inputs, self.tokens)


@dataclass(frozen=True)
class _ExtendDims:
    layout: RowLayout
    features: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Accepted(BufferSet):
    """The accepted path, padded to the tree's depth."""

    tokens: Tensor = buf(lambda d: (d.layout.q_len,), torch.int64)
    features: Tensor = buf(lambda d: (d.layout.q_len, d.features), lambda d: d.dtype)
    accept_lens: Tensor = buf(lambda _: (), torch.int32)


@dataclass(frozen=True)
class _Coins(BufferSet):
    """How each request draws draft tokens; read with ``SpecConfig.draft_sampling`` only."""

    temperature: Tensor = buf(lambda _: (), torch.float32)
    seeds: Tensor = buf(lambda _: (), torch.int64)


class ExtendProgram:
    """The draft model over the accepted path, on the lengths before the step's commit.

    Row i reads the token that follows path node i, with the target's features at that node.

    Parameters
    ----------
    draft : DraftModel
        The draft head.
    backend : LayeredBackend
        Its attention.
    config : SpecConfig
        Depth and branches.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32.
    features : int
        Width of the target's features.
    batch : int
        Largest bucket.
    """

    def __init__(
        self,
        draft: DraftModel,
        backend: LayeredBackend,
        config: SpecConfig,
        req_to_token: Tensor,
        features: int,
        batch: int,
    ) -> None:
        self.draft, self.backend, self.config = draft, backend, config
        self.req_to_token = req_to_token
        layout = config.layout(ForwardMode.DRAFT_EXTEND)
        self.dims = _ExtendDims(layout, features, draft.layers[0].dtype)
        self.inputs = AttnInputs.alloc(batch, layout, req_to_token.device)
        self.accepted = _Accepted.alloc(batch, self.dims, req_to_token.device)
        self.coins = _Coins.alloc(batch, None, req_to_token.device)

    def bind(self, bucket: int) -> BoundExtend:
        """Bind to the first ``bucket`` rows."""
        inputs = self.inputs.bind(bucket)
        plan = AttnPlan.over(self.dims.layout, self.req_to_token, inputs)
        return BoundExtend(
            self.draft, self.config, self.dims, plan, inputs, self.accepted.bind(bucket),
            self.coins.bind(bucket), self.backend.bind(plan),
        )


@dataclass(frozen=True)
class BoundExtend:
    """`ExtendProgram` over a bucket."""

    draft: DraftModel
    config: SpecConfig
    dims: _ExtendDims
    plan: AttnPlan
    inputs: AttnInputs
    accepted: _Accepted
    coins: _Coins
    attend: BoundLayers

    @property
    def graphs(self) -> bool:
        """Whether the attention may be recorded."""
        return self.attend.graphs

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Take ``tokens [count, N + 1]``, ``features``, ``accept_lens``, rows and lengths."""
        _copy_in(values, (self.inputs, self.dims.layout), (self.accepted, self.dims),
                 (self.coins, None))

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule the attention."""
        self.attend.schedule(seq_lens_cpu)

    def fill(self) -> None:
        """Derive positions and slots of the window after the committed context."""
        depth = torch.arange(self.dims.layout.q_len, device=self.inputs.seq_lens.device)
        self.inputs.positions.copy_(self.inputs.seq_lens[:, None] + depth)
        self.plan.fill()
        self.attend.fill()

    def run(self) -> DraftState:
        """Run the draft model; only the last accepted row reaches ``lm_head``."""
        batch, width = self.accepted.tokens.shape
        last = self.accepted.accept_lens.clamp(min=1).long() - 1
        rows = torch.arange(batch, device=last.device) * width + last
        out = self.draft.forward(
            self.accepted.tokens.flatten(),
            self.draft.combine(self.accepted.features.flatten(0, 1)),
            self.inputs.positions.flatten(),
            self.attend,
            rows,
        )
        # the token proposed here follows the bonus token
        after = (self.inputs.seq_lens + self.accepted.accept_lens).long()
        chosen = choose_tokens(self.draft, out.logits, self.config, self.coins, after)
        return DraftState(chosen.probs, chosen.tokens, out.hidden_states, chosen.law)

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers and the request table."""
        return _fingerprint(
            self.config, self.plan.req_to_token, self.inputs, self.accepted, self.coins
        )


@dataclass(frozen=True)
class Chosen:
    """Draft tokens: probabilities and target ids ``[R, K]``, and the law they were drawn from."""

    probs: Tensor
    tokens: Tensor
    law: Tensor


class Drawing(Protocol):
    """Where `choose_tokens` finds each request's temperature and seed, ``[B]`` each."""

    @property
    def temperature(self) -> Tensor:
        """float32; 0 is greedy."""

    @property
    def seeds(self) -> Tensor:
        """int64."""


def choose_tokens(
    draft: DraftModel, logits: Tensor, config: SpecConfig, drawing: Drawing, positions: Tensor
) -> Chosen:
    """Choose each row's draft tokens: the most probable ``topk``, or one drawn by its law.

    Parameters
    ----------
    draft : DraftModel
        Maps its vocabulary to the target's.
    logits : Tensor
        ``[R, Vd]``.
    config : SpecConfig
        ``topk`` and ``draft_sampling``.
    drawing : Drawing
        With ``draft_sampling``, R = B.
    positions : Tensor
        ``[R]`` int64, the target position of the token each row's proposal follows.
    """
    if not config.draft_sampling:
        probs, ids = torch.softmax(logits.float(), -1).topk(config.topk)
        return Chosen(probs, draft.to_target(ids), probs[:, :0])
    law = target_probs(logits, drawing.temperature, None, None, rows_per_req=1)
    ids = draw_tokens(law, uniform(drawing.seeds, positions, DRAFT))[:, None]
    return Chosen(law.gather(1, ids), draft.to_target(ids), law)


@dataclass(frozen=True)
class _StateDims:
    topk: int
    hidden: int
    law: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _State(BufferSet):
    """The `DraftState` a proposal starts from."""

    topk_probs: Tensor = buf(lambda d: (d.topk,), torch.float32)
    topk_tokens: Tensor = buf(lambda d: (d.topk,), torch.int64)
    hidden_states: Tensor = buf(lambda d: (d.hidden,), lambda d: d.dtype)
    draft_probs: Tensor = buf(lambda d: (d.law,), torch.float32)


class ProposeProgram:
    """All draft decode forwards of a step.

    Parameters
    ----------
    draft : DraftModel
        The draft head.
    backend : LayeredBackend
        Its attention.
    config : SpecConfig
        Steps and branches.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32.
    batch : int
        Largest bucket.
    indices : {"table", "csr"}
        What the steps read; see `MultiStepDraftBackend`.
    """

    def __init__(
        self,
        draft: DraftModel,
        backend: LayeredBackend,
        config: SpecConfig,
        req_to_token: Tensor,
        batch: int,
        indices: Indices = "table",
    ) -> None:
        self.draft, self.config = draft, config
        self.multi_step = MultiStepDraftBackend(backend, config, req_to_token, batch, indices)
        law = draft.vocab_size if config.draft_sampling else 0
        self.dims = _StateDims(config.topk, draft.hidden_size, law, draft.layers[0].dtype)
        self.state = _State.alloc(batch, self.dims, req_to_token.device)
        self.coins = _Coins.alloc(batch, None, req_to_token.device)

    def bind(self, bucket: int) -> BoundPropose:
        """Bind to the first ``bucket`` rows."""
        return BoundPropose(
            self.draft, self.config, self.dims, self.multi_step.bind(bucket),
            self.state.bind(bucket), self.coins.bind(bucket),
        )


@dataclass(frozen=True)
class BoundPropose:
    """`ProposeProgram` over a bucket."""

    draft: DraftModel
    config: SpecConfig
    dims: _StateDims
    steps: BoundMultiStep
    state: _State
    coins: _Coins

    @property
    def graphs(self) -> bool:
        """Whether the attention may be recorded."""
        return all(step.graphs for step in self.steps.steps)

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Take the `DraftState` tensors, rows and lengths."""
        plan = self.steps.plan
        _copy_in(values, (plan.inputs, plan.dims), (self.state, self.dims), (self.coins, None))

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule every step."""
        self.steps.schedule(seq_lens_cpu)

    def fill(self) -> None:
        """Fill what all steps share."""
        self.steps.fill()

    def run(self) -> Candidates:
        """Grow the beams: every step runs its topk nodes and proposes topk children of each."""
        state, inputs = self.state, self.steps.plan.inputs
        beam = ops("beam", state.topk_probs.device)
        scores_tokens_parents = self._empty_candidates()
        named = {f"candidate_{name}": value for name, value in scores_tokens_parents.items()}
        laws = [state.draft_probs]
        probs, tokens = state.topk_probs[:, None], state.topk_tokens[:, None]  # [B, 1, K]
        hidden = state.hidden_states[:, None]  # [B, 1, H]
        scores = torch.ones_like(probs[:, :, 0])  # [B, 1]
        words = torch.zeros_like(inputs.words[:, :1, 0])  # [B, 1, W]: the root is no draft node
        for step, attend in enumerate(self.steps.steps):
            picked = _Beams.empty(state.topk_tokens)
            beam.select_beams(
                step, probs, tokens, scores, words, **named, scores_out=picked.scores,
                tokens_out=picked.tokens, beams_out=picked.beams, words_out=inputs.words[:, step],
            )
            self.steps.fill_ancestors(step)
            index = picked.beams[:, :, None].expand(-1, -1, hidden.shape[-1])
            out = self.draft.forward(
                picked.tokens.flatten(), hidden.gather(1, index).flatten(0, 1),
                inputs.positions[:, step].flatten(), attend,
            )
            # drafts run one position behind the target
            after = inputs.positions[:, step].flatten() + 1
            chosen = choose_tokens(self.draft, out.logits, self.config, self.coins, after)
            probs, tokens = (
                part.unflatten(0, picked.tokens.shape) for part in (chosen.probs, chosen.tokens)
            )
            laws.append(chosen.law.unflatten(0, picked.tokens.shape)[:, 0])
            hidden = out.hidden_states.unflatten(0, picked.tokens.shape)
            scores, words = picked.scores, inputs.words[:, step]
        beam.append_candidates(len(self.steps.steps), probs, tokens, scores, **named)
        return Candidates(**scores_tokens_parents, draft_probs=torch.stack(laws, 1))

    def _empty_candidates(self) -> dict[str, Tensor]:
        config, probs = self.config, self.state.topk_probs
        batch, width = len(probs), config.max_tree_nodes - 1
        groups = 1 + config.num_draft_forwards * config.topk
        return {
            "scores": probs.new_empty(batch, width),
            "tokens": probs.new_empty(batch, width, dtype=torch.int64),
            "parents": probs.new_empty(batch, groups, dtype=torch.int64),
        }

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers, the request table and the index lists."""
        plan = self.steps.plan
        return _fingerprint(
            self.config, plan.req_to_token, plan.inputs, self.state, self.coins
        ) + fingerprint(kv_indptr=self.steps.kv_indptr, kv_indices=self.steps.kv_indices)


@dataclass(frozen=True)
class _Beams:
    """The nodes a draft step runs: ``[B, K]`` path scores, tokens, and the beams they extend."""

    scores: Tensor
    tokens: Tensor
    beams: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> _Beams:
        return cls(
            torch.empty_like(like, dtype=torch.float32), torch.empty_like(like),
            torch.empty_like(like),
        )


def _copy_in(values: dict[str, Tensor], *sets: tuple[BufferSet, object]) -> None:
    """Hand each buffer set, given with its dimensions, the values it declares."""
    for part, dims in sets:
        if not values:
            part.reset(dims)
        named = part.tensors().keys() & values.keys()
        part.copy_in(dims, **{name: values[name] for name in named})


def _fingerprint(setting: object, req_to_token: Tensor, *sets: BufferSet) -> Fingerprint:
    parts = {type(part).__name__: part for part in sets}
    return fingerprint(setting=setting, req_to_token=req_to_token, **parts)
