"""All draft decode forwards of a step as one captured forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.backends.multi_step import BoundMultiStep, Indices, MultiStepDraftBackend
from specattn.batch import Candidates
from specattn.buffers import BufferSet, Fingerprint, buf
from specattn.kernels.tree import append_candidates, select_beams
from specattn.speculative.draft_tokens import Coins, choose_tokens, drawing_names
from specattn.speculative.programs import ROWS, copy_in_all, describe

if TYPE_CHECKING:
    from specattn.backends.layers import LayeredBackend
    from specattn.config import SpecConfig
    from specattn.speculative.model import DraftModel


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
    shared : dict of Tensor
        Buffers that others own and this program reads in place of its own, by name.
    """

    def __init__(
        self,
        draft: DraftModel,
        backend: LayeredBackend,
        config: SpecConfig,
        req_to_token: Tensor,
        batch: int,
        indices: Indices = "table",
        **shared: Tensor,
    ) -> None:
        self.draft, self.config = draft, config
        self.multi_step = MultiStepDraftBackend(
            backend, config, req_to_token, batch, indices, **shared
        )
        law = draft.vocab_size if config.draft_sampling else 0
        self.dims = _StateDims(config.topk, draft.hidden_size, law, draft.layers[0].dtype)
        self.state = _State.alloc(batch, self.dims, req_to_token.device)
        self.coins = Coins.alloc(batch, None, req_to_token.device).sharing(shared)

    def bind(self, bucket: int) -> BoundPropose:
        """Bind to the first ``bucket`` rows."""
        return BoundPropose(
            self.draft,
            self.config,
            self.dims,
            self.multi_step.bind(bucket),
            self.state.bind(bucket),
            self.coins.bind(bucket),
        )


@dataclass(frozen=True)
class BoundPropose:
    """`ProposeProgram` over a bucket."""

    draft: DraftModel
    config: SpecConfig
    dims: _StateDims
    steps: BoundMultiStep
    state: _State
    coins: Coins

    @property
    def graphs(self) -> bool:
        """Whether the attention may be recorded."""
        return all(step.graphs for step in self.steps.steps)

    @property
    def takes(self) -> frozenset[str]:
        """The draft state, rows and lengths, and what sampled drafts need."""
        return frozenset({*self.state.tensors(), *ROWS, *drawing_names(self.config)})

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Take the `DraftState` tensors, rows and lengths."""
        plan = self.steps.plan
        copy_in_all(values, (plan.inputs, plan.dims), (self.state, self.dims), (self.coins, None))

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule every step."""
        self.steps.schedule(seq_lens_cpu)

    def fill(self) -> None:
        """Fill what all steps share."""
        self.steps.fill()

    def run(self) -> Candidates:
        """Grow the beams: every step runs its topk nodes and proposes topk children of each."""
        state, inputs = self.state, self.steps.plan.inputs
        scores_tokens_parents = self._empty_candidates()
        named = {f"candidate_{name}": value for name, value in scores_tokens_parents.items()}
        laws = [state.draft_probs]
        probs, tokens = state.topk_probs[:, None], state.topk_tokens[:, None]  # [B, 1, K]
        hidden = state.hidden_states  # [B * beams, H]
        # the root has no path, and is no draft node
        scores: Tensor | None = None
        words: Tensor | None = None
        # all steps' at once: a step's own are not dense for more than one request
        positions = inputs.positions.transpose(0, 1).contiguous().flatten(1)  # [steps, B * K]
        for step, attend in enumerate(self.steps.steps):
            picked = _Beams.empty(state.topk_tokens)
            select_beams(
                step,
                probs,
                tokens,
                scores,
                words,
                **named,
                scores_out=picked.scores,
                tokens_out=picked.tokens,
                rows_out=picked.rows,
                words_out=inputs.words[:, step],
            )
            self.steps.fill_ancestors(step)
            at = positions[step]
            out = self.draft.forward(
                picked.tokens.flatten(), hidden, at, attend, sources=picked.rows.flatten()
            )
            # drafts run one position behind the target
            after = at + 1 if self.config.draft_sampling else at
            chosen = choose_tokens(self.draft, out.logits, self.config, self.coins, after)
            probs, tokens = (
                part.unflatten(0, picked.tokens.shape) for part in (chosen.probs, chosen.tokens)
            )
            laws.append(chosen.law.unflatten(0, picked.tokens.shape)[:, 0])
            hidden = out.hidden_states
            scores, words = picked.scores, inputs.words[:, step]
        append_candidates(len(self.steps.steps), probs, tokens, scores, **named)
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
        """Describe the buffers, the request table, the index lists and the pool."""
        plan, steps = self.steps.plan, self.steps.steps
        found = describe(
            self.config,
            plan.req_to_token,
            plan.inputs,
            self.state,
            self.coins,
            kv_indptr=self.steps.kv_indptr,
            kv_indices=self.steps.kv_indices,
        )
        return found + steps[0].fingerprint() if steps else found

    def watched(self) -> tuple[object, ...]:
        """Return the objects whose attributes `fingerprint` reads, and tensors others can reach."""
        plan, steps = self.steps.plan, self.steps.steps
        own = (self, self.steps, plan, plan.req_to_token, plan.inputs, self.state, self.coins)
        return *own, *(steps[0].watched() if steps else ())


@dataclass(frozen=True)
class _Beams:
    """The nodes a draft step runs: ``[B, K]`` path scores, tokens, and the rows they extend."""

    scores: Tensor
    tokens: Tensor
    rows: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> _Beams:
        return cls(
            torch.empty_like(like, dtype=torch.float32),
            torch.empty_like(like),
            torch.empty_like(like),
        )
