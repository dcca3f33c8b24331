"""CUDA graphs: recording one, and leaving torch as it was if that fails."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


class Recorder:
    """Records graphs of the current device that share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run ``step`` twice, record it, and return the graph and what ``step`` returned.

        If it fails, what failed first is raised; eager calls, earlier graphs and later recordings
        (in a pool of their own) work.
        """
        self._warm_up(step)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with _recording(graph, self._pool):
                found = step()
        except Exception:
            _clear(self._pool)
            self._pool = None
            raise
        return graph, found

    def _warm_up(self, step: Callable[[], Any]) -> None:
        """Compile kernels and create library handles outside the recording."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    step()
        finally:
            current.wait_stream(stream)


@contextlib.contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record into ``graph``; of a failure, raise what failed first.

    The end of a recording that CUDA has cut short fails, too, and then torch does not restore the
    stream.
    """
    failed: Exception | None = None
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.stream(stream), no_collection(), torch.cuda.graph(graph, pool=pool):
            try:
                yield
            except Exception as error:
                failed = error
                raise
    except Exception as error:
        if failed is None or failed is error:
            raise
        raise failed  # noqa: B904 - what came later explains nothing


def _clear(pool: Any) -> None:
    """Undo what torch leaves of a recording that CUDA has cut short, and torch could not end.

    Its allocator takes ``pool`` for one that is still recorded to, and refuses to free memory.
    Its generator takes random numbers for recorded ones, and refuses to draw any, until another
    recording has ended.
    """
    # a RuntimeError says that there is nothing to end, or that CUDA is past all help
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with contextlib.suppress(RuntimeError), no_collection(), torch.cuda.stream(torch.cuda.Stream()):
        number, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
        graph.capture_begin()
        number.zero_()
        graph.capture_end()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: to destroy another graph would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
