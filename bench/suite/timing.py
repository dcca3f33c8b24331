"""CUDA graphs, replayed in turn."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

AHEAD_CYCLES = 500_000
#: Calls that a graph of one operation may have, and microseconds that its replay should take.
MOST_CALLS, REPLAY_US = 64, 4e3


@dataclass
class Recorded:
    """A graph of ``calls`` calls and the microseconds of its replays, per call."""

    graph: torch.cuda.CUDAGraph
    calls: int = 1
    times: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def record(calls: Callable[[], object], count: int = 1) -> Recorded:
    """Record a graph; ``calls`` runs once before, because compiling cannot be recorded."""
    calls()
    torch.cuda.synchronize()
    # a collection during a capture may free tensors of other graphs, which ends it
    gc.collect()
    gc.disable()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
    finally:
        gc.enable()
    graph.replay()
    torch.cuda.synchronize()
    return Recorded(graph, count)


def once(call: Callable[[], object]) -> float:
    """Microseconds of a second call, launches included."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def replay_in_turn(graphs: list[Recorded], rounds: int, budget_us: float) -> None:
    """Replay A, B, C, A, B, C, ...; a slow graph leaves the turn when its budget is spent."""
    for turn in range(rounds + 1):
        events = []
        # the launches get ahead of the device, which would otherwise wait inside a measurement
        torch.cuda._sleep(AHEAD_CYCLES)
        for recorded in graphs:
            if len(recorded.times) >= 5 and sum(recorded.times) * recorded.calls > budget_us:
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            recorded.graph.replay()
            end.record()
            events.append((recorded, begin, end))
        torch.cuda.synchronize()
        if turn:  # the first one warms up
            for recorded, begin, end in events:
                recorded.times.append(begin.elapsed_time(end) * 1e3 / recorded.calls)


def median_of(recorded: Recorded, rounds: int) -> float:
    replay_in_turn([recorded], rounds, 1e9)
    return recorded.median
