"""Tokens per second of the shipped pair, every way there is to run it, beside transformers.

Whole batches are decoded to their ends, a step ahead as `Engine.generate` does. Prompts and
captures are not timed. All contestants of a cell run in one process, in turn, and the figure is
the median of the turns. Graphs are captured anew for every turn: what runs is the same, but
captures differ by a percent, which is more than one graph and three do.

Before anything is timed, every contestant's greedy tokens are compared with plain decoding's
(float32: they must be equal; in half precision, and of transformers, equal texts are counted), and
drawn ones with the first way of the same setting.

transformers decodes with its own ``generate`` at its defaults (eager, a cache that grows), the
batch at once: the prompts are of one length, so nothing is padded. Its time for one token, prompt
included, is subtracted.

    python -m bench.decode [--batch 1 8 64] [--new 128] [--repeats 4] [--dtype bfloat16]
    python -m bench.decode --quick
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.acceptance import PROMPT_TOKENS, held_out_prompts
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


class Transformers:
    """A model of transformers' under its own ``generate``."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        # texts go on past their ends, as those of the other contestants do
        self.model.generation_config.eos_token_id = None

    def decode(self, prompts: list[list[int]], new: int, temperature: float) -> Run:
        """Decode a batch; the time is that of all tokens but the first ones."""
        ids = torch.tensor(prompts, device=self.model.device)
        _, first = self._generate(ids, 1, temperature)
        tokens, seconds = self._generate(ids, new, temperature)
        return Run(tokens, seconds - first)

    def _generate(
        self, ids: torch.Tensor, new: int, temperature: float
    ) -> tuple[list[list[int]], float]:
        drawing = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        begin = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=bool(temperature),
            **drawing,
        )
        tokens = out[:, ids.shape[1] :].tolist()
        return tokens, time.perf_counter() - begin


@dataclass
class Contestant:
    """A setting, run one way over one batch, greedy or drawing; collects its runs.

    ``wanted`` are the tokens it is compared with; ``exact`` says whether they must be equal.
    """

    setting: str
    way: str
    temperature: float = 0.0
    wanted: list[list[int]] | None = None
    exact: bool = False
    equal: int | None = None
    runs: list[Run] = field(default_factory=list)

    def compare(self, found: Run) -> Run:
        """Compare a run's tokens, and return it.

        Raises
        ------
        ArithmeticError
            If tokens differ where they must be equal.
        """
        if self.wanted is not None:
            pairs = zip(self.wanted, found.tokens, strict=True)
            equal = sum(want[: len(tokens)] == tokens for want, tokens in pairs)
            self.equal = equal if self.equal is None else min(self.equal, equal)
            if self.exact and equal < len(found.tokens):
                raise ArithmeticError(
                    f"{self.setting}, {self.way}: {len(found.tokens) - equal} of "
                    f"{len(found.tokens)} texts are not those of plain decoding"
                )
        return found

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
            f"  {self.setting:18} {self.way:13} {line['tokens_per_second']:10,.0f} tokens/s  "
            f"{line.get('ms_per_step', 0):8.3f} ms/step  "
            f"{line.get('accepted_per_step', 1):.2f} per step  equal {self.equal}",
            flush=True,
        )
        return line


class Batch:
    """Everything that decodes one batch, greedy and drawing."""

    def __init__(
        self,
        models: tuple[Any, Any],
        prompts: list[list[int]],
        settings: Sequence[str],
        ways: Sequence[str],
        generate: Transformers,
        new: int,
    ) -> None:
        self.models, self.prompts, self.generate, self.new = models, prompts, generate, new
        # what launches kernel by kernel gets less to do where others are to be timed as well
        self.short = min(new, SHORT) if len(ways) > 1 else new
        # a plain step is one forward, however it is recorded; one request has no halves
        found = [
            (setting, way)
            for setting in settings
            for way in ways
            if (setting != PLAIN or way != THREE) and (len(prompts) > 1 or way != HALVES)
        ]
        self.contestants = {
            temperature: [Contestant(*one, temperature) for one in [*found, (TRANSFORMERS, EAGER)]]
            for temperature in TEMPERATURES
        }

    def turn(self, nth: int, *, exact: bool) -> None:
        """Capture every contestant anew and time it; the first turn compares all before."""
        made = [c for c in self.contestants[0.0] if c.setting != TRANSFORMERS]
        # in either order, for what comes second is put where the first has left room
        engines = {
            (c.setting, c.way): self._engine(c)
            for c in (reversed(made) if nth % 2 else made)
            if c.way != EAGER or nth < EAGER_TURNS
        }
        for temperature, contestants in self.contestants.items():
            wanted: dict[str, list[list[int]]] = {}
            for c in contestants if not nth else ():
                # drawn texts of different trees have one distribution, not the same tokens
                alike = c.setting if temperature else PLAIN
                c.wanted = wanted.get(alike)
                c.exact = exact and not temperature and c.setting != TRANSFORMERS
                # what is compiled at first use is so before anything is timed
                wanted.setdefault(alike, c.compare(self._run(c, engines)).tokens)
            gc.collect()
            for c in contestants:
                if c.way != EAGER or nth < EAGER_TURNS:
                    c.runs.append(c.compare(self._run(c, engines)))

    def _engine(self, contestant: Contestant) -> Engine:
        size = len(self.prompts)
        config = SpecConfig(*TREES[contestant.setting], CONTEXT, size)
        return Engine(*self.models, config, buckets=[size], **WAYS[contestant.way])

    def _run(self, contestant: Contestant, engines: dict[tuple[str, str], Engine]) -> Run:
        new = self.short if contestant.way == EAGER else self.new
        if contestant.setting == TRANSFORMERS:
            return self.generate.decode(self.prompts, new, contestant.temperature)
        requests = [
            Request(prompt, new, SamplingParams(contestant.temperature, seed=at), ignore_eos=True)
            for at, prompt in enumerate(self.prompts)
        ]
        return decode(engines[contestant.setting, contestant.way], requests)

    def cells(self) -> list[dict[str, Any]]:
        """Return what was measured, and print it."""
        found = []
        for temperature, contestants in self.contestants.items():
            name = f"batch {len(self.prompts)}, {'drawn' if temperature else 'greedy'}"
            print(name, flush=True)
            cell = {"name": name, "batch": len(self.prompts), "temperature": temperature}
            found.append(cell | {"lines": [contestant.line() for contestant in contestants]})
        return found


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
    return args


def main() -> None:
    args, begin = arguments(), time.perf_counter()
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, args.dtype)
    ways = args.ways or (list(WAYS) if device == "cuda" else [EAGER])
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
        batch = Batch(models, prompts[:size], args.settings, ways, generate, args.new)
        for nth in range(args.repeats):
            batch.turn(nth, exact=dtype == torch.float32)
        found["cells"] += batch.cells()
        found["slower_than_three_graphs"] = slower(found["cells"])
        found["seconds"] = round(time.perf_counter() - begin, 1)
        # what is known is kept after every batch
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
