"""Steps whose trees the host drafts: what of a round trip the device waits for.

Such a tree hangs below a token that the host has read, so no step is launched ahead. Timed are
steps by themselves, launched ahead of each other as if their trees were known, and round trips: the
host hands over trees that it has, launches, and waits for the tokens. Before that, the logits over
a tree are compared with float64.

    python -m bench.step_host [--batch 1,16] [--context 4096] [--rounds 20] [--commit SHA]
        [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.step_oracle import check
from bench.step_timing import WARM, Stepper, check_advance, timed
from bench.step_world import Setting, World, shapes
from bench.suite.machine import machine
from bench.suite.results import write
from specattn.speculative.host_proposer import HostProposer, HostTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specattn.config import SpecConfig
    from specattn.speculative.host_proposer import HostRequest
    from specattn.speculative.model import ModelSlot, TargetModel

OUT = Path(__file__).parent / "results" / "step_host.json"


@dataclass(frozen=True)
class HostSetting(Setting):
    """Trees from the host, every node with two children."""

    @property
    def name(self) -> str:
        return f"host {self.nodes}"

    def tree(self, lowest: int) -> HostTree:
        """Return a whole tree, of tokens below ``lowest``."""
        tokens = torch.randint(lowest, (self.nodes - 1,)).tolist()
        # node 0 and 1 follow the text, node i its node i // 2 - 1
        return HostTree(tokens, [node // 2 - 1 for node in range(self.nodes - 1)])


SETTINGS = (HostSetting(2, 7, 16), HostSetting(8, 7, 64))


class HostTrees(HostProposer):
    """A proposer whose trees come from elsewhere."""

    def draft(self, requests: Sequence[HostRequest], config: SpecConfig) -> Sequence[HostTree]:
        raise NotImplementedError("these trees are handed over")


class HostWorld(World):
    """A world without a draft model."""

    def slots_of(self, setting: Setting) -> tuple[ModelSlot[TargetModel], Any]:
        """Return the target and the proposer."""
        return self.plain, HostTrees()


def round_trip(stepper: Stepper, rounds: int) -> float:
    """Return microseconds from handing trees over to reading the tokens, on an idle device."""
    times = []
    for _ in range(WARM + rounds):
        stepper.reset()
        if stepper.lens.is_cuda:
            torch.cuda.synchronize()
        at = time.perf_counter_ns()
        gained = stepper.launch().wait()
        times.append((time.perf_counter_ns() - at) / 1e3)
        assert [len(tokens) for tokens in gained] == [stepper.length] * len(stepper.rows)
    return statistics.median(times[WARM:])


def measure(
    world: World, settings: Sequence[HostSetting], batches: Sequence[int], context: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Check and time every setting at every batch size."""
    length = 3
    for setting in settings:
        error = check(world, setting, length, trees=[setting.tree(world.lowest)])
        for batch in batches:
            accept = world.forced(length)
            decoder = world.decoder(setting, [batch], accept)
            trees = [setting.tree(world.lowest) for _ in range(batch)]
            rows = world.admit(decoder, batch, context)
            stepper = Stepper(decoder, rows, accept, trees=trees)
            stepper.force(length)
            check_advance(stepper)
            device, trip = timed(stepper, rounds), round_trip(stepper, rounds)
            stepper.check()
            yield {
                "setting": setting.name,
                "nodes": setting.nodes,
                "batch": batch,
                "context": context,
                "error": round(error, 5),
                "device_us": device["us"],
                "launch_us": device["host_us"],
                "round_trip_us": round(trip, 2),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    batches, context = [int(text) for text in options.batch.split(",")], options.context
    name = "Llama-3.1-8B"
    world = HostWorld(shapes(context + 256)[name], [context] * max(batches), torch.device("cuda"))
    record: dict[str, Any] = {"format": 1, "machine": machine(options.commit)}
    record |= {"model": name, "rounds": options.rounds, "cells": []}
    for cell in measure(world, SETTINGS, batches, context, options.rounds):
        print(cell, flush=True)
        record["cells"].append(cell)
        write(record, options.out)


if __name__ == "__main__":
    main()
