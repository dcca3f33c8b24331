"""Tokens per second of the shipped pair, every way there is to run it, beside transformers.

Whole batches are decoded to their ends, a step ahead as `Engine.generate` does. Prompts and
captures are not timed. All contestants of a cell run in one process, in turn, each captured anew,
and the figure is the median of the turns: captures differ by a percent.

Greedy texts that are those of plain decoding are counted, and drawn ones that are those of the
first way of the same setting; in float32 a run fails at its end if a greedy one differs.

transformers decodes with its own ``generate`` at its defaults (eager, a cache that grows), the
batch at once: the prompts are of one length, so nothing is padded. Its time for one token, prompt
included, is subtracted.

    python -m bench.decode [--batch 1 8 64] [--new 128] [--repeats 4] [--dtype bfloat16]
    python -m bench.decode --quick
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.acceptance import PROMPT_TOKENS, held_out_prompts
from bench.lines import Setting, Transformers, free
from bench.shipped import pair, plain_target
from bench.suite.decode import EAGER, HALVES, ONE, PLAIN, THREE, TRANSFORMERS
from bench.suite.machine import machine
from bench.suite.results import write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.engine.engine import Engine
    from specattn.engine.request import Request

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


@dataclass(frozen=True)
class Run:
    """A batch decoded to its end: all tokens, seconds, and what requests gained step by step."""

    tokens: list[list[int]]
    seconds: float
    accept_lens: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """The first tokens come with the prompts, and are not timed."""
        return sum(len(tokens) - 1 for tokens in self.tokens) / self.seconds


def decode(engine: Engine, requests: Sequence[Request]) -> Run:
    """Decode a batch to its end."""
    results = engine.add(requests)
    begin = time.perf_counter()
    while engine.num_running:
        engine.step(ahead=True)
    engine.clear()
    seconds = time.perf_counter() - begin
    return Run([r.tokens for r in results], seconds, [r.accept_lens for r in results])


@dataclass
class Contestant:
    """A setting, run one way over one batch; collects its runs.

    ``equal`` counts texts that are those it is compared with.
    """

    setting: str
    way: str
    equal: int | None = None
    runs: list[Run] = field(default_factory=list)

    def compare(self, runs: Sequence[Run], wanted: list[list[int]]) -> None:
        """Count the texts that are wanted; the fewest of all runs are kept."""
        for run in runs:
            pairs = zip(wanted, run.tokens, strict=True)
            equal = sum(want[: len(tokens)] == tokens for want, tokens in pairs)
            self.equal = equal if self.equal is None else min(self.equal, equal)

    def line(self) -> dict[str, Any]:
        """Return what was measured, and print it."""
        speeds = [round(run.tokens_per_second, 1) for run in self.runs]
        run, steps = self.runs[0], [len(gained) for gained in self.runs[0].accept_lens]
        line: dict[str, Any] = {
            "setting": self.setting,
            "way": self.way,
            "new_tokens": len(run.tokens[0]),
            "tokens_per_second": round(statistics.median(speeds), 1),
            "runs": speeds,
            "equal": self.equal,
        }
        if steps:
            seconds = statistics.median(run.seconds for run in self.runs)
            line |= {
                "steps": max(steps),
                "ms_per_step": round(1e3 * seconds / max(steps), 4),
                "accepted_per_step": round(sum(map(sum, run.accept_lens)) / sum(steps), 3),
            }
        print(
            "  " + ", ".join(f"{name} {line[name]}" for name in line if name != "runs"), flush=True
        )
        return line


def contestants(settings: Sequence[str], ways: Sequence[str], size: int) -> list[Contestant]:
    """Return who decodes a batch of ``size`` requests."""
    # a plain step is one forward, however it is recorded; one request has no halves
    found = [
        Contestant(setting, way)
        for setting in settings
        for way in ways
        if (setting != PLAIN or way != THREE) and (size > 1 or way != HALVES)
    ]
    return [*found, Contestant(TRANSFORMERS, EAGER)]


class Batch:
    """A batch that is decoded in every way; ``new`` are the tokens of a request."""

    def __init__(
        self, models: tuple[Any, Any], generate: Transformers, prompts: list[list[int]], new: int
    ) -> None:
        self.models, self.generate, self.prompts, self.new = models, generate, prompts, new

    def runs(self, one: Contestant, temperature: float, count: int) -> list[Run]:
        """Capture a contestant anew and decode ``count`` times."""
        if one.setting == TRANSFORMERS:
            return [self._transformers(temperature) for _ in range(count)]
        setting = Setting(one.setting, TREES[one.setting], temperature)
        engine = setting.engine(self.models, CONTEXT, len(self.prompts), **WAYS[one.way])
        requests = setting.requests(self.prompts, self.new, ignore_eos=True)
        return [decode(engine, requests) for _ in range(count)]

    def _transformers(self, temperature: float) -> Run:
        """Decode by transformers; the time is that of all tokens but the first ones."""
        marks = [time.perf_counter()]
        for count in (1, self.new):
            texts = self.generate.texts(self.prompts, count, temperature)
            marks.append(time.perf_counter())
        return Run(texts, marks[2] - 2 * marks[1] + marks[0])


def cell(
    models: tuple[Any, Any],
    generate: Transformers,
    prompts: list[list[int]],
    temperature: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Decode a batch in every way, in turns; returns what was measured, and prints it."""
    name = f"batch {len(prompts)}, {'drawn' if temperature else 'greedy'}"
    print(name, flush=True)
    found = contestants(args.settings, args.ways, len(prompts))
    first: dict[str, Contestant] = {}
    # what launches kernel by kernel gets less to do where others are to be timed as well
    short = min(args.new, SHORT) if len(args.ways) > 1 else args.new
    for nth in range(args.repeats):
        for one in (one for one in found if one.way != EAGER or nth < EAGER_TURNS):
            batch = Batch(models, generate, prompts, short if one.way == EAGER else args.new)
            # the first run of all compiles
            runs = batch.runs(one, temperature, 1 if nth else 2)
            one.runs.append(runs[-1])
            # drawn texts of different trees have one distribution, not the same tokens
            other = first.setdefault(one.setting if temperature else PLAIN, one)
            if other is not one:
                one.compare(runs, other.runs[0].tokens)
            free()
    made = {"name": name, "batch": len(prompts), "temperature": temperature}
    return made | {"lines": [one.line() for one in found]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--new", type=int, default=128, help="tokens of a request")
    parser.add_argument("--repeats", type=int, default=4, help="captures, a turn each")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--settings", nargs="+", choices=TREES, default=list(TREES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="eager alone without CUDA")
    parser.add_argument("--quick", action="store_true", help="one tree, batches of 1 and 8")
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.batch, args.settings, args.repeats = [1, 8], list(QUICK), min(args.repeats, 2)
    args.ways = args.ways or (list(WAYS) if torch.cuda.is_available() else [EAGER])
    return args


def main() -> None:
    args, begin = arguments(), time.perf_counter()
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, args.dtype)
    models = pair(device, dtype)
    prompts = held_out_prompts(max(args.batch), models[0].tokenizer)
    generate = Transformers(plain_target(device, dtype))
    found: dict[str, Any] = {
        "format": 1,
        "part": "pair",
        "title": "The shipped pair",
        "machine": machine(args.commit),
        "models": "fused",
        "dtype": args.dtype,
        "prompt_tokens": PROMPT_TOKENS,
        "repeats": args.repeats,
        "trees": {name: TREES[name] for name in args.settings},
        "cells": [],
    }
    for size in args.batch:
        for temperature in TEMPERATURES:
            found["cells"].append(cell(models, generate, prompts[:size], temperature, args))
            found["seconds"] = round(time.perf_counter() - begin, 1)
            # what is known is kept after every cell
            if args.out:
                write(found, args.out)
    print(f"{found['seconds']} s")
    wrong = [
        f"{one['name']}, {line['setting']}, {line['way']}"
        for one in found["cells"]
        for line in one["lines"]
        if not one["temperature"] and line["setting"] != TRANSFORMERS
        if line["equal"] not in (None, one["batch"])
    ]
    assert args.dtype != "float32" or not wrong, f"not plain decoding's texts: {wrong}"


if __name__ == "__main__":
    main()
