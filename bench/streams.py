"""What graphs of small kernels take once other streams of a process have been used.

Steps of the shipped pair (its models are transformers', of many small kernels) for one request are
timed on the device, in one graph and in three, and beside them a graph of tiny kernels; then again
after each thing that a process may do besides. What one changes stays changed, so every group of
them has a process of its own.

    python -m bench.streams [--groups memory streams] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.decode import CONTEXT, TREES
from bench.decode_paired import SEAMS, Rebuild, other
from bench.decode_sides import pair
from bench.step_timing import between, mark
from bench.suite.machine import machine
from bench.suite.seams import DEVICE
from specattn.config import SpecConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    #: Does one thing after the other, and says what it has done.
    Group = Callable[["Process"], Iterator[str]]

SETTING = "topk 8, 64 nodes"
STEPS, TURNS = 6, 3
TINY, REPLAYS = 1200, 10


class Process:
    """What is timed in a process.

    Parameters
    ----------
    models : tuple
        Target and draft.
    prompt : list of int
        Of the one request.
    """

    def __init__(self, models: tuple[Any, Any], prompt: list[int]) -> None:
        self.models, self.prompt = models, prompt
        self.kept: list[Any] = []
        self.steps = self.engine()
        self.steps.admit(0.0)
        self._number = torch.zeros(1, device=models[0].device)
        recorder = self.steps.engine.decoder(self.steps.config).runner.recorder
        self._tiny = recorder and recorder.record(self._add_often).graph

    def engine(self) -> Rebuild:
        """Return a new engine, with its graphs."""
        return Rebuild(self.models, [self.prompt], SpecConfig(*TREES[SETTING], CONTEXT, 1), 0)

    def add(self) -> None:
        """Launch a tiny kernel."""
        self._number.add_(1)

    def _add_often(self) -> None:
        for _ in range(TINY):
            self.add()

    def times(self) -> dict[str, float]:
        """Return microseconds per step by seams and, of a GPU, those of the tiny kernels' graph."""
        found = {way: [] for way in SEAMS}
        for _ in range(TURNS):
            for way, us in found.items():
                us.append(self.steps.turn(way, STEPS, ahead=True).us[DEVICE])
        times = {way: round(statistics.median(us), 1) for way, us in found.items()}
        if self._tiny is not None:
            times["tiny"] = round(statistics.median(self._replay() for _ in range(TURNS)), 1)
        return times

    def _replay(self) -> float:
        begin = mark(self._number.device)
        for _ in range(REPLAYS):
            self._tiny.replay()
        end = mark(self._number.device)
        torch.cuda.synchronize()
        return between(begin, end) / REPLAYS


def memory(process: Process) -> Iterator[str]:
    """Allocate, and give back."""
    process.kept.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
    yield "1 GiB"
    process.kept.clear()
    torch.cuda.empty_cache()
    yield "given back"


def streams(process: Process) -> Iterator[str]:
    """Use more and more streams."""
    process.kept.append(torch.cuda.Stream())
    yield "a stream, unused"
    for count in range(1, 4):
        with torch.cuda.stream(torch.cuda.Stream()):
            process.add()
        torch.cuda.synchronize()
        yield f"a kernel on {count} more"


def graphs(process: Process) -> Iterator[str]:
    """Record other graphs, on torch's stream for that."""
    process.kept.append(other(10))
    yield "a graph of 10 kernels"
    process.steps.instantiate()
    yield "instantiated anew"


def engines(process: Process) -> Iterator[str]:
    """Make another engine, which warms up on a stream of its own."""
    process.kept.append(process.engine())
    yield "a second engine"


GROUPS: dict[str, Group] = {
    "memory": memory, "streams": streams, "graphs": graphs, "engines": engines,
}


def observe(process: Process, group: Group) -> list[dict[str, Any]]:
    """Time at the start, twice, and after each thing of a group."""
    done = chain(("start", "start, again"), group(process))
    return [{"after": after, **process.times()} for after in done]


def run(name: str) -> list[dict[str, Any]]:
    """Observe a group in a process that has done nothing else."""
    process = Process(pair(torch.bfloat16, "cuda", fused=False), list(range(1, 129)))
    gc.collect()
    gc.freeze()
    return observe(process, GROUPS[name])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    found: dict[str, Any] = {"format": 1, "machine": machine(options.commit), "groups": []}
    for name in options.groups:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows = pool.apply(run, (name,))
        found["groups"].append({"name": name, "rows": rows})
        for row in rows:
            times = "  ".join(f"{key} {us:9.1f} us" for key, us in row.items() if key != "after")
            print(f"{name:8} {row['after']:24} {times}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
