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
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specattn.buffers import expect
from specattn.errors import CapacityError, CaptureError, CaptureMismatch, NotCapturedError
from specattn.recording import Recorder
from specattn.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from specattn.buffers import Fingerprint

log = logging.getLogger(__name__)


class GraphKey(Hashable, Protocol):
    """What graphs are kept under: a `ForwardMode`, or a part of a step."""

    @property
    def value(self) -> str:
        """Its name in messages."""


Key = TypeVar("Key", bound=GraphKey)


class BoundProgram(Protocol):
    """A program over one bucket: views of the program's buffers, and what runs on them."""

    @property
    def graphs(self) -> bool:
        """Whether ``run`` may be recorded in a CUDA graph."""
        ...

    @property
    def takes(self) -> frozenset[str]:
        """The names of the values `copy_in` needs, no more and no less."""
        ...

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Copy ``count`` requests' values into the static buffers and pad the rest.

        Without values, every buffer becomes padding.
        """

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan on the host, where a library needs it."""

    def fill(self) -> None:
        """Derive everything else on the device: no sync, no argument, capturable."""

    def run(self) -> Any:
        """Run the forward; returns a frozen dataclass of tensors, batch axis first."""

    def fingerprint(self) -> Fingerprint:
        """Describe every tensor and scalar a recording of ``run`` bakes in."""

    def watched(self) -> Iterable[object]:
        """Return what a `Watch` takes: the objects whose attributes `fingerprint` reads.

        Tensors that others can reach, and so resize, come themselves, too, unless they are
        attributes of an object that is no frozen dataclass.
        """


class Program(Protocol):
    """A forward of one mode with its static buffers, sized for the largest bucket."""

    def bind(self, bucket: int) -> BoundProgram:
        """Return the program over the first ``bucket`` rows of its buffers."""


