"""Replays of a step from the same states leave the same bits, whatever ran in between.

Steps of a model of 8B (random weights, see `bench.step_world`) are replayed from three states in
turn, the second with its rows in the other order, so that a kernel which reads what another step
has left, or does not wait for what it reads, leaves other bits now and then. Everything that steps
keep of a request is compared, on the device, and nothing is waited for but the step before.

Besides it tells how deep the trees were that steps drafted from where the last one left off: with
random weights, one can be too shallow for a path of the length that a bench forces.

    python -m bench.repeats [--model Qwen3-8B] [--settings 4-5-16] [--batch 1,4] [--seconds 10]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.step import free, write
from bench.step_world import SETTINGS, Setting, World, shapes
from bench.suite.machine import machine

if TYPE_CHECKING:
    from specattn.speculative.step_decoder import PendingStep, StepDecoder

OUT = Path(__file__).parent / "results" / "repeats_h200.json"
# after so many steps from where the last one left off, states are kept; an even and an odd one
KEPT = (3, 8, 13)


@dataclass
class Start:
    """States before a step, its rows, and the states after its first replay."""

    rows: list[int]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


class Repeats:
    """Steps of one batch, from where the last one left off or from states that were kept.

    Parameters
    ----------
    decoder : StepDecoder
        Its requests are admitted already.
    rows : list of int
        Those that take part.
    """

    def __init__(self, decoder: StepDecoder, rows: list[int]) -> None:
        self.decoder, self.rows = decoder, rows
        states = vars(decoder.states)
        self.states: dict[str, Tensor] = {
            name: value for name, value in states.items() if value.numel()
        }
        self.lens = decoder.states.seq_lens.clone()
        # how many trees were how deep
        depths = decoder.config.num_steps + 1
        self.depths = torch.zeros(depths, dtype=torch.int64, device=self.lens.device)
        self._before: PendingStep | None = None

    def step(self, rows: list[int]) -> None:
        """Launch a step, then wait for the one before."""
        pending = self.decoder.step_async(rows)
        self.finish()
        self._before = pending

    def finish(self) -> None:
        """Wait for the last step."""
        if self._before is not None:
            self._before.wait()
            self._before = None

    def draft(self, steps: int) -> list[Start]:
        """Step on, the rows in the other order every time, and count depths; returns some states.

        Lengths go back after every step: rows have room for one.
        """
        found, config = [], self.decoder.config
        bucket = min(size for size in self.decoder.runner.buckets if size >= len(self.rows))
        (program,) = self.decoder._programs.values()
        tree = program.bind(bucket).tree  # type: ignore[union-attr]
        ones = torch.ones_like(tree.positions[: len(self.rows), 0])
        for at in range(steps):
            rows = self.rows[:: 1 if at % 2 else -1]
            self.decoder.states.seq_lens.copy_(self.lens)
            if at in KEPT:
                before = self._states()
            self.step(rows)
            if at in KEPT:
                found.append(Start(rows, before, self._states()))
            positions = tree.positions[: len(rows)]
            self.depths.scatter_add_(0, positions.amax(1) - positions[:, 0], ones)
        self.finish()
        assert int(self.depths.sum()) == steps * len(self.rows), config
        return found

    def replay(self, start: Start) -> Tensor:
        """Step from there again; returns how many states differ by a bit from the first time."""
        for name, value in start.before.items():
            self.states[name].copy_(value)
        self.step(start.rows)
        wrong = [(self.states[name] != value).any() for name, value in start.after.items()]
        return torch.stack(wrong).sum()

    def _states(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.states.items()}


def run(repeats: Repeats, steps: int, seconds: float) -> dict[str, Any]:
    """Draft for so many steps, and replay for so many seconds; returns what was found.

    Raises
    ------
    AssertionError
        If a replay left other bits than the first one.
    """
    starts = repeats.draft(max(steps, KEPT[-1] + 1))
    different = torch.zeros((), dtype=torch.int64, device=repeats.lens.device)
    replays, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end or replays < 2 * len(starts):
        different += repeats.replay(starts[replays % len(starts)])
        replays += 1
    repeats.finish()
    found = {
        "replays": replays,
        "different": int(different),
        "depths": {str(depth): n for depth, n in enumerate(repeats.depths.tolist()) if n},
    }
    assert not found["different"], found
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--settings", default="1-3-4,4-5-16,8-7-64")
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=500, help="steps whose trees are counted")
    parser.add_argument("--seconds", type=float, default=10.0, help="of replays, of every cell")
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    batches = [int(text) for text in options.batch.split(",")]
    named = options.settings.split(",")
    world = World(
        shapes(options.context + 128)[options.model],
        [options.context] * max(batches),
        torch.device("cuda"),
    )
    record: dict[str, Any] = {
        "format": 1,
        "machine": machine(options.commit),
        "model": options.model,
        "context": options.context,
        "cells": [],
    }
    for setting in SETTINGS:
        if any(name in setting.name for name in named):
            for cell in measured(world, setting, batches, options):
                record["cells"].append(cell)
                write(record, options.out)


def measured(
    world: World, setting: Setting, batches: list[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Capture a setting, and replay it in every batch."""
    decoder = world.decoder(setting, batches, world.forced(min(setting.steps + 1, 4)))
    cells = []
    for batch in batches:
        repeats = Repeats(decoder, world.admit(decoder, batch, options.context))
        found = run(repeats, options.steps, options.seconds)
        cells.append({"setting": setting.name, "batch": batch, **found})
        print(
            f"{setting.name:12} {batch:3} x {options.context}: {found['replays']} replays, "
            f"{found['different']} states differ; depths {found['depths']}",
            flush=True,
        )
    del decoder
    free()
    return cells


if __name__ == "__main__":
    main()
