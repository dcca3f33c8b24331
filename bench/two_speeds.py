"""At which of two speeds graphs of small kernels run, after what a process has done.

On an H200 a kernel that waits for the one before it takes 0.18 us more, or less, in all graphs and
on all streams of a process, until something changes that. A graph of tiny kernels shows which.
Steps of the shipped pair are timed beside it, with transformers' modules, whose kernels are many
and small, or with the fused ones, whose kernels mostly do not wait for each other's ends.

What changes the speed stays changed, so every list of things to do has a process of its own.

    python -m bench.two_speeds [--lists graphs fused] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from bench.decode import CONTEXT, TREES
from bench.decode_paired import SEAMS, Rebuild
from bench.shipped import pair
from bench.step_timing import between, mark
from bench.suite.machine import machine
from bench.suite.seams import DEVICE
from specattn.config import SpecConfig
from specattn.cuda_graph.recorder import Recorder
from specattn.kernels.launch import enter, launch_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SETTING = "topk 8, 64 nodes"
STEPS, TURNS = 6, 3
TINY, REPLAYS = 1200, 10


@triton.jit
def _count_kernel(number, PDL: tl.constexpr):
    enter(PDL)
    tl.store(number, tl.load(number) + 1)


class Process:
    """What is timed in a process, and what it may do besides.

    Parameters
    ----------
    models : tuple, optional
        Target and draft, if steps are timed.
    prompt : list of int
        Of their one request.
    device : torch.device or str
        Where.
    """

    def __init__(
        self, models: tuple[Any, Any] | None, prompt: list[int], device: torch.device | str
    ) -> None:
        self.models, self.prompt = models, prompt
        self.kept: list[Any] = []
        self.steps: Rebuild | None = None
        self.number = torch.zeros(1, device=device)
        self._tiny = self._graph(TINY) if self.number.is_cuda else None

    def _graph(self, kernels: int) -> torch.cuda.CUDAGraph:
        """Record kernels that wait for each other, instantiate the graph, and bring it there."""

        def add() -> None:
            for _ in range(kernels):
                self.number.add_(1)

        return Recorder().record(add).graph

    def launches(self) -> None:
        """Launch 30,000 kernels."""
        for _ in range(30_000):
            self.number.add_(1)

    def stream(self) -> None:
        """Launch a kernel on a stream that is new."""
        with torch.cuda.stream(torch.cuda.Stream()):
            self.number.add_(1)

    def graph(self) -> None:
        """Record a graph of 300 kernels and upload it."""
        self.kept.append(self._graph(300))

    def products(self) -> None:
        """Multiply matrices."""
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 64, 512):
                matrix = torch.ones(rows, 4096, dtype=dtype, device=self.number.device)
                torch.nn.functional.linear(matrix, matrix.new_ones(4096, 4096))

    def early(self) -> None:
        """Launch four kernels that may start early."""
        for _ in range(4):
            _count_kernel[(1,)](self.number, **launch_options(self.number.device))

    def wait(self) -> None:
        """Do nothing for a second."""
        time.sleep(1)

    def engine(self) -> None:
        """Make an engine with its graphs, and run the prompt."""
        assert self.models is not None
        config = SpecConfig(*TREES[SETTING], CONTEXT, 1)
        self.kept.append(self.steps)
        self.steps = Rebuild(self.models, [self.prompt], config, 0)
        self.steps.admit(0.0)

    def times(self) -> dict[str, float]:
        """Return microseconds of a step by seams, of an engine's, and of the tiny kernels' graph.

        That of the tiny kernels is timed before the steps and after them.
        """
        times = {"tiny": self._replay()} if self._tiny else {}
        if self.steps is not None:
            found = {way: [] for way in SEAMS}
            for _ in range(TURNS):
                for way, us in found.items():
                    us.append(self.steps.turn(way, STEPS, ahead=True).us[DEVICE])
            times |= {way: round(statistics.median(us), 1) for way, us in found.items()}
            times |= {"tiny, then": self._replay()} if self._tiny else {}
        return times

    def _replay(self) -> float:
        assert self._tiny is not None
        found = []
        for _ in range(TURNS):
            begin = mark(self.number.device)
            for _ in range(REPLAYS):
                self._tiny.replay()
            end = mark(self.number.device)
            torch.cuda.synchronize()
            found.append(between(begin, end) / REPLAYS)
        return round(statistics.median(found), 1)


#: What a process does, by a name; those whose models are named time steps.
LISTS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "launches": (None, ("launches", "stream", "stream", "early", "wait")),
    "graphs": (None, ("graph", "graph", "stream", "early", "early", "wait")),
    "products": (None, ("products", "early", "early", "stream", "early", "wait")),
    "transformers": (
        "transformers",
        ("engine", "wait", "stream", "early", "early", "wait", "engine"),
    ),
    "fused": ("fused", ("engine", "wait", "stream", "early", "early", "wait", "engine")),
}


def observe(process: Process, done: Sequence[str]) -> list[dict[str, Any]]:
    """Time at the start, and after each thing that is done."""
    rows = [{"after": "start", **process.times()}]
    for name in done:
        action: Callable[[], None] = getattr(process, name)
        action()
        if process.number.is_cuda:
            torch.cuda.synchronize()
        rows.append({"after": name, **process.times()})
    return rows


def run(name: str) -> list[dict[str, Any]]:
    """Observe a list in a process that has done nothing else."""
    kind, done = LISTS[name]
    models = pair("cuda", torch.bfloat16, fused=kind == "fused") if kind else None
    gc.collect()
    gc.freeze()
    return observe(Process(models, list(range(1, 129)), "cuda"), done)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS))
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    found: dict[str, Any] = {
        "format": 1,
        "machine": machine(options.commit),
        "tiny_kernels": TINY,
        "lists": [],
    }
    for name in options.lists:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows = pool.apply(run, (name,))
        found["lists"].append({"name": name, "rows": rows})
        for row in rows:
            times = "  ".join(f"{key} {us:9.1f} us" for key, us in row.items() if key != "after")
            print(f"{name:12} {row['after']:10} {times}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
