"""Tokens per second of the shipped pair, every way there is to run it, beside transformers.

Whole batches are decoded to their ends, a step ahead as `Engine.generate` does. Prompts and
captures are not timed. All contestants of a cell run in one process, in turn, and the figure is
the median of the turns. Graphs are captured anew for every turn: what runs is the same, but
captures differ by a percent, which is more than one graph and three do.

Before a run's time counts, its greedy tokens are compared with plain decoding's
(float32: they must be equal; in half precision, and of transformers, equal texts are counted), and
drawn ones with the first way of the same setting.

transformers decodes with its own ``generate`` at its defaults (eager, a cache that grows), the
batch at once: the prompts are of one length, so nothing is padded. Its time for one token, prompt
included, is subtracted.

With CUDA, what has to be compiled is compiled before, by a process for every batch and setting.

    python -m bench.decode [--batch 1 8 64] [--new 128] [--repeats 4] [--dtype bfloat16]
    python -m bench.decode --quick
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.acceptance import PROMPT_TOKENS, held_out_prompts
from bench.decode_sides import Contestant, Run, Transformers, decode
from bench.shipped import pair, plain_target
from bench.suite.decode import EAGER, HALVES, ONE, PLAIN, THREE, TRANSFORMERS, slower
from bench.suite.machine import machine
from bench.suite.results import write
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT = 512
TREES = {
    PLAIN: (0, 1, 1),
    "chain of 5": (5, 1, 6),
    "topk 4, 16 nodes": (5, 4, 16),
    "topk 8, 64 nodes": (7, 8, 64),
}
QUICK = (PLAIN, "topk 4, 16 nodes")
WAYS: dict[str, dict[str, Any]] = {
    ONE: {"cudagraph": "full"},
    THREE: {"cudagraph": "piecewise"},
    HALVES: {"tbo": True},
    EAGER: {"graphs": False},
}
#: Tokens and turns of what launches kernel by kernel.
SHORT, EAGER_TURNS = 32, 2
TEMPERATURES = (0.0, 1.0)


class Batch:
    """Everything that decodes one batch, greedy and drawing.

    Graphs are captured anew for every turn, for captures of the same step differ by a percent.
    """

    def __init__(
        self,
        models: tuple[Any, Any],
        prompts: list[list[int]],
        settings: Sequence[str],
        ways: Sequence[str],
        generate: Transformers | None,
        new: int,
    ) -> None:
        self.models, self.prompts, self.generate, self.new = models, prompts, generate, new
        # what launches kernel by kernel gets less to do where others are to be timed as well
        self.short = min(new, SHORT) if len(ways) > 1 else new
        self.contestants = {
            # a plain step is one forward, however it is recorded; one request has no halves
            temperature: [
                Contestant(setting, way)
                for setting in settings
                for way in ways
                if (setting != PLAIN or way != THREE) and (len(prompts) > 1 or way != HALVES)
            ]
            + ([Contestant(TRANSFORMERS, EAGER)] if generate else [])
            for temperature in TEMPERATURES
        }

    def turn(self, nth: int, *, exact: bool) -> None:
        """Compare every contestant with others, then time it; two times for what is eager."""
        made = [c for c in self.contestants[TEMPERATURES[0]] if c.way != EAGER or not nth]
        # in either order, for what comes second is put where the first has left room
        engines = {
            (c.setting, c.way): self._engine(c)
            for c in (reversed(made) if nth % 2 else made)
            if c.setting != TRANSFORMERS
        }
        for temperature, contestants in self.contestants.items():
            taking = [c for c in contestants if c.way != EAGER or nth < EAGER_TURNS]
            wanted: dict[str, list[list[int]]] = {}
            for c in taking:
                if (c.setting, c.way) in engines:
                    c.engine = engines[c.setting, c.way]
                # drawn texts of different trees have one distribution, not the same tokens
                alike = c.setting if temperature else PLAIN
                c.wanted = wanted.get(alike, c.wanted)
                c.exact = exact and not temperature and c.setting != TRANSFORMERS
                if not nth:  # what is compiled at first use is so before anything is timed
                    wanted.setdefault(alike, c.turn(self._run(c, temperature)).tokens)
            gc.collect()
            for c in taking:
                c.runs.append(c.turn(self._run(c, temperature)))

    def _engine(self, contestant: Contestant) -> Engine:
        size = len(self.prompts)
        config = SpecConfig(*TREES[contestant.setting], CONTEXT, size)
        return Engine(*self.models, config, buckets=[size], **WAYS[contestant.way])

    def _run(self, contestant: Contestant, temperature: float) -> Run:
        new = self.short if contestant.way == EAGER else self.new
        if contestant.setting == TRANSFORMERS:
            assert self.generate is not None
            return self.generate.decode(self.prompts, new, temperature)
        assert contestant.engine is not None
        return decode(
            contestant.engine,
            [
                Request(prompt, new, SamplingParams(temperature, seed=at), ignore_eos=True)
                for at, prompt in enumerate(self.prompts)
            ],
        )

    def cells(self) -> list[dict[str, Any]]:
        """Return what was measured, and print it."""
        found = []
        for temperature, contestants in self.contestants.items():
            name = f"batch {len(self.prompts)}, {'drawn' if temperature else 'greedy'}"
            print(name, flush=True)
            found.append(
                {
                    "name": name,
                    "batch": len(self.prompts),
                    "temperature": temperature,
                    "lines": [contestant.line() for contestant in contestants],
                }
            )
        return found


def compile_ahead(args: argparse.Namespace, workers: int) -> None:
    """Decode a few tokens of every batch and setting, ``workers`` at a time, for Triton's cache."""

    def one(batch: int, setting: str) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.decode",
            "--workers",
            "0",
            "--batch",
            str(batch),
            "--settings",
            setting,
            "--ways",
            ONE,
            "--new",
            "4",
            "--repeats",
            "1",
            "--dtype",
            args.dtype,
            "--fused" if args.fused else "--no-fused",
        ]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[1]
        )
        if done.returncode:  # it will fail again where it matters
            print(f"{setting}, batch {batch}: {done.stderr[-300:]}", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, *zip(*itertools.product(args.batch, args.settings), strict=True)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--new", type=int, default=128, help="tokens of a request")
    parser.add_argument("--repeats", type=int, default=4, help="captures, a turn each")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--settings", nargs="+", choices=TREES, default=list(TREES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="eager alone without CUDA")
    parser.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="FusedTarget and FusedEagle3, or transformers' modules",
    )
    parser.add_argument("--quick", action="store_true", help="one tree, batches of 1 and 8")
    parser.add_argument("--workers", type=int, help="processes that compile ahead; 0 is none")
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.batch, args.settings, args.repeats = [1, 8], list(QUICK), min(args.repeats, 2)
    return args


