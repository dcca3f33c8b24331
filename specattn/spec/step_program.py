"""A whole speculative step over request states: one program, recorded whole or in three parts.

The rows that take part are the step's only input. What it reads besides, it finds on the device
(`RequestStates`), and there it leaves what the next step reads; the host gets a copy of the
accepted tokens. The forwards are those of `ProposeProgram`, `VerifyProgram` and `ExtendProgram`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specattn.backends.base import by_lengths_alone, fill_all
from specattn.batch import AcceptResult, DraftState, DraftTree, ForwardMode
from specattn.buffers import BufferSet, Fingerprint, buf, fingerprint
from specattn.kernels import ops
from specattn.spec.extend import BoundExtend, ExtendProgram
from specattn.spec.propose import BoundPropose, ProposeProgram
from specattn.spec.sampling import SamplingBatch
from specattn.spec.tree import fill_tree
from specattn.spec.verify import accept, spread
from specattn.spec.verify_program import BoundVerify, VerifyProgram

if TYPE_CHECKING:
    from specattn.backends.layers import BoundLayers
    from specattn.backends.multi_step import Indices
    from specattn.config import SpecConfig
    from specattn.spec.decoder import ModelSlot
    from specattn.spec.model import DraftModel, TargetModel
    from specattn.spec.states import RequestStates


class Acceptor(Protocol):
    """What decides how much of a tree is kept; `specattn.spec.verify.accept` unless for tests."""

    def __call__(
        self, tree: DraftTree, logits: Tensor, seq_lens: Tensor, config: SpecConfig,
        sampling: SamplingBatch, out: AcceptResult,
    ) -> AcceptResult:
        """Write ``out``; no sync, capturable."""


@dataclass(frozen=True)
class StepPart:
    """What is recorded together, as a key of graphs: all of a step, or what one model runs.

    Parameters
    ----------
    mode : ForwardMode or None
        None for the whole step, or one of ``DRAFT_DECODE``, ``TARGET_VERIFY`` and
        ``DRAFT_EXTEND``.
    sampled : bool
        Whether requests may draw; without, the target's distributions are not computed.
    """

    mode: ForwardMode | None = None
    sampled: bool = False

    @property
    def value(self) -> str:
        """Its name in messages and reports."""
        name = "step" if self.mode is None else self.mode.value
        return f"{name} (sampled)" if self.sampled else name

    @classmethod
    def of(cls, config: SpecConfig, *, seams: bool, sampled: bool) -> tuple[StepPart, ...]:
        """Return the parts of a step in the order they run."""
        if not seams or not config.num_steps:
            return (cls(None, sampled),)
        verify = cls(ForwardMode.TARGET_VERIFY, sampled)
        return cls(ForwardMode.DRAFT_DECODE), verify, cls(ForwardMode.DRAFT_EXTEND)


@dataclass(frozen=True)
class StepOutput:
    """What the host is told of a step.

    Parameters
    ----------
    packed : Tensor
        ``[B, N + 2]`` int64: tokens gained, then those tokens and zeros. A row that did not take
        part (padding, or a request without slots for a step) gained 0.
    """

    packed: Tensor


@dataclass(frozen=True)
class StepInputs(BufferSet):
    """What all phases of a step share; the dimensions are its `SpecConfig`.

    ``window`` holds the slots after the committed context: the first ones are the tail of every
    phase, for all of them start from the same length.
    """

    rows: Tensor = buf(lambda _: (), torch.int64)
    req_pool_indices: Tensor = buf(lambda _: (), torch.int64)
    seq_lens: Tensor = buf(lambda _: (), torch.int32)
    window: Tensor = buf(lambda c: (c.reserve_len,), torch.int32)
    positions: Tensor = buf(lambda c: (c.num_steps + 1,), torch.int64)
    roots: Tensor = buf(lambda _: (), torch.int64)
    temperature: Tensor = buf(lambda _: (), torch.float32)
    top_k: Tensor = buf(lambda _: (), torch.int32)
    top_p: Tensor = buf(lambda _: (), torch.float32, lambda _: torch.ones(()))
    seeds: Tensor = buf(lambda _: (), torch.int64)


@dataclass(frozen=True)
class _Links(BufferSet):
    """The part of a `DraftTree` that the target does not read; -1 is no node."""

    next_token: Tensor = buf(lambda c: (c.num_draft_tokens,), torch.int64,
                             lambda c: torch.full((c.num_draft_tokens,), -1))
    next_sibling: Tensor = buf(lambda c: (c.num_draft_tokens,), torch.int64,
                               lambda c: torch.full((c.num_draft_tokens,), -1))


@dataclass(frozen=True)
class _Accepted(BufferSet):
    """An `AcceptResult`, and what the host is told."""

    accept_index: Tensor = buf(lambda c: (c.num_steps + 1,), torch.int32)
    accept_tokens: Tensor = buf(lambda c: (c.num_steps + 1,), torch.int64)
    accept_lens: Tensor = buf(lambda _: (), torch.int32)
    bonus_tokens: Tensor = buf(lambda _: (), torch.int64)
    packed: Tensor = buf(lambda c: (c.num_steps + 2,), torch.int64)


class StepProgram:
    """All programs of a step over shared buffers.

    Parameters
    ----------
    target : ModelSlot
        The target model.
    draft : ModelSlot or None
        The draft model; needed unless ``config.num_steps`` is 0, and then kept up to date, so
        that a later step can draft.
    config : SpecConfig
        Tree width and depth.
    req_to_token, reserved : Tensor
        ``[rows, max_context_len]`` and ``[rows]`` int32; see `specattn.kv.SlotTable`.
    states : RequestStates
        What steps leave for each other.
    features : int
        Width of the target features the draft reads.
    batch : int
        Largest bucket.
    indices : {"table", "csr"}
        What the draft steps read.
    accept : Acceptor
        What decides how much of a tree is kept.
    """

    def __init__(
        self,
        target: ModelSlot[TargetModel],
        draft: ModelSlot[DraftModel] | None,
        config: SpecConfig,
        req_to_token: Tensor,
        reserved: Tensor,
        states: RequestStates,
        *,
        features: int,
        batch: int,
        indices: Indices = "table",
        accept: Acceptor = accept,
    ) -> None:
        self.target, self.config, self.accept = target, config, accept
        self.reserved, self.states = reserved, states
        device = req_to_token.device
        self.inputs = StepInputs.alloc(batch, config, device)
        self.links = _Links.alloc(batch, config, device)
        self.accepted = _Accepted.alloc(batch, config, device)
        self._bound: dict[int, BoundStep] = {}
        self.propose: ProposeProgram | None = None
        self.extend: ExtendProgram | None = None
        inputs, window, depth = self.inputs, self.inputs.window, config.num_steps
        everywhere = {
            name: getattr(inputs, name)
            for name in ("req_pool_indices", "seq_lens", "temperature", "seeds")
        }
        plain = {} if depth else {"tokens": inputs.roots[:, None], "positions": inputs.positions}
        mode = ForwardMode.TARGET_VERIFY if depth else ForwardMode.DECODE
        self.verify = VerifyProgram(
            target.model, target.backend, config.layout(mode), req_to_token, batch,
            tail_slots=window[:, : config.num_draft_tokens], **everywhere, **plain,
        )
        if draft is None:
            return
        if depth:
            drafted = window[:, : config.num_draft_forwards * config.topk]
            self.propose = ProposeProgram(
                draft.model, draft.backend, config, req_to_token, batch, indices,
                branch_slots=drafted.unflatten(1, (-1, config.topk)), **everywhere,
            )
        self.extend = ExtendProgram(
            draft.model, draft.backend, config, req_to_token, features, batch,
            states.topk_probs.shape[1], positions=inputs.positions,
            tail_slots=window[:, : depth + 1], tokens=self.accepted.accept_tokens,
            accept_lens=self.accepted.accept_lens, **everywhere,
        )

    def part(self, part: StepPart) -> PartProgram:
        """Return one part of the step."""
        return PartProgram(self, part)

    def bind(self, bucket: int) -> BoundStep:
        """Bind to the first ``bucket`` rows; once per bucket, for all parts share what is bound."""
        if bucket not in self._bound:
            self._bound[bucket] = self._bind(bucket)
        return self._bound[bucket]

    def _bind(self, bucket: int) -> BoundStep:
        verify = self.verify.bind(bucket)
        links, accepted = self.links.bind(bucket), self.accepted.bind(bucket)
        inputs = self.inputs.bind(bucket)
        nodes = self.config.num_draft_tokens
        law = inputs.temperature.new_zeros(bucket, 0, 0)
        propose = self.propose.bind(bucket) if self.propose else None
        if propose is not None and self.config.draft_sampling:
            law = law.new_zeros(bucket, self.config.num_steps, propose.draft.vocab_size)
        tree = DraftTree(
            verify.tokens.tokens, verify.inputs.positions, verify.inputs.tail_words,
            torch.arange(bucket * nodes, device=law.device).view(bucket, nodes),
            links.next_token, links.next_sibling, law,
        )
        return BoundStep(
            self.target, self.config, self.reserved, self.states, inputs, accepted, links, tree,
            propose, verify, self.extend.bind(bucket) if self.extend else None, self.accept,
        )


@dataclass(frozen=True)
class BoundStep:
    """`StepProgram` over a bucket; its stages run in the order of the methods."""

    target: ModelSlot[TargetModel]
    config: SpecConfig
    reserved: Tensor
    states: RequestStates
    inputs: StepInputs
    accepted: _Accepted
    links: _Links
    tree: DraftTree
    propose: BoundPropose | None
    verify: BoundVerify
    extend: BoundExtend | None
    accept: Acceptor = field(repr=False)

    def over(self, rows: Tensor, packed: Tensor) -> BoundStep:
        """Return the same with the step's input and output elsewhere, of the same kind."""
        inputs, accepted = replace(self.inputs, rows=rows), replace(self.accepted, packed=packed)
        return replace(self, inputs=inputs, accepted=accepted)

    def attends(self, mode: ForwardMode | None) -> tuple[BoundLayers, ...]:
        """Return the attention of a part, or of the whole step."""
        drafts = self.propose.steps.steps if self.propose else ()
        extends = (self.extend.attend,) if self.extend else ()
        return {
            None: (*drafts, self.verify.attend, *extends),
            ForwardMode.DRAFT_DECODE: drafts,
            ForwardMode.TARGET_VERIFY: (self.verify.attend,),
            ForwardMode.DRAFT_EXTEND: extends,
        }[mode]

    def begin(self) -> None:
        """Gather the requests' states and derive every phase's metadata from the lengths."""
        inputs, states, propose = self.inputs, self.states, self.propose
        names = ("bonus_tokens", "temperature", "top_k", "top_p", "seeds")
        tables = [getattr(states, name) for name in names]
        outs = [inputs.roots, *(getattr(inputs, name) for name in names[1:])]
        drafts = inputs.positions.new_empty(len(inputs.rows), 0, 1)
        if propose is not None:
            tables += states.drafting
            outs += propose.state.tensors().values()
            drafts = propose.steps.plan.inputs.positions
        ops("step", inputs.rows.device).begin_step(
            inputs.rows, states.seq_lens, self.reserved, self.verify.plan.req_to_token,
            reserve_len=self.config.reserve_len, rows_out=inputs.req_pool_indices,
            seq_lens_out=inputs.seq_lens, window_out=inputs.window,
            positions_out=inputs.positions, draft_positions_out=drafts,
            tables=tuple(tables), outs=tuple(outs),
        )
        if propose is not None:
            propose.steps.fill_lists()
        # the rest waits for what its part brings: the tree, or a plan made on the host
        early, _ = by_lengths_alone(
            [self.verify.attend, *self.attends(ForwardMode.DRAFT_EXTEND)]
        )
        fill_all([*self.attends(ForwardMode.DRAFT_DECODE), *early])

    def draft(self) -> DraftTree:
        """Run the draft decode forwards and build the tree, into what the target reads."""
        if self.propose is None:
            return self.tree
        candidates = self.propose.run()
        fill_tree(candidates, self.inputs.roots, self.inputs.seq_lens, self.config, self.tree)
        if self.config.draft_sampling:
            self.tree.draft_probs.copy_(candidates.draft_probs)
        return self.tree

    def check(self, *, sampled: bool) -> AcceptResult:
        """Run the target over the tree, decide what is kept, and move its KV to the front."""
        inputs, out = self.inputs, self.accepted
        _, late = by_lengths_alone([self.verify.attend])
        fill_all(late)
        verified = self.verify.run()
        sampling = SamplingBatch(
            not sampled, inputs.temperature, inputs.top_k, inputs.top_p, inputs.seeds
        )
        accepted = AcceptResult(
            out.accept_index, out.accept_tokens, out.accept_lens, out.bonus_tokens
        )
        # without drafts there is nothing to reject
        config = self.config if self.propose else replace(self.config, draft_sampling=False)
        self.accept(self._spread(), verified.logits, inputs.seq_lens, config, sampling, accepted)
        if self.extend is None:
            return accepted
        self.target.pool.commit(verified.tail_slots, accepted)
        path = self.extend.accepted
        ops("step", inputs.rows.device).gather_path(
            verified.features, out.accept_index, out.accept_lens, inputs.seq_lens,
            features_out=path.features, last_rows_out=path.last_rows, after_out=path.after,
        )
        return accepted

    def _spread(self) -> DraftTree:
        """Return the tree with its draft laws over the target's vocabulary."""
        if not self.config.draft_sampling or self.propose is None:
            return self.tree
        law = spread(self.propose.draft, self.tree.draft_probs, self.target.model.vocab_size)
        return replace(self.tree, draft_probs=law)

    def finish(self) -> StepOutput:
        """Run the draft model over the accepted path, and leave the states for the next step."""
        inputs, out, states = self.inputs, self.accepted, self.states
        sources, tables = [out.bonus_tokens], [states.bonus_tokens]
        if self.extend is not None:
            _, late = by_lengths_alone([self.extend.attend])
            fill_all(late)
            state: DraftState = self.extend.run()
            sources += vars(state).values()
            tables += states.drafting
        ops("step", inputs.rows.device).end_step(
            inputs.req_pool_indices, inputs.seq_lens, out.accept_lens, out.accept_tokens,
            seq_lens_table=states.seq_lens, sources=tuple(sources), tables=tuple(tables),
            packed_out=out.packed,
        )
        return StepOutput(out.packed)


