"""Launching for practice, so that the host's caches hold what the next launch needs."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from specattn.cuda_graph import GraphStats
from specattn.speculative.host_buffers import HostBuffers, InFlight

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.cuda_graph import Captured
    from specattn.cuda_graph.recorder import Recorder
    from specattn.speculative.step_parts import StepPart

    Replay = Callable[[StepPart, Captured], Any]

#: Seconds from one rehearsal to the next, at the least.
PACE = 200e-6


class Aside:
    """Where launches are rehearsed: turns, a stream, and a graph of one small kernel.

    They share nothing with a step's, and neither waits for the other.

    Parameters
    ----------
    like : HostBuffers
        The ring of the steps.
    recorder : Recorder or None
        What records the graph; without, nothing is replayed.
    """

    def __init__(self, like: HostBuffers, recorder: Recorder | None) -> None:
        device = like.turn.device
        _, batch, width = like.packed.shape
        ring = HostBuffers.alloc(1, batch, width, device)
        self._turns = InFlight(ring)
        self._stats: GraphStats[StepPart] = GraphStats()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: Any = nullcontext()
        self._next = 0.0
        if recorder is not None:
            self._graph = recorder.record(lambda: ring.turn.fill_(0)).graph
            self._stream = torch.cuda.stream(torch.cuda.Stream(device))

    @property
    def due(self) -> bool:
        """Whether the last rehearsal is `PACE` ago, and what it launched has run."""
        now = time.perf_counter()
        return now >= self._next and all(step.ready for step in self._turns.in_flight)

    def run(self, launch: Callable[[InFlight, Replay], object]) -> None:
        """Read what the last rehearsal launched, and launch the next; it must be `due`."""
        self._turns.settle()
        with self._stream:
            launch(self._turns, self._replay)
        self._next = time.perf_counter() + PACE

    def _replay(self, part: StepPart, ready: Captured) -> None:
        self._stats.count(part, ready)
        if self._graph is not None:
            self._graph.replay()
