"""Programs per batch bucket, captured and replayed.

A program runs over static buffers. Capture records its ``run``, replay replays the recording.
Without CUDA, or with a backend whose ``run`` cannot be recorded, the "graph" is the call itself
over the same buffers, with the same checks: any machine tests everything but the recording.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Hashable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specattn.autocast import without_autocast
from specattn.checks import listed, whole_numbers
from specattn.cuda_graph.recorder import Recorder
from specattn.errors import CapacityError, CaptureError, CaptureMismatch, NotCapturedError
from specattn.kernels import TritonModule, check_current, uses_triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from specattn.buffers import Fingerprint
    from specattn.kernels import ahead
else:
    ahead = TritonModule("specattn.kernels.ahead")

log = logging.getLogger(__name__)


class GraphKey(Hashable, Protocol):
    """A key of graphs, such as a part of a step."""

    @property
    def value(self) -> str:
        """Its name in messages."""


Key = TypeVar("Key", bound=GraphKey)


class Program(Protocol):
    """The program of one bucket, over static buffers."""

    @property
    def graphs(self) -> bool:
        """Whether ``run`` may be recorded in a CUDA graph."""

    def pad(self) -> None:
        """Turn all requests into padding."""

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan on the host, where a library needs it."""

    def run(self) -> None:
        """Run: no sync, no argument, capturable."""

    def holders(self) -> Sequence[Iterable[object]]:
        """Return what holds tensors whose addresses every replay compares, among other values."""

    def fingerprint(self) -> Fingerprint:
        """Describe every tensor and scalar that a recording of ``run`` bakes in."""


@dataclass(frozen=True)
class GraphReport:
    """The time and memory that capturing one bucket took.

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
        addresses, shapes and configs of the capture.
    """

    part: str
    bucket: int
    order: int
    seconds: float
    nbytes: int
    recorded: bool
    digest: str


