"""A thousand steps at the real size, with requests that grow, end and join: what the host does.

Requests of a model of 8B (random weights, forced lengths; see `bench.step_world`) take rows and
slots from the table when they join and give them back when they end. Before every step its slots
are reserved, its tokens are read a step late, and while torch's sync debug mode makes every wait an
error, the allocator's counters must stand still. Only what stands for a joining request's prompt is
excepted. In the end every length on the device must be what the host has counted.

Every launch is timed, on a core that was calm in the beginning, and beside it what reserving its
slots takes and a fixed loop of Python. Nothing is timed again, and only the warm-up is left out;
besides the times of all launches, those are told after which the loop took as long as on a calm
host: whoever shares the core holds up both.
All of it runs twice: the host sleeps in the driver while it waits for a step, or rehearses the next
launch (`StepDecoder.rehearse`) and what it reserves.

    python -m bench.steady [--settings 4-5-16] [--batch 1,64] [--context 4096] [--steps 1000]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.step import free, write
from bench.step_timing import calm_core, calm_loop, loop
from bench.step_world import SETTINGS, Setting, World, shapes
from bench.suite.machine import machine
from bench.suite.steps import NOISY
from specattn.engine.configs import powers_of_two

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specattn.speculative.step_decoder import PendingStep

OUT = Path(__file__).parent / "results" / "steady_h200.json"
MODEL = "Llama-3.1-8B"
WARM = 60
# tokens that requests run for, a few less the first time so that not all end at once
NEW = 256
# steps from one time that requests may join to the next
JOIN_EVERY = 8
ASKED_US = 60.0
# launches that a spread is told of, at the least
FEW = 50
COUNTERS = (
    "allocation.all.allocated",
    "segment.all.allocated",
    "num_device_alloc",
    "num_alloc_retries",
)


@contextmanager
def watched(counts: dict[str, int]) -> Iterator[None]:
    """Make every wait that torch knows of an error, and count what is allocated."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        after = torch.cuda.memory_stats()
        for name in COUNTERS:
            counts[name] = counts.get(name, 0) + after.get(name, 0) - before.get(name, 0)


@dataclass
class Live:
    """A request: its row, the tokens that have been read, and how many it ends with."""

    row: int
    length: int
    end: int

    @property
    def ended(self) -> bool:
        return self.length >= self.end


