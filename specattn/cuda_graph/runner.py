"""Captured forwards per batch bucket: one path for eager, capture and replay.

Every forward goes bind -> copy_in -> schedule -> fill -> run. Capture is the same with ``fill``
and ``run`` recorded, replay the same with the recording replayed. Without CUDA, or with a backend
whose ``run`` cannot be recorded, the "graph" is the call itself over the same static buffers,
with the same checks, so that everything but the recording is tested on any machine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from specattn.checks import expect
from specattn.cuda_graph.capture_guard import Watch
from specattn.cuda_graph.captured import Captured, run_eagerly
from specattn.cuda_graph.programs import Key
from specattn.cuda_graph.recorder import Recorder
from specattn.errors import CapacityError, CaptureError, NotCapturedError
from specattn.kernels import check_current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from specattn.cuda_graph.captured import GraphReport
    from specattn.cuda_graph.programs import BoundProgram, Program

log = logging.getLogger(__name__)


@dataclass
class GraphStats(Generic[Key]):
    """How forwards were served, by mode."""

    replays: Counter[Key] = field(default_factory=Counter)
    eager: Counter[Key] = field(default_factory=Counter)

    def count(self, mode: Key, ready: Captured) -> None:
        """Count a forward of ``mode`` that ``ready`` serves."""
        (self.replays if ready.watch else self.eager)[mode] += 1


class GraphRunner(Generic[Key]):
    """Captures and replays programs, keyed by mode and bucket.

    Two buckets of a mode share storage, so one is in flight at a time, and what `run` returns is
    overwritten by the next call of the same mode: clone what must live longer.

    Parameters
    ----------
    make : callable
        ``make(mode, batch)`` returns the `Program` of a mode with buffers for ``batch`` requests.
    buckets : sequence of int
        Batch sizes to capture.
    device : torch.device
        Where the buffers live.
    record : bool
        Whether to record CUDA graphs; off, everything runs eagerly over the static buffers.
    recorder : Recorder, optional
        Whose memory pool to record into; runners that share one must not run at the same time.
    private : bool
        Whether nobody is handed what programs bind, so that a replay need compare every time only
        what others can reach (see `Watch`) and the rest in turn.
    before : callable, optional
        Called before every capture, which runs the program on padding and so overwrites what it
        has left where others read it.

    Raises
    ------
    ValueError
        If ``buckets`` is empty or holds a size below 1, or ``device`` is a CUDA device other than
        the current one, on which kernels would be launched.

    Attributes
    ----------
    stats : GraphStats
        Replays, and batches that ran eagerly because no bucket was large enough or captured.
    recorder : Recorder or None
        What records the graphs; None where none are.
    """

    def __init__(
        self,
        make: Callable[[Key, int], Program],
        buckets: Sequence[int],
        device: torch.device,
        *,
        record: bool = True,
        recorder: Recorder | None = None,
        private: bool = False,
        before: Callable[[], None] | None = None,
    ) -> None:
        if not buckets or min(buckets) < 1:
            raise ValueError(f"buckets must be batch sizes of at least 1, got {list(buckets)}")
        check_current(device)
        self.buckets = sorted(set(buckets))
        self.stats: GraphStats[Key] = GraphStats()
        self._make, self._private, self._before = make, private, before
        records = record and device.type == "cuda"
        self.recorder = (recorder or Recorder()) if records else None
        self._captured: dict[Key, dict[int, Captured]] = {}
        # what `_serving` found; a host that has waited for a step is slow to search
        self._found: dict[tuple[tuple[Key, ...], int], list[Captured] | None] = {}
        self._eager: dict[Key, BoundProgram] = {}
        self._captures = 0

    @property
    def recording(self) -> bool:
        """Whether CUDA graphs are recorded at all."""
        return self.recorder is not None

    def captured(self, mode: Key) -> list[int]:
        """Return the buckets of ``mode`` that can be replayed."""
        return sorted(self._captured.get(mode, {}))

    def recorded(self, mode: Key) -> bool:
        """Return whether replays of ``mode`` replay CUDA graphs."""
        done = self._captured.get(mode, {})
        return any(captured.graph is not None for captured in done.values())

    def reports(self) -> tuple[GraphReport, ...]:
        """Return what capturing took, bucket by bucket, in the order of the captures."""
        found = [
            one.report(mode.value) for mode, done in self._captured.items() for one in done.values()
        ]
        return tuple(sorted(found, key=lambda one: one.order))

    def capture(self, mode: Key) -> None:
        """Capture every bucket of ``mode``, the largest first, on batches of padding.

        Whatever fails, buckets captured before it stay, and batches that no captured bucket holds
        run eagerly.

        Raises
        ------
        CapacityError
            If the device runs out of memory, naming the bucket: the largest if its buffers find
            no room.
        CaptureError
            If a launch or a library call fails (with a RuntimeError), naming mode, bucket and
            what failed.
        """
        done = self._captured.setdefault(mode, {})
        if self._before is not None:
            self._before()
        program: Program | None = None
        for bucket in reversed(self.buckets):
            try:
                if program is None:
                    program = self._make(mode, bucket)
                done[bucket] = self._capture(program.bind(bucket), bucket)
                self._found.clear()
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"out of device memory capturing {mode.value} for a batch of {bucket}; "
                    f"batches run eagerly unless one of the buckets {sorted(done)} holds them"
                ) from error
            except RuntimeError as error:
                raise CaptureError(mode.value, bucket, error) from error

    def leave_eager(self, modes: Iterable[Key]) -> None:
        """Let modes run eagerly of which nothing was captured; what was captured is replayed."""
        for mode in modes:
            self._captured.setdefault(mode, {})

    def _capture(self, bound: BoundProgram, bucket: int) -> Captured:
        began, order = time.perf_counter(), self._captures
        self._captures += 1
        bound.copy_in(0)
        bound.schedule(torch.zeros(bucket, dtype=torch.int32))

        graph, outputs, nbytes = None, None, 0
        if self.recorder is not None and bound.graphs:
            found = self.recorder.record(partial(run_eagerly, bound))
            graph, outputs, nbytes = found.graph, found.outputs, found.nbytes
        else:
            run_eagerly(bound)
        watch = Watch(bound.watched(), in_turn=self._private)
        baked = bound.fingerprint()
        seconds = time.perf_counter() - began
        return Captured(bucket, bound, baked, outputs, graph, watch, order, seconds, nbytes)

    def run(self, mode: Key, count: int, seq_lens_cpu: Tensor | None, **values: Tensor) -> Any:
        """Run ``mode`` over ``count`` requests.

        Parameters
        ----------
        mode : Key
            A captured mode.
        count : int
            Requests.
        seq_lens_cpu : Tensor or None
            ``[count]`` int32 on the host, for backends that plan there.
        **values : Tensor
            The program's inputs, ``[count, ...]``.

        Returns
        -------
        object
            The program's outputs, first ``count`` rows; valid until the next run of this mode.

        Raises
        ------
        NotCapturedError
            If neither `capture` nor `leave_eager` was called for ``mode``.
        CaptureMismatch
            If a buffer the graph reads is not the one it was captured with.
        ValueError
            If a value is missing, unknown, or not of the declared shape and dtype; nothing has
            been written or launched then.
        """
        check_lens(seq_lens_cpu, count)
        ready = self.ready(mode, count)
        _copy_in(ready.bound, count, values)
        ready.schedule(seq_lens_cpu)
        return head(self.replay(mode, ready), count)

    def ready(self, mode: Key, count: int) -> Captured:
        """Return what will serve ``count`` requests: the smallest bucket that holds them.

        The caller hands it their values, schedules and has it replayed, as `run` does.

        Raises
        ------
        NotCapturedError, CaptureMismatch
            As `run`.
        """
        return self.ready_together((mode,), count)[0]

    def ready_together(self, modes: tuple[Key, ...], count: int) -> list[Captured]:
        """Return what will serve ``count`` requests in modes that hand each other their buffers.

        That is the smallest bucket which every one of them has captured. Where none holds the
        requests, all modes run eagerly, over one program if ``make`` returns parts of one.

        Raises
        ------
        NotCapturedError, CaptureMismatch
            As `run`, before anything has run.
        """
        found = self._find(modes, count)
        if found is None:
            return [self._eagerly(mode, count) for mode in modes]
        for captured in found:
            captured.check()
        return found

    def holds(self, modes: tuple[Key, ...], count: int) -> bool:
        """Return whether a captured bucket serves so many requests in all of these modes.

        Raises
        ------
        NotCapturedError
            As `run`.
        """
        return self._find(modes, count) is not None

    def _find(self, modes: tuple[Key, ...], count: int) -> list[Captured] | None:
        try:
            return self._found[modes, count]
        except KeyError:
            found = self._found[modes, count] = self._serving(modes, count)
            return found

    def _serving(self, modes: tuple[Key, ...], count: int) -> list[Captured] | None:
        """Return the smallest bucket that holds so many requests in all modes, if there is one."""
        for mode in modes:
            if mode not in self._captured:
                raise NotCapturedError(mode.value, [m.value for m in self._captured])
        done = [self._captured[mode] for mode in modes]
        common = set(done[0]).intersection(*done[1:])
        size = min((size for size in common if size >= count), default=None)
        return None if size is None else [one[size] for one in done]

    def _eagerly(self, mode: Key, count: int) -> Captured:
        log.info("%s: a batch of %d fits no captured bucket and runs eagerly", mode.value, count)
        bound = self._make(mode, count).bind(count)
        self._eager[mode] = bound  # keeps the buffers of the outputs alive
        return Captured(count, bound, (), None, None, None)

    def replay(self, mode: Key, ready: Captured) -> Any:
        """Run what is `ready` over its buffers, and count it."""
        self.stats.count(mode, ready)
        return ready.replay()


def check_lens(seq_lens_cpu: Tensor | None, count: int) -> None:
    """Raise a ValueError unless the lengths, if any, are ``[count]`` int32 on the host."""
    if seq_lens_cpu is not None:
        expect("seq_lens_cpu", seq_lens_cpu, (count,), torch.int32, torch.device("cpu"))


def _copy_in(bound: BoundProgram, count: int, values: dict[str, Tensor]) -> None:
    if values.keys() != bound.takes:
        missing, unknown = bound.takes - values.keys(), values.keys() - bound.takes
        raise ValueError(f"values missing: {sorted(missing)}; unknown: {sorted(unknown)}")
    for name, value in values.items():
        rows = len(value) if value.dim() else 0
        if rows != count:
            raise ValueError(f"{name} must have {count} rows, got {rows}")
    bound.copy_in(count, **values)


def head(outputs: Any, count: int) -> Any:
    """Return the outputs' first ``count`` rows."""
    parts = {
        name: value[:count] for name, value in vars(outputs).items() if isinstance(value, Tensor)
    }
    return replace(outputs, **parts)
