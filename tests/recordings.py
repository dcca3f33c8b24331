"""One recording over the tensors of a case, replayed for others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.cuda_graph import GraphRunner
    from tests.oracle import Case


def forget(runner: GraphRunner[Any], *modes: Any) -> None:
    """Leave a runner as captures of these modes do that all failed."""
    for mode in modes:
        runner._captured[mode].clear()
    runner._found.clear()


def recorded(step: Callable[[], Any]) -> Callable[[], Any]:
    """Record a step and return its replay; without a GPU, the step itself."""
    if not torch.cuda.is_available():
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def refill(static: Case, case: Case) -> None:
    """Put a case's numbers where the recording of another one of its shape reads them."""
    for name in ("q", "k_cache", "v_cache"):
        getattr(static, name).copy_(getattr(case, name))
    for name, value in case.args.items():
        static.args[name].copy_(value)
    static.clear()
