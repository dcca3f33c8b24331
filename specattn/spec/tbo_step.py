"""A step in two halves that do not wait for each other: two-batch overlap of whole steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from specattn.buffers import fingerprint
from specattn.recording import side_by_side
from specattn.spec.step_buffers import StepOutput
from specattn.spec.step_parts import BoundPart, take_rows

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.buffers import Fingerprint
    from specattn.spec.bound_step import BoundStep
    from specattn.spec.landing import Ring
    from specattn.spec.step_parts import StepPart
    from specattn.spec.step_program import StepProgram


class TboStepProgram:
    """`StepProgram` for each half of a batch, split as `specattn.backends.tbo` splits it.

    Nothing is shared but what both only read, and tables of which they write different rows: the
    models, the pools, ``req_to_token`` and the states. Padding of both halves writes the page of
    padding, whose contents nobody depends on.

    Parameters
    ----------
    first, second : StepProgram
        For requests ``[0, B // 2)`` and ``[B // 2, B)`` of every bucket B; of one setting, over the
        same models, pools, tables and states, each with attention of its own
        (`ModelSlot.apart`).
    batch : int
        Largest bucket.
    """

    def __init__(self, first: StepProgram, second: StepProgram, batch: int) -> None:
        self.halves = first, second
        rows, packed = second.inputs.rows, second.accepted.packed
        self.rows = rows.new_zeros(batch)
        self.packed = packed.new_zeros(batch, packed.shape[1])

    def part(self, part: StepPart, ring: Ring | None = None) -> TboPartProgram:
        """Return one part of the step; the last one also writes to ``ring``, if given."""
        return TboPartProgram(self, part, ring)

    def bind(self, bucket: int) -> BoundTboStep:
        """Bind to the first ``bucket`` rows; a half without requests is left out."""
        middle = bucket // 2
        parts = (0, middle), (middle, bucket)
        halves = tuple(
            program.bind(end - begin).over(self.rows[begin:end], self.packed[begin:end])
            for program, (begin, end) in zip(self.halves, parts, strict=True)
            if end > begin
        )
        return BoundTboStep(halves, self.rows[:bucket], self.packed[:bucket])


@dataclass(frozen=True)
class BoundTboStep:
    """`TboStepProgram` over a bucket.

    Parameters
    ----------
    halves : tuple of BoundStep
        The second half is the last; a bucket of 1 has no other. An engine that overlaps its own
        communication with a half's work runs their stages, or attends
        (`BoundStep.attends`), itself.
    rows, packed : Tensor
        What the halves' own ``rows`` and ``packed`` are views of.
    """

    halves: tuple[BoundStep, ...]
    rows: Tensor
    packed: Tensor


@dataclass(frozen=True)
class TboPartProgram:
    """One part of both halves, as `GraphRunner` takes it."""

    step: TboStepProgram
    part: StepPart
    ring: Ring | None = None

    def bind(self, bucket: int) -> BoundTboPart:
        """Bind to the first ``bucket`` rows."""
        step = self.step.bind(bucket)
        halves = tuple(BoundPart(half, self.part) for half in step.halves)
        return BoundTboPart(step, halves, self.ring if halves[-1].last else None)


@dataclass(frozen=True)
class BoundTboPart:
    """A part of both halves over a bucket; the last one writes to ``ring``, if there is one."""

    step: BoundTboStep
    halves: tuple[BoundPart, ...]
    ring: Ring | None = None

    @property
    def graphs(self) -> bool:
        """Whether the attention of both halves may be recorded."""
        return all(half.graphs for half in self.halves)

    @property
    def takes(self) -> frozenset[str]:
        """What `BoundPart.takes`."""
        return self.halves[-1].takes

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Take ``rows [count]`` int64, for both halves."""
        if self.halves[-1].first:
            take_rows(self.step.rows, count, values)
        elif not count:
            for half in self.halves:
                half.copy_in(0)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule each half from its own requests' lengths."""
        begin = 0
        for half in self.halves:
            end = begin + len(half.step.inputs.rows)
            half.schedule(None if seq_lens_cpu is None else seq_lens_cpu[begin:end])
            begin = end

    def fill(self) -> None:
        """Nothing yet: each half begins where it runs."""

    def run(self) -> StepOutput:
        """Run both halves: side by side in a recording, one after the other anywhere else.

        Returns
        -------
        StepOutput
            Of the whole batch; written by the last part of a step.
        """
        device = self.step.packed.device
        side_by_side(device, *(partial(_fill_and_run, half) for half in self.halves))
        if self.ring is not None:
            self.ring.land(self.step.packed)
        return StepOutput(self.step.packed)

    def fingerprint(self) -> Fingerprint:
        """Describe what both halves read, and the ring."""
        found = tuple(item for half in self.halves for item in half.fingerprint())
        return found + fingerprint(**(vars(self.ring) if self.ring else {}))

    def watched(self) -> tuple[object, ...]:
        """Return the objects whose attributes `fingerprint` reads, and tensors others can reach."""
        rings = (self.ring,) if self.ring else ()
        return self, *rings, self.step, *(one for half in self.halves for one in half.watched())


def _fill_and_run(half: BoundPart) -> None:
    half.fill()
    half.run()
