"""Records CUDA graphs; a failed recording leaves torch as it was."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from specattn.cuda_graph import driver
from specattn.cuda_graph.memset_nodes import replace_memsets
from specattn.cuda_graph.streams import give_workspaces, own_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


@dataclass(frozen=True)
class Recording(Generic[T]):
    """A graph, what its call returned, and its bytes."""

    graph: torch.cuda.CUDAGraph
    outputs: T
    nbytes: int


class Recorder:
    """Records graphs of the current device that share one memory pool.

    Graphs of all recorders of a device multiply in one workspace of cuBLAS, so they must not run
    at the same time.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None

    def record(self, step: Callable[[], T]) -> Recording[T]:
        """Run ``step`` (the first one twice) and record it.

        After an error, eager calls, earlier graphs and later recordings (in a pool of their own)
        work.

        Raises
        ------
        Exception
            Whatever failed first, in ``step`` or in CUDA.
        """
        self.warm_up(step)
        if self._pool is None:
            # the first time a library may choose anew on its second call
            self.warm_up(step)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            if self._pool is None:
                self._begin_pool()
            with _recording(graph, self._pool):
                # what is free outside the pool was given back when the recording began
                before = torch.cuda.memory_reserved()
                found = step()
                grown = torch.cuda.memory_reserved() - before
            replace_memsets(graph)
            instantiate(graph)
        except Exception:
            _clear(self._pool)
            self._pool = None
            raise
        return Recording(graph, found, grown)

    def _begin_pool(self) -> None:
        """Begin a pool that lives as long as this recorder.

        By itself a pool ends with the last graph that was recorded into it, and what is recorded
        after that fails if anything in it is still in use, as what a step keeps may be.
        """
        self._pool = torch.cuda.graph_pool_handle()
        number, self._anchor = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
        with _recording(self._anchor, self._pool):
            number.zero_()

    def warm_up(self, step: Callable[[], Any]) -> None:
        """Compile kernels and create library handles outside the recording.

        On the stream that is recorded, where products have a workspace by then.
        """
        give_workspaces(torch.cuda.current_device())
        stream, current = _work_stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                step()
        finally:
            current.wait_stream(stream)


def instantiate(graph: torch.cuda.CUDAGraph) -> None:
    """Instantiate a graph made with ``keep_graph=True``, and upload it.

    Else its first launch would, while its caller waits for a step.
    """
    graph.instantiate()
    stream = torch.cuda.current_stream().cuda_stream
    driver.call("cuGraphUpload", graph.raw_cuda_graph_exec(), stream)


def is_recording(device: torch.device) -> bool:
    """Return whether launches on a device's current stream are recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def side_by_side(device: torch.device, *calls: Callable[[], object]) -> None:
    """Record up to two calls, neither of which waits.

    They write different memory, and what one of them writes the other does not read. The last of
    two is recorded on a stream that leaves the current one here and joins it again at the end.
    Memory that a call frees is reused by what is recorded later on the same stream alone (torch's
    allocator keeps free blocks by stream, also in the pool of a graph), and so in order; that holds
    as long as a call neither returns nor is handed tensors that are allocated while recording. The
    stream is the same for all recordings, which may then reuse each other's blocks.
    """
    first, *others = calls
    if not others:
        first()
        return
    (second,) = others
    current = torch.cuda.current_stream(device)
    side = own_stream("side", current.device_index)
    with _joining(current, side):
        with torch.cuda.stream(side):
            second()
        first()


@contextlib.contextmanager
def _joining(current: torch.cuda.Stream, side: torch.cuda.Stream) -> Iterator[None]:
    """Let a stream leave the current one, and join it again."""
    side.wait_stream(current)
    try:
        yield
    except BaseException:
        # what failed may have ended the recording
        with contextlib.suppress(RuntimeError):
            current.wait_stream(side)
        raise
    current.wait_stream(side)


def _work_stream() -> torch.cuda.Stream:
    return own_stream("work", torch.cuda.current_device())


@contextlib.contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record into ``graph``; of a failure, raise what failed first.

    The end of a recording that CUDA has cut short fails, too, and then torch does not restore the
    stream.
    """
    failed: Exception | None = None
    stream = torch.cuda.current_stream()
    begin, work = own_stream("begin", torch.cuda.current_device()), _work_stream()
    try:
        with (
            torch.cuda.stream(stream),
            no_collection(),
            torch.cuda.graph(graph, pool=pool, stream=begin),
        ):
            try:
                with _joining(begin, work), torch.cuda.stream(work):
                    yield
            except Exception as error:
                failed = error
                raise
    except Exception as error:
        if failed is None or failed is error:
            raise
        raise failed  # noqa: B904 - what came later explains nothing


def _clear(pool: Any) -> None:
    """Undo what torch leaves of a recording that could not end.

    Its allocator takes ``pool`` for one that is still recorded to, and refuses to free memory.
    Its generator takes random numbers for recorded ones, and refuses to draw any, until another
    recording has ended.
    """
    # a RuntimeError says that there is nothing to end, or that CUDA is past all help
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    begin = own_stream("begin", torch.cuda.current_device())
    with contextlib.suppress(RuntimeError), no_collection(), torch.cuda.stream(begin):
        number, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
        graph.capture_begin()
        number.zero_()
        graph.capture_end()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from destroying a graph, which would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
