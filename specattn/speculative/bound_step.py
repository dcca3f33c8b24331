"""A step over a bucket of its buffers: the stages, in the order they run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from specattn.backends.base import by_lengths_alone, fill_all
from specattn.batch import AcceptResult, DraftState, DraftTree, ForwardMode
from specattn.kernels.step import begin_step, end_step, gather_path
from specattn.speculative.sampling import SamplingBatch
from specattn.speculative.step_buffers import StepOutput
from specattn.speculative.tree import fill_tree
from specattn.speculative.validation import check_features
from specattn.speculative.verify import spread

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.base import Fillable
    from specattn.backends.layers import BoundLayers
    from specattn.config import SpecConfig
    from specattn.speculative.decoder import ModelSlot
    from specattn.speculative.draft import BoundPropose
    from specattn.speculative.extend import BoundExtend
    from specattn.speculative.host_buffers import HostBuffers
    from specattn.speculative.model import TargetModel
    from specattn.speculative.states import RequestStates
    from specattn.speculative.step_buffers import StepAccepted, StepInputs, StepLinks
    from specattn.speculative.verify_program import BoundVerify


class Acceptor(Protocol):
    """What decides how much of a tree is kept: `specattn.speculative.verify.accept`."""

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        seq_lens: Tensor,
        config: SpecConfig,
        sampling: SamplingBatch,
        out: AcceptResult,
    ) -> AcceptResult:
        """Write ``out``; no sync, capturable."""


@dataclass(frozen=True)
class BoundStep:
    """A `StepProgram` over a bucket; its stages run in the order of the methods."""

    target: ModelSlot[TargetModel]
    config: SpecConfig
    reserved: Tensor
    states: RequestStates
    ring: HostBuffers
    inputs: StepInputs
    accepted: StepAccepted
    links: StepLinks
    tree: DraftTree
    propose: BoundPropose | None
    verify: BoundVerify
    extend: BoundExtend | None
    accept: Acceptor = field(repr=False)

    def over(self, ring: HostBuffers, packed: Tensor) -> BoundStep:
        """Return the same with the step's input and output elsewhere, of the same kind."""
        return replace(self, ring=ring, accepted=replace(self.accepted, packed=packed))

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
        self._gather()
        if self.propose is not None:
            self.propose.steps.fill_lists()
        fill_all([*self.attends(ForwardMode.DRAFT_DECODE), *self._early()])

    def pad(self) -> None:
        """Turn all requests into padding, also for a part that runs without those before it."""
        self.ring.rows.zero_()
        self._gather()
        fill_all(self._early())

    def _early(self) -> list[Fillable]:
        # the rest waits for what its part brings: the tree, or a plan made on the host
        attends = (self.verify.attend, *self.attends(ForwardMode.DRAFT_EXTEND))
        return by_lengths_alone(attends)[0]

    def _gather(self) -> None:
        inputs, states, propose = self.inputs, self.states, self.propose
        names = ("bonus_tokens", "temperature", "top_k", "top_p", "seeds")
        tables = [getattr(states, name) for name in names]
        outs = [inputs.roots, *(getattr(inputs, name) for name in names[1:])]
        drafts = inputs.positions.new_empty(len(inputs.positions), 0, 1)
        if propose is not None:
            tables += states.drafting
            outs += propose.state.tensors().values()
            drafts = propose.steps.plan.inputs.positions
        begin_step(
            self.ring.rows,
            self.ring.turn,
            states.seq_lens,
            self.reserved,
            self.verify.plan.req_to_token,
            reserve_len=self.config.reserve_len,
            rows_out=inputs.req_pool_indices,
            seq_lens_out=inputs.seq_lens,
            window_out=inputs.window,
            positions_out=inputs.positions,
            draft_positions_out=drafts,
            tables=tuple(tables),
            outs=tuple(outs),
        )

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
        self.accept(
            self._spread(), verified.logits, inputs.seq_lens, self.config, sampling, accepted
        )
        if self.extend is None:
            return accepted
        self.target.pool.commit(verified.tail_slots, accepted)
        path = self.extend.accepted
        check_features(verified.features.shape[-1], path.features.shape[-1])
        gather_path(
            verified.features,
            out.accept_index,
            out.accept_lens,
            inputs.seq_lens,
            features_out=path.features,
            last_rows_out=path.last_rows,
            after_out=path.after,
        )
        return accepted

    def _spread(self) -> DraftTree:
        """Return the tree with its draft laws over the target's vocabulary."""
        if not self.config.draft_sampling or self.propose is None:
            return self.tree
        law = spread(self.propose.draft, self.tree.draft_probs, self.target.model.vocab_size)
        return replace(self.tree, draft_probs=law)

    def follow(self) -> DraftState | None:
        """Run the draft model over the accepted path; returns where the next proposal starts."""
        if self.extend is None:
            return None
        _, late = by_lengths_alone([self.extend.attend])
        fill_all(late)
        return self.extend.run()

    def finish(self, state: DraftState | None) -> StepOutput:
        """Leave what the next step starts from, a draft ``state`` included: requests advance."""
        inputs, out, states = self.inputs, self.accepted, self.states
        sources: list[Tensor] = []
        tables: list[Tensor] = []
        if state is not None:
            sources += vars(state).values()
            tables += states.drafting
        end_step(
            inputs.req_pool_indices,
            inputs.seq_lens,
            out.accept_lens,
            out.accept_tokens,
            out.bonus_tokens,
            seq_lens_table=states.seq_lens,
            bonus_table=states.bonus_tokens,
            sources=tuple(sources),
            tables=tuple(tables),
            packed_out=out.packed,
        )
        return StepOutput(out.packed)