class Churn:
    """Requests that come and go over a table whose rows are all free.

    Parameters
    ----------
    world : World
        Its rows must have been given back.
    setting : Setting
        Of every step.
    batch : int
        Requests at the most.
    context : int
        Tokens that a request has when it joins.
    new : int
        Tokens that it runs for.
    length : int
        Tokens that every step gains.
    rehearses : bool
        Whether the host rehearses the next launch while it waits.
    """

    def __init__(
        self,
        world: World,
        setting: Setting,
        batch: int,
        context: int,
        new: int,
        length: int,
        *,
        rehearses: bool,
    ) -> None:
        self.world, self.batch, self.context, self.new = world, batch, context, new
        self.length, self.rng, self.rehearses = length, random.Random(0), rehearses
        self.decoder = world.decoder(setting, powers_of_two(batch), world.forced(length))
        self.live: list[Live] = []
        self.joined = self.ended = 0
        # paths that were read, and those that were shorter
        self.gained = self.short = 0
        self.sizes: set[int] = set()
        self._before: tuple[list[Live], PendingStep] | None = None

    def join(self) -> None:
        """Let requests in for all that have ended."""
        table, joining = self.world.table, []
        for _ in range(self.batch - len(self.live)):
            row = table.allocate()
            table.reserve([row], [self.context])
            table.commit(row, self.context)
            least = 1 if self.joined < self.batch else self.new // 2
            end = self.context + self.rng.randint(least, self.new)
            joining.append(Live(row, self.context, end))
            self.joined += 1
        if joining:
            self.world.put(self.decoder, [one.row for one in joining], self.context)
        self.live += joining

    def step(self) -> dict[str, float]:
        """Launch a step, then read the one before; returns microseconds of the host."""
        rows, config = [one.row for one in self.live], self.decoder.config
        # the step in flight may grow them, too
        room = config.reserve_len + config.num_steps + 1
        begin = time.perf_counter_ns()
        lens = [one.length + room for one in self.live]
        self.world.table.reserve(rows, lens)
        reserved = time.perf_counter_ns()
        pending = self.decoder.step_async(rows)
        launched = time.perf_counter_ns()
        looped, taking_part = loop(), list(self.live)
        self.sizes.add(len(rows))
        self.finish(partial(self._rehearse, rows, lens) if self.rehearses else None)
        self._before = taking_part, pending
        return {
            "host_us": (launched - reserved) / 1e3,
            "reserve_us": (reserved - begin) / 1e3,
            "loop_us": looped,
        }

    def _rehearse(self, rows: list[int], lens: list[int]) -> None:
        if self.decoder.rehearse(rows):
            self.world.table.reserve(rows, lens)

    def finish(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Read the step in flight; requests that have what they run for give all back."""
        if self._before is None:
            return
        (took_part, pending), self._before = self._before, None
        for one, gained in zip(took_part, pending.wait(meanwhile), strict=True):
            if one.ended:  # it rode along
                continue
            # fewer where the tree was not so deep; a request without slots would gain nothing
            assert 1 <= len(gained) <= self.length, f"row {one.row} gained {len(gained)}"
            self.short += len(gained) < self.length
            self.gained += 1
            one.length += len(gained)
            if one.ended:
                self.world.table.free(one.row)
                self.ended += 1
        self.live = [one for one in self.live if not one.ended]

    def check(self) -> None:
        """Assert that the device has the lengths that the host has counted; ends all requests.

        And that hardly any path was shorter than what is forced.
        """
        self.finish()
        found = self.decoder.states.seq_lens.tolist()
        for one in self.live:
            assert found[one.row] == one.length, f"row {one.row}: {found[one.row]}, {one.length}"
        self.world.table.check()
        assert self.short * 1000 <= self.gained, f"{self.short} of {self.gained} paths were shorter"
        for one in self.live:
            self.world.table.free(one.row)
        self.live.clear()


def run(churn: Churn, steps: int, calm_us: float) -> dict[str, Any]:
    """Take steps; returns what the host took, and what was waited for and allocated: nothing.

    The host is calm where the loop takes ``calm_us``, or `NOISY` times that at the most.

    Raises
    ------
    AssertionError
        If a step gains nothing or more than what is forced, or one path in a thousand less, lengths
        are others, or memory was allocated.
    RuntimeError
        If something waited for the device.
    """
    _taken(churn, WARM)
    found, counts, seconds = _taken(churn, steps)
    churn.check()
    assert not any(counts.values()), f"allocated while stepping: {counts}"
    calm = [one["host_us"] for one in found if one["loop_us"] <= NOISY * calm_us]
    return {
        "steps": steps,
        "joined": churn.joined,
        "ended": churn.ended,
        "short": churn.short,
        "sizes": sorted(churn.sizes),
        "us": round(seconds * 1e6 / steps, 1),
        "allocations": 0,
        **{name: _spread([one[name] for one in found]) for name in found[0]},
        "within": _within([one["host_us"] for one in found]),
        "calm": {"share": round(len(calm) / steps, 4)}
        | ({**_spread(calm), "within": _within(calm)} if len(calm) >= FEW else {}),
    }


def _taken(churn: Churn, steps: int) -> tuple[list[dict[str, float]], dict[str, int], float]:
    """Take steps; returns microseconds of the host, what was allocated, and the seconds of all.

    Counters are read where requests may join: that takes longer than a launch, and more of the
    host's caches.
    """
    found: list[dict[str, float]] = []
    counts: dict[str, int] = {}
    begin = time.perf_counter()
    while len(found) < steps:
        churn.join()
        with watched(counts):
            for _ in range(min(JOIN_EVERY, steps - len(found))):
                found.append(churn.step())
                if not churn.live:
                    break
    return found, counts, time.perf_counter() - begin


def _within(times: list[float]) -> float:
    return round(sum(us <= ASKED_US for us in times) / len(times), 4)


def _spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {
        "median": round(statistics.median(times), 2),
        "p10": round(cuts[9], 2),
        "p90": round(cuts[89], 2),
        "p99": round(cuts[98], 2),
    }


def emptied(world: World) -> World:
    """Return the world with all of its rows given back."""
    for row in world.rows:
        world.table.free(row)
    return world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", default="1-3-4,4-5-16")
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=4, help="tokens to gain per step, at most")
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    batches = [int(text) for text in options.batch.split(",")]
    named = options.settings.split(",")
    settings = [one for one in SETTINGS if any(name in one.name for name in named)]
    room = options.context + NEW
    shape = shapes(room + 128)[MODEL]
    world = emptied(World(shape, [room] * max(batches), torch.device("cuda")))
    record: dict[str, Any] = {
        "format": 1,
        "machine": machine(options.commit),
        "model": MODEL,
        "context": options.context,
        "calm_loop_us": calm_loop(),
        "cells": [],
    }
    for setting, batch, rehearses in product(settings, batches, (False, True)):
        length = min(setting.steps + 1, options.length)
        with calm_core():
            churn = Churn(world, setting, batch, options.context, NEW, length, rehearses=rehearses)
            cell = {
                "setting": setting.name,
                "batch": batch,
                "length": length,
                "rehearsed": rehearses,
                **run(churn, options.steps, record["calm_loop_us"]),
            }
        record["cells"].append(cell)
        host, calm, how = cell["host_us"], cell["calm"], "rehearsed" if rehearses else "slept"
        print(
            f"{setting.name:12} {batch:3} x {options.context}, {how:9}: {cell['us']:9.1f} us a "
            f"step, host {host['median']:.1f} (p90 {host['p90']:.1f}), {cell['within']:.1%} "
            f"within {ASKED_US:.0f}, {calm.get('median')} on a calm host ({calm['share']:.0%}); "
            f"{cell['joined']} joined, {cell['ended']} ended",
            flush=True,
        )
        write(record, options.out)
        del churn
        free()


if __name__ == "__main__":
    main()
