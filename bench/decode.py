"""Tokens per second of the shipped pair, every way there is to run it, beside transformers.

Whole batches are decoded to their ends, a step ahead as `Engine.generate` does. Prompts and
captures are not timed. All contestants of a cell run in one process, in turn, and the figure is
the median. Before a run's time counts, its greedy tokens are compared with plain decoding's
(float32: they must be equal; in half precision, and of transformers, equal texts are counted), and
drawn ones with the first way of the same setting.

transformers decodes with its own ``generate`` at its defaults (eager, a cache that grows), the
batch at once: the prompts are of one length, so nothing is padded. Its time for one token, prompt
included, is subtracted.

With CUDA, what has to be compiled is compiled before, by a process for every batch and setting.

    python -m bench.decode [--batch 1 8 64] [--new 128] [--repeats 3] [--dtype bfloat16]
    python -m bench.decode --quick
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.acceptance import PROMPT_TOKENS, held_out_prompts
from bench.decode_sides import Contestant, Transformers, decode, pair, plain_target
from bench.suite.decode import EAGER, ONE, PLAIN, THREE, TRANSFORMERS, slower
from bench.suite.machine import machine
from specattn.config import SpecConfig
from specattn.spec.generate import Engine
from specattn.spec.request import Request
from specattn.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT = 512
TREES = {
    PLAIN: (0, 1, 1), "chain of 5": (5, 1, 6), "topk 4, 16 nodes": (5, 4, 16),
    "topk 8, 64 nodes": (7, 8, 64),
}
QUICK = (PLAIN, "topk 4, 16 nodes")
WAYS: dict[str, dict[str, Any]] = {
    ONE: {"seams": "one"}, THREE: {"seams": "three"}, EAGER: {"graphs": False},
}
#: Tokens and turns of what launches kernel by kernel.
SHORT, FEW = 32, 2
TEMPERATURES = (0.0, 1.0)


class Batch:
    """Everything that decodes one batch: engines made once, for greedy and drawn tokens."""

    def __init__(
        self, models: tuple[Any, Any], prompts: list[list[int]], settings: Sequence[str],
        ways: Sequence[str], generate: Transformers | None,
    ) -> None:
        self.prompts, self.generate, size = prompts, generate, len(prompts)
        # what launches kernel by kernel gets less to do where others are to be timed as well
        self.brief = len(ways) > 1
        self.engines = {
            (setting, way): Engine(
                *models, SpecConfig(*TREES[setting], CONTEXT, size), buckets=[size], **WAYS[way],
            )
            for setting in settings for way in ways
            # a plain step is one forward, whatever its seams
            if setting != PLAIN or way != THREE
        }

    def cell(self, temperature: float, new: int, repeats: int, *, exact: bool) -> dict[str, Any]:
        """Compare all contestants and time them in turn."""
        name = f"batch {len(self.prompts)}, {'drawn' if temperature else 'greedy'}"
        print(name, flush=True)
        contestants = self._contestants(temperature, new, repeats)
        wanted: dict[str, list[list[int]]] = {}
        for contestant in contestants:
            # drawn texts of different trees have one law, not the same tokens
            alike = contestant.setting if temperature else PLAIN
            contestant.wanted = wanted.get(alike)
            contestant.exact = exact and not temperature and contestant.setting != TRANSFORMERS
            found = contestant.turn(counts=False)
            wanted.setdefault(alike, found.tokens)
        gc.collect()
        for turn in range(repeats):
            for contestant in contestants:
                if turn < contestant.repeats:
                    contestant.turn(counts=True)
        return {
            "name": name, "batch": len(self.prompts), "temperature": temperature,
            "lines": [contestant.line() for contestant in contestants],
        }

    def _contestants(self, temperature: float, new: int, repeats: int) -> list[Contestant]:
        short, few = (min(new, SHORT), min(repeats, FEW)) if self.brief else (new, repeats)
        found = []
        for (setting, way), engine in self.engines.items():
            count, turns = (short, few) if way == EAGER else (new, repeats)
            requests = [
                Request(prompt, count, SamplingParams(temperature, seed=at), ignore_eos=True)
                for at, prompt in enumerate(self.prompts)
            ]
            found.append(Contestant(
                setting, way, turns, lambda e=engine, r=requests: decode(e, r)
            ))
        if self.generate is not None:
            found.append(Contestant(
                TRANSFORMERS, EAGER, few,
                lambda: self.generate.decode(self.prompts, short, temperature),
            ))
        return found


def compile_ahead(args: argparse.Namespace, workers: int) -> None:
    """Decode a few tokens of every batch and setting, ``workers`` at a time, for Triton's cache."""
    def one(batch: int, setting: str) -> None:
        command = [
            sys.executable, "-m", "bench.decode", "--workers", "0", "--batch", str(batch),
            "--settings", setting, "--ways", ONE, "--new", "4", "--repeats", "1",
            "--dtype", args.dtype, *(["--fused"] if args.fused else []),
        ]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[1]
        )
        if done.returncode:  # it will fail again where it matters
            print(f"{setting}, batch {batch}: {done.stderr[-300:]}", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, *zip(*itertools.product(args.batch, args.settings), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--new", type=int, default=128, help="tokens of a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--settings", nargs="+", choices=TREES, default=list(TREES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="eager alone without CUDA")
    parser.add_argument("--fused", action="store_true", help="FusedTarget and FusedEagle3")
    parser.add_argument("--quick", action="store_true", help="one tree, batches of 1 and 8")
    parser.add_argument("--workers", type=int, help="processes that compile ahead; 0 is none")
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.batch, args.settings, args.repeats = [1, 8], list(QUICK), min(args.repeats, 2)
    begin = time.perf_counter()
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, args.dtype)
    workers = min(12, os.cpu_count() or 1) if args.workers is None else args.workers
    if workers and device == "cuda":
        compile_ahead(args, workers)
        print(f"compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    ways = args.ways or (list(WAYS) if device == "cuda" else [EAGER])
    models = pair(dtype, device, fused=args.fused)
    prompts = held_out_prompts(max(args.batch), models[0].tokenizer)
    generate = Transformers(plain_target(dtype, device))
    found: dict[str, Any] = {
        "format": 1, "part": "pair", "title": "The shipped pair", "machine": machine(args.commit),
        "models": "fused" if args.fused else "transformers", "dtype": args.dtype,
        "prompt_tokens": PROMPT_TOKENS, "repeats": args.repeats,
        "trees": {name: TREES[name] for name in args.settings}, "cells": [],
    }
    for batch in args.batch:
        whole = Batch(models, prompts[:batch], args.settings, ways, generate)
        for temperature in TEMPERATURES:
            found["cells"].append(whole.cell(
                temperature, args.new, args.repeats, exact=dtype == torch.float32
            ))
            found["slower_than_three_graphs"] = slower(found["cells"])
            found["seconds"] = round(time.perf_counter() - begin, 1)
            if args.out:
                args.out.write_text(json.dumps(found, indent=1) + "\n")
        del whole
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    late = found["slower_than_three_graphs"]
    print("one graph slower than three: " + ("; ".join(late) or "never"))
    print(f"{found['seconds']} s")


if __name__ == "__main__":
    main()