@dataclass(frozen=True)
class Captured:
    """One bucket of a mode: its program, recording and addresses.

    A batch that no bucket holds has neither a graph, nor ``addresses``, nor a ``report`` of what
    the capture took.
    """

    bucket: int
    program: Program
    graph: torch.cuda.CUDAGraph | None = None
    fingerprint: Fingerprint = ()
    holders: Sequence[Iterable[object]] = field(default=(), repr=False)
    addresses: list[int] | None = field(default=None, repr=False)
    report: GraphReport | None = None

    def check(self) -> None:
        """Raise `CaptureMismatch` if a tensor is elsewhere than when it was captured."""
        if self.addresses is not None and _addresses(self.holders) != self.addresses:
            self.compare()

    def compare(self) -> None:
        """Compare everything that the capture baked in; raise `CaptureMismatch` for the first."""
        if self.addresses is None:
            return
        now = _flat(self.program.fingerprint())
        for (name, before), (_, after) in zip(_flat(self.fingerprint), now, strict=True):
            if before != after:
                raise CaptureMismatch(name, before, after)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan on the host for these lengths; other requests are padding."""
        if seq_lens_cpu is not None and len(seq_lens_cpu) < self.bucket:
            padding = self.bucket - len(seq_lens_cpu)
            seq_lens_cpu = torch.nn.functional.pad(seq_lens_cpu, (0, padding))
        self.program.schedule(seq_lens_cpu)

    def replay(self) -> None:
        """Run over the current buffers."""
        if self.graph is None:
            _run(self.program)
        else:
            self.graph.replay()


@dataclass
class GraphStats(Generic[Key]):
    """Numbers of batches served, by mode."""

    replays: Counter[Key] = field(default_factory=Counter)
    eager: Counter[Key] = field(default_factory=Counter)


class GraphRunner(Generic[Key]):
    """Captures and replays programs, keyed by mode and bucket.

    Buckets of a mode may share storage, so one is in flight at a time.

    Parameters
    ----------
    make : callable
        ``make(mode, bucket)`` returns the `Program` of a mode for a bucket, or for a batch size
        beyond all of them.
    buckets : sequence of int
        Batch sizes to capture.
    device : torch.device
        Where the buffers live.
    record : bool
        Whether to record CUDA graphs; off, everything runs eagerly over the static buffers.
    recorder : Recorder, optional
        Whose memory pool to record into; runners that share one must not run at the same time.
    before : callable, optional
        Called before every capture, which runs the program on padding and so overwrites what it
        has left where others read it.
    capturing : callable
        Gives what surrounds the capture of a bucket, its warm-up included: it is left when the
        capture fails, too. A stream that it makes the current one waits for the caller's, and the
        caller's for it.
    probes : sequence of int
        Buckets that `compile` looks at besides the largest, for they have kernels of their own.

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

    def __init__(  # noqa: PLR0913 - a constructor
        self,
        make: Callable[[Key, int], Program],
        buckets: Sequence[int],
        device: torch.device,
        *,
        record: bool = True,
        recorder: Recorder | None = None,
        before: Callable[[], None] | None = None,
        capturing: Callable[[], AbstractContextManager[object]] = nullcontext,
        probes: Sequence[int] = (),
    ) -> None:
        self.buckets, self._probes = _checked(buckets), probes
        check_current(device)
        self.stats: GraphStats[Key] = GraphStats()
        self._make, self._before, self._capturing = make, before, capturing
        self._device, self._cuda = device, device.type == "cuda"
        self.recorder = (recorder or Recorder()) if record and self._cuda else None
        self._captured: dict[Key, dict[int, Captured]] = {}
        # what `ready` found; a host that has waited for a step is slow to search
        self._found: dict[tuple[tuple[Key, ...], int], list[Captured]] = {}
        # buckets that nothing was compiled for before their captures
        self._unseen: list[tuple[Key, int]] = []
        # keeps the buffers of what ran eagerly alive
        self._eager: dict[Key, Program] = {}
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
        """Return what capturing took, in the order of the captures."""
        done = [one for buckets in self._captured.values() for one in buckets.values()]
        found = [one.report for one in done if one.report is not None]
        return tuple(sorted(found, key=lambda one: one.order))

    def compile(self, modes: Sequence[Key]) -> None:
        """Compile what modes launch, side by side, before they are captured.

        Captures would compile one kernel after another. Here every bucket runs on padding, and
        launches no kernel of this library (`compile_ahead`). If the largest and the ``probes`` find
        all they need in Triton's cache, the others are left out, until a capture lacks a kernel.
        What fails is left to the captures.
        """
        if not modes or not uses_triton(self._device):
            return
        if self._before is not None:
            self._before()
        self._unseen = [(mode, at) for mode in modes for at in reversed(self.buckets)]
        largest = self._unseen.pop(0)
        first = [largest, *((modes[0], at) for at in self._probes)]
        if self._compile(first, padded=False) or _ranks() > 1:
            self._compile_unseen()

    def _compile_unseen(self) -> None:
        """Compile what buckets launch that were left out and are not captured."""
        unseen, self._unseen = self._unseen, []
        wanted = [(mode, at) for mode, at in unseen if at not in self._captured.get(mode, {})]
        if wanted:
            self._compile(wanted)

    def _compile(self, wanted: Sequence[tuple[Key, int]], *, padded: bool = True) -> int:
        """Compile side by side what buckets launch; return the kernels' number."""
        began, compiled = time.perf_counter(), 0
        try:
            if not padded:
                # buckets share buffers, whose rows may still be those of requests
                with self._surrounded():
                    _pad(self._make(*wanted[0]), wanted[0][1])
            calls = [partial(self._run_padded, *one) for one in wanted]
            compiled = ahead.compile_ahead(calls, self._device)
        except Exception as error:
            log.info("kernels are compiled one by one: %s", error)
        seconds = time.perf_counter() - began
        if compiled:
            log.info("compiled %d kernels side by side in %.1f s", compiled, seconds)
        return compiled

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
        for bucket in reversed(self.buckets):
            lacking: AbstractContextManager[list[str]] = nullcontext([])
            if self._unseen:
                lacking = ahead.compiled()
            try:
                with self._surrounded(), lacking as kernels:
                    captured = self._capture(mode, bucket)
                done[bucket] = captured
                self._found.clear()
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"out of device memory capturing {mode.value} for a batch of {bucket}; "
                    f"batches run eagerly unless one of the buckets {sorted(done)} holds them; "
                    "capture smaller ones, or leave more memory free"
                ) from error
            except RuntimeError as error:
                raise CaptureError(mode.value, bucket, error) from error
            if kernels:
                self._compile_unseen()

    def leave_eager(self, modes: Iterable[Key]) -> None:
        """Let modes run eagerly of which nothing was captured."""
        for mode in modes:
            self._captured.setdefault(mode, {})

    @contextmanager
    def _surrounded(self) -> Iterator[None]:
        """Enter what surrounds a capture, in order with the caller's stream."""
        if not self._cuda:
            with self._capturing():
                yield
            return
        outer = torch.cuda.current_stream()
        with self._capturing():
            inner = torch.cuda.current_stream()
            if inner == outer:
                yield
                return
            inner.wait_stream(outer)
            try:
                yield
            finally:
                outer.wait_stream(inner)

    def _capture(self, mode: Key, bucket: int) -> Captured:
        program = self._make(mode, bucket)
        began, order = time.perf_counter(), self._captures
        self._captures += 1
        _pad(program, bucket)
        graph, nbytes = None, 0
        if self.recorder is not None and program.graphs:
            found = self.recorder.record(lambda: _run(program))
            graph, nbytes = found.graph, found.nbytes
        else:
            _run(program)
        holders, baked = program.holders(), program.fingerprint()
        seconds, recorded = time.perf_counter() - began, graph is not None
        digest = sha256(repr(_flat(baked)).encode()).hexdigest()[:12]
        report = GraphReport(mode.value, bucket, order, seconds, nbytes, recorded, digest)
        return Captured(bucket, program, graph, baked, holders, _addresses(holders), report)

    def _run_padded(self, mode: Key, bucket: int) -> None:
        """Run a bucket on padding as a capture does, without recording it."""
        with self._surrounded():
            program = self._make(mode, bucket)
            _pad(program, bucket)
            if self.recorder is not None and program.graphs:
                self.recorder.warm_up(lambda: _run(program))
            else:
                _run(program)

    def ready(self, modes: tuple[Key, ...], count: int) -> list[Captured]:
        """Return what will serve ``count`` requests in modes that share buffers.

        That is the smallest bucket which every one of them has captured. Where none holds the
        requests, all modes run eagerly. The caller fills their inputs, schedules and replays.

        Raises
        ------
        NotCapturedError
            If a mode was never captured.
        CaptureMismatch
            If tensors that a graph baked in have moved; nothing has run then.
        """
        found = self._found.get((modes, count))
        if found is None:
            found = self._serving(modes, count)
            if not found:
                return [self._eagerly(mode, count) for mode in modes]
            self._found[modes, count] = found
        for captured in found:
            captured.check()
        return found

    def replay(self, mode: Key, ready: Captured) -> None:
        """Run what is `ready` over its buffers, and count it."""
        (self.stats.eager if ready.addresses is None else self.stats.replays)[mode] += 1
        ready.replay()

    def _serving(self, modes: tuple[Key, ...], count: int) -> list[Captured]:
        """Return the smallest bucket of all modes, or an empty list."""
        for mode in modes:
            if mode not in self._captured:
                raise NotCapturedError(mode.value, [m.value for m in self._captured])
        done = [self._captured[mode] for mode in modes]
        common = set(done[0]).intersection(*done[1:])
        size = min((size for size in common if size >= count), default=None)
        return [] if size is None else [one[size] for one in done]

    def _eagerly(self, mode: Key, count: int) -> Captured:
        log.info("%s: a batch of %d fits no captured bucket and runs eagerly", mode.value, count)
        program = self._eager[mode] = self._make(mode, count)
        return Captured(count, program)


