"""What is recorded of a step together: all of it, or what one model runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from specattn.batch import ForwardMode
from specattn.buffers import fingerprint

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.batch import AcceptResult, DraftState, DraftTree
    from specattn.buffers import Fingerprint
    from specattn.config import SpecConfig
    from specattn.speculative.bound_step import BoundStep
    from specattn.speculative.step_buffers import StepOutput


class StepPart(NamedTuple):
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
    def of(cls, config: SpecConfig, *, cudagraph: bool, sampled: bool) -> tuple[StepPart, ...]:
        """Return the parts of a step in the order they run."""
        if not cudagraph or not config.num_steps:
            return (cls(None, sampled),)
        verify = cls(ForwardMode.TARGET_VERIFY, sampled)
        return cls(ForwardMode.DRAFT_DECODE), verify, cls(ForwardMode.DRAFT_EXTEND)


@dataclass(frozen=True)
class BoundPart:
    """A part of a step over a bucket; the last one tells the host, if it ``lands``."""

    step: BoundStep
    part: StepPart
    lands: bool = True

    @property
    def graphs(self) -> bool:
        """Whether the attention of the part may be recorded."""
        return all(attend.graphs for attend in self.step.attends(self.part.mode))

    @property
    def first(self) -> bool:
        """Whether a step begins with this part."""
        return self.part.mode in (None, ForwardMode.DRAFT_DECODE)

    @property
    def last(self) -> bool:
        """Whether a step ends with this part."""
        return self.part.mode in (None, ForwardMode.DRAFT_EXTEND)

    @property
    def takes(self) -> frozenset[str]:
        """Nothing: the rows that take part are in the ring, the rest is on the device."""
        return frozenset()

    def copy_in(self, count: int, **_values: Tensor) -> None:
        """Run on padding if there are no requests.

        A part that is captured late would write to slots of the last step, whose they are by now.
        """
        if not count:
            self.step.pad()

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
        found = self.compute()
        return self.leave(found) if self.last else found

    def compute(self) -> Any:
        """Run everything but `leave`; requests are where they were before the step."""
        step, mode = self.step, self.part.mode
        if mode is ForwardMode.DRAFT_DECODE:
            return step.draft()
        if mode is ForwardMode.TARGET_VERIFY:
            return step.check(sampled=self.part.sampled)
        if mode is None:
            step.draft()
            step.check(sampled=self.part.sampled)
        return step.follow()

    def leave(self, state: DraftState | None) -> StepOutput:
        """Advance the requests by what the last part of a step has computed."""
        out = self.step.finish(state)
        if self.lands:
            self.step.ring.land(out.packed)
        return out

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers, tables, states, ring and pools of the whole step."""
        step = self.step
        found = (
            fingerprint(
                part=self.part,
                reserved=step.reserved,
                states=step.states,
                inputs=step.inputs,
                links=step.links,
                accepted=step.accepted,
            )
            + step.ring.fingerprint()
        )
        for bound in (step.propose, step.verify, step.extend):
            if bound is not None:
                found += bound.fingerprint()
        return found

    def watched(self) -> tuple[object, ...]:
        """Return the objects whose attributes `fingerprint` reads, and tensors others can reach."""
        step = self.step
        own = (self, step, step.ring, step.states, step.inputs, step.links, step.accepted)
        tables = (step.reserved, *step.states.tensors().values())
        bounds = [bound for bound in (step.propose, step.verify, step.extend) if bound is not None]
        return *own, *tables, *(one for bound in bounds for one in bound.watched())
