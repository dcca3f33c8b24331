"""Tokens per second of the shipped pair, every way there is to run it, beside transformers.

Whole batches are decoded to their ends, a step ahead as `Engine.generate` does. Prompts and
captures are not timed. All contestants of a cell run in one process, in turn, and the figure is
the median. Before a run's time counts, its greedy tokens are compared with plain decoding's
(float32: they must be equal; in half precision equal texts are counted), and drawn ones with the
first way of the same setting.

transformers decodes with its own ``generate`` at its defaults (eager, a cache that grows), the
batch at once: the prompts are of one length, so nothing is padded. Its time for one token, prompt
included, is subtracted.

    python -m bench.decode [--batch 1 8 64] [--new 128] [--repeats 3] [--dtype bfloat16]
    python -m bench.decode --quick
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.acceptance import PROMPT_TOKENS, held_out_prompts
from bench.suite.decode import EAGER, ONE, PLAIN, THREE, TRANSFORMERS, slower
from bench.suite.machine import machine
from specattn.config import SpecConfig
from specattn.models import FusedEagle3, FusedTarget, HFTarget, load_draft
from specattn.spec.generate import Engine
from specattn.spec.request import Request
from specattn.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OUT = Path(__file__).parent / "results" / "pair_h200.json"
PAIR = files("specattn") / "pair"
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


@dataclass(frozen=True)
class Run:
    """A batch decoded to its end, and how long the loop took.

    Parameters
    ----------
    tokens : list of list of int
        Of every request, the prompt's own first one included.
    seconds : float
        Of the loop.
    accept_lens : list of list of int
        What every request gained, step by step; empty for transformers.
    whole_steps, whole_seconds : int, float
        Steps after which every request still ran, and their time.
    """

    tokens: list[list[int]]
    seconds: float
    accept_lens: list[list[int]] = field(default_factory=list)
    whole_steps: int = 0
    whole_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return sum(len(tokens) - 1 for tokens in self.tokens) / self.seconds


def decode(engine: Engine, requests: Sequence[Request]) -> Run:
    """Decode a batch to its end; the first tokens come with the prompts and are not timed."""
    results = engine.add(requests)
    whole_steps, whole_seconds, steps = 0, 0.0, 0
    begin = time.perf_counter()
    while engine.num_live:
        engine.step(ahead=True)
        steps += 1
        if engine.num_live == len(requests):
            whole_steps, whole_seconds = steps, time.perf_counter() - begin
    engine.clear()
    seconds = time.perf_counter() - begin
    return Run([r.tokens for r in results], seconds, [r.accept_lens for r in results],
               whole_steps, whole_seconds)


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
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
            do_sample=bool(temperature), **drawing,
        )
        tokens = out[:, ids.shape[1] :].tolist()
        return tokens, time.perf_counter() - begin


@dataclass
class Contestant:
    """A setting, run one way over one batch; collects its runs.

    ``wanted`` are the tokens it is compared with, once they are known.
    """

    setting: str
    way: str
    repeats: int
    run: Callable[[], Run]
    wanted: list[list[int]] | None = None
    equal: int | None = None
    runs: list[Run] = field(default_factory=list)

    def turn(self, *, exact: bool, counts: bool) -> Run:
        """Run once and compare; the time is kept if it ``counts``.

        Raises
        ------
        ArithmeticError
            If tokens differ where they must be equal.
        """
        found = self.run()
        if self.wanted is not None:
            pairs = zip(self.wanted, found.tokens, strict=True)
            equal = sum(want[: len(tokens)] == tokens for want, tokens in pairs)
            self.equal = equal if self.equal is None else min(self.equal, equal)
            if exact and equal < len(found.tokens):
                raise ArithmeticError(
                    f"{self.setting}, {self.way}: {len(found.tokens) - equal} of "
                    f"{len(found.tokens)} texts are not those of plain decoding"
                )
        if counts:
            self.runs.append(found)
        return found

    def line(self) -> dict[str, Any]:
        """Return what was measured, and print it."""
        speeds = [run.tokens_per_second for run in self.runs]
        run, steps = self.runs[0], [len(gained) for gained in self.runs[0].accept_lens]
        line: dict[str, Any] = {
            "setting": self.setting, "way": self.way, "new_tokens": len(run.tokens[0]),
            "tokens_per_second": round(statistics.median(speeds), 1),
            "runs": [round(speed, 1) for speed in speeds], "equal": self.equal,
        }
        if steps:
            gained = sum(map(sum, run.accept_lens))
            seconds = statistics.median(run.seconds for run in self.runs)
            line |= {
                "steps": max(steps), "ms_per_step": round(1e3 * seconds / max(steps), 4),
                "accepted_per_step": round(gained / sum(steps), 3),
            }
        if run.whole_steps:
            line["whole_batch_tokens_per_second"] = round(statistics.median(
                sum(sum(gained[: run.whole_steps]) for gained in run.accept_lens)
                / run.whole_seconds for run in self.runs
            ), 1)
        print(f"  {self.setting:18} {self.way:13} {line['tokens_per_second']:10,.0f} tokens/s  "
              f"{line.get('ms_per_step', 0):8.3f} ms/step  "
              f"{line.get('accepted_per_step', 1):.2f} per step  equal {self.equal}", flush=True)
        return line


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
            found = contestant.turn(exact=exact and not temperature, counts=False)
            wanted.setdefault(alike, found.tokens)
        gc.collect()
        for turn in range(repeats):
            for contestant in contestants:
                if turn < contestant.repeats:
                    contestant.turn(exact=exact and not temperature, counts=True)
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


def pair(dtype: torch.dtype, device: str, *, fused: bool) -> tuple[Any, Any]:
    """Load the shipped pair, with transformers' modules or with the fused ones."""
    source = HFTarget.from_pretrained(str(PAIR / "target"), dtype=dtype, device=device)
    draft = load_draft(str(PAIR / "draft"), source, dtype=dtype, device=device)
    if fused:
        target = FusedTarget.from_target(source).with_features(draft.features)
        return target, FusedEagle3.from_head(draft, source.max_context_len)
    return source.with_features(draft.features), draft


def plain_target(dtype: torch.dtype, device: str) -> Any:
    """Load the shipped target as transformers does."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(PAIR / "target"), dtype=dtype).to(device)


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
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.batch, args.settings, args.repeats = [1, 8], list(QUICK), min(args.repeats, 2)
    begin = time.perf_counter()
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, args.dtype)
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