@torch.no_grad()
@without_autocast
def _run(program: Program) -> None:
    """Run without gradients: models may hold parameters, and buffers have no history."""
    program.run()


def _pad(program: Program, bucket: int) -> None:
    """Turn all requests into padding, and plan it on the host."""
    program.pad()
    program.schedule(torch.zeros(bucket, dtype=torch.int32))


def _ranks() -> int:
    """Return how many processes may wait for each other in a forward."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def _checked(buckets: Sequence[int]) -> list[int]:
    buckets = listed("buckets", buckets, "batch sizes")
    whole_numbers("every bucket", buckets)
    if not buckets or min(buckets) < 1:
        raise ValueError(f"buckets must be batch sizes of at least 1, got {buckets}")
    return sorted(set(buckets))


def _addresses(holders: Iterable[Iterable[object]]) -> list[int]:
    found = chain.from_iterable(holders)
    return [value.data_ptr() for value in found if isinstance(value, Tensor)]


def _flat(found: Fingerprint) -> list[tuple[str, object]]:
    """Return a fingerprint with configs field by field."""
    flat: list[tuple[str, object]] = []
    for name, value in found:
        if isinstance(value, dict):
            flat += [(f"{name}.{key}", part) for key, part in value.items()]
        else:
            flat.append((name, value))
    return flat
