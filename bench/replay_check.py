"""Host time of a step: comparing what the graph baked in, and launching everything.

    python -m bench.replay_check [--batch 1 4 16 64]

On a GPU the launches are real, elsewhere a graph is an empty call, so that what is left is Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bench.shipped import pair
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.cuda_graph import GraphRunner
    from specattn.speculative.step_decoder import StepDecoder

# the step that is timed adds a few tokens
CONTEXT, ROUNDS = 4096, 200
# seconds
LATE = 0.02


class Recorded:
    """Stands in for a CUDA graph: a replay costs nothing."""

    def replay(self) -> None:
        """Do nothing."""


def without_device(runner: GraphRunner[Any]) -> None:
    """Let everything captured do nothing when it is replayed."""
    for done in runner._captured.values():
        for bucket, captured in done.items():
            outputs = captured.bound.run()
            done[bucket] = replace(captured, graph=Recorded(), outputs=outputs)  # type: ignore[arg-type]


def step_us(decoder: StepDecoder, rows: Sequence[int], rounds: int = ROUNDS) -> dict[str, float]:
    """Return what `StepDecoder.step_async` costs the host, in microseconds.

    Each step is waited for before the next one is launched, outside what is timed. ``moved`` are
    steps whose rows are not those of the step before; before ``late`` ones the host counts for
    `LATE`, as if it waited for a long step: it finds little in its caches then. Before
    ``rehearsed`` ones it rehearses them as long.

    Parameters
    ----------
    decoder : StepDecoder
        Captured, with requests that have room for ``4 * rounds`` steps.
    rows : sequence of int
        The requests.
    rounds : int
        Steps of each kind.
    """
    found = {}
    moved = [rows, [*rows[1:], 0]]
    kinds = (
        ("same", [rows], 0.0, None),
        ("moved", moved, 0.0, None),
        ("late", [rows], LATE, None),
        ("rehearsed", [rows], LATE, decoder.rehearse),
    )
    for name, orders, late, meanwhile in kinds:
        times = []
        for at in range(rounds):
            order = orders[at % len(orders)]
            until = time.perf_counter() + late
            while time.perf_counter() < until:
                if meanwhile is not None:
                    meanwhile(order)
            start = time.perf_counter()
            pending = decoder.step_async(order)
            times.append(1e6 * (time.perf_counter() - start))
            pending.wait()
        times = times[rounds // 10 :]
        found[name] = statistics.median(times)
        found[f"{name}_p90"] = statistics.quantiles(times, n=10)[-1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    sizes = parser.parse_args().batch
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    target, draft = pair("cuda" if cuda else "cpu")
    config = SpecConfig(5, 4, 16, CONTEXT, max(sizes))
    engine = Engine(target, draft, config, buckets=sizes, num_slots=max(sizes) * CONTEXT + 1)
    engine.add([Request([1 + at % 50, 2, 3], CONTEXT) for at in range(max(sizes))])
    rows = [live.row for live in engine.running]
    engine.table.reserve(rows, [CONTEXT] * len(rows))
    decoder = engine.decoders[0]
    if not cuda:
        without_device(decoder.runner)
    print(
        "batch  fingerprint  check us  step_async us  (p90)  with other rows us  (p90)  "
        f"after {1e3 * LATE:.0f} ms us  (p90)  rehearsed us  (p90)"
    )
    for size in sizes:
        (done,) = decoder.runner._captured.values()
        captured = done[size]
        check = min(timeit.repeat(captured.check, number=50, repeat=40)) / 50 * 1e6
        us = step_us(decoder, rows[:size])
        print(
            f"{size:5} {len(captured.fingerprint):12} {check:9.1f} {us['same']:14.1f} "
            f"{us['same_p90']:7.1f} {us['moved']:19.1f} {us['moved_p90']:7.1f} "
            f"{us['late']:15.1f} {us['late_p90']:6.1f} {us['rehearsed']:13.1f} "
            f"{us['rehearsed_p90']:6.1f}"
        )


if __name__ == "__main__":
    main()