@dataclass(frozen=True)
class Captured:
    """One bucket: what runs, what was recorded, and over which memory.

    A batch that no bucket holds has neither a graph nor a ``watch``. ``order`` counts the captures
    of a runner, which took ``seconds`` each; ``nbytes`` is what the graphs' memory pool grew by.
    """

    bucket: int
    bound: BoundProgram
    fingerprint: Fingerprint
    outputs: Any
    graph: torch.cuda.CUDAGraph | None
    watch: Watch | None = field(repr=False)
    order: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def check(self) -> None:
        """Raise `CaptureMismatch` if the buffers are not those of the capture.

        `Watch` says what is compared every time and what in turn. Only if something is not what it
        was, the whole fingerprint is made again, to see whether it matters.
        """
        if self.watch is None or self.watch.unchanged():
            return
        now = self.bound.fingerprint()
        if now == self.fingerprint:
            self.watch.renew()
            return
        for (name, before), (_, after) in zip(_flat(self.fingerprint), _flat(now), strict=True):
            if before != after:
                raise CaptureMismatch(name, before, after)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan on the host for the lengths of the first requests; the others are padding."""
        if seq_lens_cpu is not None and len(seq_lens_cpu) < self.bucket:
            padding = self.bucket - len(seq_lens_cpu)
            seq_lens_cpu = torch.nn.functional.pad(seq_lens_cpu, (0, padding))
        self.bound.schedule(seq_lens_cpu)

    def replay(self) -> Any:
        """Run over the current buffers."""
        if self.graph is None:
            return _eagerly(self.bound)
        self.graph.replay()
        return self.outputs


@torch.no_grad()
def _eagerly(bound: BoundProgram) -> Any:
    """Fill and run; models may hold parameters, and what buffers hold has no history."""
    bound.fill()
    return bound.run()


def _flat(found: Fingerprint) -> list[tuple[str, object]]:
    """Return a fingerprint with settings field by field; a name may come more than once."""
    flat: list[tuple[str, object]] = []
    for name, value in found:
        if isinstance(value, dict):
            flat += [(f"{name}.{key}", part) for key, part in value.items()]
        else:
            flat.append((name, value))
    return flat


@dataclass(frozen=True)
class GraphReport:
    """What capturing one bucket took.

    Parameters
    ----------
    part : str
        The mode, or the part of a step.
    bucket : int
        The batch size.
    order : int
        How many buckets the runner had captured before.
    seconds : float
        Host time: compiling (or loading) kernels, a run or two to warm up, and the recording.
    nbytes : int
        What the memory pool that all graphs share grew by, in bytes. The largest bucket comes
        first and takes most of it. What the driver keeps of a graph is not in it.
    recorded : bool
        Whether there is a CUDA graph; without, the bucket runs eagerly over the same buffers.
    digest : str
        Of the fingerprint: 12 hexadecimal digits, the same as long as a replay finds the
        addresses, shapes and settings of the capture.
    """

    part: str
    bucket: int
    order: int
    seconds: float
    nbytes: int
    recorded: bool
    digest: str


@dataclass
class GraphStats(Generic[Key]):
    """How forwards were served, by mode."""

    replays: Counter[Key] = field(default_factory=Counter)
    eager: Counter[Key] = field(default_factory=Counter)


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
        If ``buckets`` is empty or holds a size below 1.

    Attributes
    ----------
    stats : GraphStats
        Replays, and batches that ran eagerly because no bucket was large enough or captured.
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
        self.buckets = sorted(set(buckets))
        self.stats: GraphStats[Key] = GraphStats()
        self._make, self._private, self._before = make, private, before
        records = record and device.type == "cuda"
        self._recorder = (recorder or Recorder()) if records else None
        self._captured: dict[Key, dict[int, Captured]] = {}
        self._eager: dict[Key, BoundProgram] = {}
        self._captures = 0

    @property
    def recording(self) -> bool:
        """Whether CUDA graphs are recorded at all."""
        return self._recorder is not None

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
            GraphReport(
                mode.value, one.bucket, one.order, one.seconds, one.nbytes, one.graph is not None,
                sha256(repr(_flat(one.fingerprint)).encode()).hexdigest()[:12],
            )
            for mode, done in self._captured.items() for one in done.values()
        ]
        return tuple(sorted(found, key=lambda one: one.order))

    def capture(self, mode: Key) -> None:
        """Capture every bucket of ``mode``, the largest first, on batches of padding.

        Whatever fails, buckets captured before it stay, and batches that no captured bucket holds
        run eagerly.

        Raises
        ------
        CapacityError
            If the device runs out of memory, naming the bucket.
        CaptureError
            If a launch or a library call fails (with a RuntimeError), naming mode, bucket and
            what failed.
        """
        done = self._captured.setdefault(mode, {})
        if self._before is not None:
            self._before()
        program = self._make(mode, self.buckets[-1])
        for bucket in reversed(self.buckets):
            try:
                done[bucket] = self._capture(program.bind(bucket), bucket)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"out of device memory capturing {mode.value} for a batch of {bucket}; "
                    f"batches run eagerly unless one of the buckets {sorted(done)} holds them"
                ) from error
            except RuntimeError as error:
                raise CaptureError(mode.value, bucket, error) from error

    def _capture(self, bound: BoundProgram, bucket: int) -> Captured:
        began, order = time.perf_counter(), self._captures
        self._captures += 1
        bound.copy_in(0)
        bound.schedule(torch.zeros(bucket, dtype=torch.int32))

        graph, outputs, nbytes = None, None, 0
        if self._recorder is not None and bound.graphs:
            found = self._recorder.record(partial(_eagerly, bound))
            graph, outputs, nbytes = found.graph, found.outputs, found.nbytes
        else:
            _eagerly(bound)
        watch = Watch(bound.watched(), in_turn=self._private)
        baked = bound.fingerprint()
        seconds = time.perf_counter() - began
        return Captured(bucket, bound, baked, outputs, graph, watch, order, seconds, nbytes)

    def run(
        self, mode: Key, count: int, seq_lens_cpu: Tensor | None, **values: Tensor
    ) -> Any:
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
            If `capture` was never called for ``mode``.
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
        done = self._captured.get(mode)
        if done is None:
            raise NotCapturedError(mode.value, [m.value for m in self._captured])
        captured = done.get(count) or _holding(done, count)
        if captured is None:
            log.info("%s: a batch of %d fits no captured bucket and runs eagerly", mode.value,
                     count)
            bound = self._make(mode, count).bind(count)
            self._eager[mode] = bound  # keeps the buffers of the outputs alive
            return Captured(count, bound, (), None, None, None)
        captured.check()
        return captured

    def replay(self, mode: Key, ready: Captured) -> Any:
        """Run what is `ready` over its buffers, and count it."""
        (self.stats.replays if ready.watch else self.stats.eager)[mode] += 1
        return ready.replay()


def _holding(done: dict[int, Captured], count: int) -> Captured | None:
    """Return the smallest bucket that holds ``count`` requests, if any does."""
    return done.get(min((size for size in done if size >= count), default=0))


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
