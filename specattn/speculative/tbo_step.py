"""A step in two halves that do not wait for each other: two-batch overlap of whole steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from specattn.cuda_graph.recorder import is_recording, side_by_side
from specattn.speculative.step_buffers import StepOutput
from specattn.speculative.step_parts import BoundPart

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.buffers import Fingerprint
    from specattn.speculative.bound_step import BoundStep
    from specattn.speculative.host_buffers import HostBuffers
    from specattn.speculative.step_parts import StepPart
    from specattn.speculative.step_program import StepProgram


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
        (`ModelSlot.with_own_workspace`).
    batch : int
        Largest bucket.
    """

    def __init__(self, first: StepProgram, second: StepProgram, batch: int) -> None:
        self.halves = first, second
        packed = second.accepted.packed
        self.packed = packed.new_zeros(batch, packed.shape[1])

    def part(self, part: StepPart) -> TboPartProgram:
        """Return one part of the step."""
        return TboPartProgram(self, part)

    def bind(self, bucket: int) -> BoundTboStep:
        """Bind to the first ``bucket`` rows; a half without requests is left out."""
        middle = bucket // 2
        parts, ring = ((0, middle), (middle, bucket)), self.halves[0].ring
        halves = tuple(
            program.bind(end - begin).over(ring.of(begin, end), self.packed[begin:end])
            for program, (begin, end) in zip(self.halves, parts, strict=True)
            if end > begin
        )
        return BoundTboStep(halves, ring.of(0, bucket), self.packed[:bucket])


@dataclass(frozen=True)
class BoundTboStep:
    """`TboStepProgram` over a bucket.

    Parameters
    ----------
    halves : tuple of BoundStep
        The second half is the last; a bucket of 1 has no other. An engine that overlaps its own
        communication with a half's work runs their stages, or attends
        (`BoundStep.attends`), itself.
    ring : HostBuffers
        Of the whole bucket; a half has its requests' part of it.
    packed : Tensor
        ``[B, N + 2]`` int64, what the halves' own are views of.
    """

    halves: tuple[BoundStep, ...]
    ring: HostBuffers
    packed: Tensor


@dataclass(frozen=True)
class TboPartProgram:
    """One part of both halves, as `GraphRunner` takes it."""

    step: TboStepProgram
    part: StepPart

    def bind(self, bucket: int) -> BoundTboPart:
        """Bind to the first ``bucket`` rows."""
        step = self.step.bind(bucket)
        return BoundTboPart(
            step, tuple(BoundPart(half, self.part, lands=False) for half in step.halves)
        )


@dataclass(frozen=True)
class BoundTboPart:
    """A part of both halves over a bucket; the last one tells the host what both gained."""

    step: BoundTboStep
    halves: tuple[BoundPart, ...]

    @property
    def graphs(self) -> bool:
        """Whether the attention of both halves may be recorded."""
        return all(half.graphs for half in self.halves)

    @property
    def takes(self) -> frozenset[str]:
        """What `BoundPart.takes`."""
        return self.halves[-1].takes

    def copy_in(self, count: int, **_values: Tensor) -> None:
        """Run both halves on padding if there are no requests."""
        if not count:
            for half in self.halves:
                half.copy_in(0)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule each half from its own requests' lengths."""
        begin = 0
        for half in self.halves:
            end = begin + len(half.step.inputs.roots)
            half.schedule(None if seq_lens_cpu is None else seq_lens_cpu[begin:end])
            begin = end

    def fill(self) -> None:
        """Nothing yet: each half begins where it runs."""

    def run(self) -> StepOutput:
        """Run both halves: side by side in a recording, one after the other anywhere else.

        There no request advances before both are computed, for the second may fail.

        Returns
        -------
        StepOutput
            Of the whole batch; written by the last part of a step.
        """
        device = self.step.packed.device
        if is_recording(device):
            side_by_side(device, *(partial(_fill_and_run, half) for half in self.halves))
        else:
            found = [_fill_and_compute(half) for half in self.halves]
            for half, state in zip(self.halves, found, strict=True):
                if half.last:
                    half.leave(state)
        if self.halves[-1].last:
            self.step.ring.land(self.step.packed)
        return StepOutput(self.step.packed)

    def fingerprint(self) -> Fingerprint:
        """Describe what both halves read, and the ring."""
        found = tuple(item for half in self.halves for item in half.fingerprint())
        return found + self.step.ring.fingerprint()

    def watched(self) -> tuple[object, ...]:
        """Return the objects whose attributes `fingerprint` reads, and tensors others can reach."""
        both = (one for half in self.halves for one in half.watched())
        return self, self.step, self.step.ring, *both


def _fill_and_run(half: BoundPart) -> None:
    half.fill()
    half.run()


def _fill_and_compute(half: BoundPart) -> Any:
    half.fill()
    return half.compute()