def main() -> None:
    args, begin = arguments(), time.perf_counter()
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, args.dtype)
    workers = min(12, os.cpu_count() or 1) if args.workers is None else args.workers
    if workers and device == "cuda":
        compile_ahead(args, workers)
        print(f"compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    models = pair(device, dtype, fused=args.fused)
    prompts = held_out_prompts(max(args.batch), models[0].tokenizer)
    found: dict[str, Any] = {
        "format": 1,
        "part": "pair",
        "title": "The shipped pair",
        "machine": machine(args.commit),
        "models": "fused" if args.fused else "transformers",
        "dtype": args.dtype,
        "prompt_tokens": PROMPT_TOKENS,
    }
    time_all(args, models, prompts, found, begin)


def time_all(
    args: argparse.Namespace,
    models: tuple[Any, Any],
    prompts: list[list[int]],
    found: dict[str, Any],
    begin: float,
) -> None:
    """Time every contestant, and keep what is known after every batch."""
    device, dtype = models[0].device.type, getattr(torch, args.dtype)
    ways = args.ways or (list(WAYS) if device == "cuda" else [EAGER])
    generate = Transformers(plain_target(device, dtype))
    found |= {
        "repeats": args.repeats,
        "trees": {name: TREES[name] for name in args.settings},
        "cells": [],
    }
    for size in args.batch:
        batch = Batch(models, prompts[:size], args.settings, ways, generate, args.new)
        for nth in range(args.repeats):
            batch.turn(nth, exact=dtype == torch.float32)
        found["cells"] += batch.cells()
        found["slower_than_three_graphs"] = slower(found["cells"])
        found["seconds"] = round(time.perf_counter() - begin, 1)
        if args.out:
            write(found, args.out)
        del batch
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    late = found["slower_than_three_graphs"]
    print("one graph slower than three: " + ("; ".join(late) or "never"))
    print(f"{found['seconds']} s")


if __name__ == "__main__":
    main()