@dataclass(frozen=True)
class PartProgram:
    """One part of a step, as `GraphRunner` takes it."""

    step: StepProgram
    part: StepPart

    def bind(self, bucket: int) -> BoundPart:
        """Bind to the first ``bucket`` rows."""
        return BoundPart(self.step.bind(bucket), self.part)


@dataclass(frozen=True)
class BoundPart:
    """A part of a step over a bucket."""

    step: BoundStep
    part: StepPart

    @property
    def graphs(self) -> bool:
        """Whether the attention of the part may be recorded."""
        return all(attend.graphs for attend in self.step.attends(self.part.mode))

    @property
    def first(self) -> bool:
        """Whether a step begins with this part."""
        return self.part.mode in (None, ForwardMode.DRAFT_DECODE)

    @property
    def takes(self) -> frozenset[str]:
        """The rows that take part; later parts find everything on the device."""
        return frozenset({"rows"} if self.first else ())

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Take ``rows [count]`` int64."""
        if self.first:
            take_rows(self.step.inputs.rows, count, values)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule the part's attention."""
        for attend in self.step.attends(self.part.mode):
            attend.schedule(seq_lens_cpu)

    def fill(self) -> None:
        """Begin the step, if this part does."""
        if self.first:
            self.step.begin()

    def run(self) -> DraftTree | AcceptResult | StepOutput:
        """Run the part; returns the tree, what is kept of it, or (of the last part) the output."""
        step, mode = self.step, self.part.mode
        if mode is ForwardMode.DRAFT_DECODE:
            return step.draft()
        if mode is ForwardMode.TARGET_VERIFY:
            return step.check(sampled=self.part.sampled)
        if mode is not ForwardMode.DRAFT_EXTEND:
            step.draft()
            step.check(sampled=self.part.sampled)
        return step.finish()

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers, the tables, the states and the pools of the whole step."""
        step = self.step
        found = fingerprint(
            part=self.part, reserved=step.reserved, states=step.states, inputs=step.inputs,
            links=step.links, accepted=step.accepted,
        )
        for bound in (step.propose, step.verify, step.extend):
            if bound is not None:
                found += bound.fingerprint()
        return found

    def watched(self) -> tuple[object, ...]:
        """Return the objects whose attributes `fingerprint` reads, and tensors others can reach."""
        step = self.step
        own = (self, step, step.states, step.inputs, step.links, step.accepted)
        tables = (step.reserved, *step.states.tensors().values())
        bounds = [bound for bound in (step.propose, step.verify, step.extend) if bound is not None]
        return *own, *tables, *(one for bound in bounds for one in bound.watched())


def take_rows(rows: Tensor, count: int, values: dict[str, Tensor]) -> None:
    """Copy ``values["rows"]``, if given, to the first ``count`` of ``rows``; the rest pads."""
    if count < len(rows):
        rows[count:].zero_()
        rows = rows[:count]
    if values:
        rows.copy_(values["rows"], non_blocking=True)
