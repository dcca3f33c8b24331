"""Thousands of steps with requests that come and go at random, checked all along.

Requests are of a few kinds (prompt, how they are drawn, longest text), joined and ended at random,
some by their length, some by their context, some dropped while a step is in flight. A kind's
tokens do not depend on its company, so every text is held against a fresh run of its kind: greedy
ones against plain decoding, drawn ones (of one setting) against an engine that runs nothing else.
Drawn ones run, but are not compared, where a setting is chosen anew for every step: another tree
spends the same coins on other tokens, so of those texts only the distribution is the same, which
`tests/engine/test_engine_laws.py` tests. What a step gains is held against the same runs, at the
start and at the end.

What is known is written every thousand steps, and before it is judged: a run that is cut short or
refused leaves what it has seen.

    python -m bench.soak [--steps 10000] [--rows 16] [--seed 0] [--commit SHA] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.soak_checks import Found, acceptance, compare, judge, memory, wanted
from bench.suite import results
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specattn.engine.policy import Observed
    from specattn.engine.request import RequestOutput

OUT = Path(__file__).parent / "results" / "soak_h200.json"
TREE, OTHERS = (5, 4, 16), ((3, 1, 4), (0, 1, 1))
CONTEXT, WINDOWS, NEW = 384, 24, 120
WINDOW = 1000
# a chance per step that requests join where there is room, and per request of a rare kind
JOINS, RARE = 0.12, 0.005


class Churn:
    """Requests that come and go at random over an engine.

    Parameters
    ----------
    engine : Engine
        Without requests.
    kinds : sequence of Request
        What comes; a request gets up to its kind's tokens.
    seed : int
        Of all that is random here.
    joining : callable, optional
        Makes what prompts run within.
    """

    def __init__(
        self,
        engine: Engine,
        kinds: Sequence[Request],
        seed: int,
        joining: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.engine, self.kinds, self.joining = engine, kinds, joining
        self.rng = random.Random(seed)
        self.running: list[tuple[int, RequestOutput]] = []
        self.joins = self.level = 0
        self.sizes: set[int] = set()
        # per step, of every request in it: kind, which of its steps, and what it gained
        self.gains: list[list[tuple[int, int, int]]] = []

    def join(self, count: int, kinds: Sequence[int] = ()) -> None:
        """Add requests: of the kinds that are named, then of any."""
        rng, rare = self.rng, len(self.kinds) // 16
        picked = list(kinds)
        while len(picked) < count:  # the last kinds are long, and seldom
            last = rare and rng.random() < RARE
            first = len(self.kinds) - rare
            picked.append(rng.randrange(first, len(self.kinds)) if last else rng.randrange(first))
        requests = [
            replace(
                kind,
                max_new_tokens=rng.randint(1, kind.max_new_tokens)
                if kind.max_new_tokens < self.engine.config.max_context_len
                else kind.max_new_tokens,
            )
            for kind in (self.kinds[at] for at in picked)
        ]
        with self.joining():
            results = self.engine.add(requests)
        self.running += zip(picked, results, strict=True)
        self.joins += count

    def step(self) -> list[tuple[int, RequestOutput]]:
        """Take a step, perhaps after requests joined; returns those that ended, by kind."""
        engine, rng = self.engine, self.rng
        if rng.random() < 0.02 or not self.gains:
            self.level = rng.randint(1, engine.config.max_num_reqs)
        missing = self.level - engine.num_running
        if not engine.num_running or (missing > 0 and rng.random() < JOINS):
            self.join(rng.randint(1, max(1, missing)))
        self.sizes.add(engine.num_running)
        before = {id(result): (kind, result.steps) for kind, result in self.running}
        engine.step(ahead=rng.random() < 0.9)
        self.gains.append(
            [
                (*before[id(result)], result.accept_lens[-1])
                for _, result in self.running
                # an end cuts what the last step gained
                if result.steps > before[id(result)][1] and not result.finish_reason
            ]
        )
        ended = [item for item in self.running if item[1].finish_reason]
        self.running = [item for item in self.running if not item[1].finish_reason]
        return ended

    def drop(self) -> list[tuple[int, RequestOutput]]:
        """Drop everything that runs, a step in flight included; returns it."""
        self.engine.clear()
        dropped, self.running = self.running, []
        return dropped


class Dice:
    """A policy: any of the settings, at random, for every step."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, observed: Observed) -> SpecConfig:
        return self._rng.choice(observed.configs)


def soak(
    engine: Engine,
    fresh: Engine,
    plain: Engine,
    kinds: Sequence[Request],
    steps: int,
    *,
    seed: int = 0,
    check_every: int = 250,
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Run ``steps`` steps and check them; returns what was seen.

    Parameters
    ----------
    engine, fresh, plain : Engine
        What is soaked, another one like it, and one that decodes plainly; none has requests.
    kinds : sequence of Request
        What comes; the last sixteenth comes seldom.
    steps, check_every : int
        How many, and after how many of them the slots are checked.
    seed : int
        Of all that is random.
    keep : callable
        Is handed what is known now and then, and what will be returned before it is judged.

    Raises
    ------
    AssertionError
        If a text is wrong, a slot or row was lost, memory grew, or acceptance moved.
    """
    # one setting: drawn tokens and gains have to be equal, too
    fixed, begin = not engine.configs.adaptive, time.perf_counter()
    want = wanted(fresh, plain, kinds)
    slots, rows = engine.table.num_free_slots, engine.table.num_free_rows
    last = engine.configs.fit(engine.config, 1)
    for config in (*engine.configs.all, last):  # what is made on first use
        engine.decoder(config).capture(sampled=True)
    print(f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
    churn, found, begin = Churn(engine, kinds, seed), Found(), time.perf_counter()
    churn.join(rows, range(len(kinds) - rows, len(kinds)))
    marks: list[dict[str, int]] = []
    warm = max(1, steps // 10)
    for at in range(1, steps + 1):
        ended = churn.step()
        if churn.rng.random() < 0.002 or at in (warm, steps):
            dropped = churn.drop()
            found.dropped += len(dropped)
            ended += dropped
            assert engine.table.num_free_slots == slots, "slots were lost"
            assert engine.table.num_free_rows == rows, "rows were lost"
        if at % check_every == 0 or at == steps:
            engine.table.check()
        for kind, result in ended:
            found.requests += 1
            compare(kinds[kind], want[kind], result, plain, found, drawn=fixed)
        if at in (warm, steps):
            marks.append(memory())
        if at % WINDOW == 0:
            keep(_seen(at, begin, churn, found) | {"memory": memory()})
            print(
                f"{at} steps, {time.perf_counter() - begin:.0f} s, {found.requests} texts checked",
                flush=True,
            )
    window = min(WINDOW, steps // 2)
    first, last = (acceptance(part, want) for part in (churn.gains[:window], churn.gains[-window:]))
    report = _seen(steps, begin, churn, found) | {
        "slots_lost": 0,
        "rows_lost": 0,
        "first_steps": first,
        "last_steps": last,
        "memory_warm": marks[0],
        "memory_end": marks[-1],
    }
    if not fixed:
        report["steps_by_setting"] = {
            f"{config.num_steps},{config.topk},{config.num_draft_tokens}": count
            for config, count in engine.configs.used.items()
        }
    keep(report)
    judge(report, fixed=fixed)
    report["passed"] = True
    keep(report)
    return report


def _seen(steps: int, begin: float, churn: Churn, found: Found) -> dict[str, Any]:
    return {
        "passed": False,
        "steps": steps,
        "joins": churn.joins,
        "seconds": round(time.perf_counter() - begin, 1),
        "batch_sizes": sorted(churn.sizes),
        **vars(found),
    }


def kinds_of(prompts: Sequence[Sequence[int]], new: int, context: int) -> list[Request]:
    """Return greedy and drawn requests of every prompt, and a sixteenth that fill the context."""
    drawing = (
        SamplingParams(),
        SamplingParams(1.0, seed=5),
        SamplingParams(),
        SamplingParams(0.7, top_p=0.9, seed=6),
        SamplingParams(),
        SamplingParams(1.2, 20, seed=7),
    )
    found = [
        Request(prompt, new, drawing[(turn + at) % len(drawing)], ignore_eos=True)
        for turn in (0, 1)
        for at, prompt in enumerate(prompts)
    ]
    long = [replace(kind, max_new_tokens=context) for kind in found[: max(1, len(found) // 15)]]
    return [*found, *long]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=16, help="requests at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    from bench.acceptance import PROMPT_TOKENS, held_out_prompts
    from bench.shipped import pair
    from bench.suite.machine import machine

    target, draft = pair("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    rng = random.Random(args.seed)
    texts = held_out_prompts(WINDOWS, target.tokenizer)
    prompts = [text[: rng.randint(4, PROMPT_TOKENS)] for text in texts]
    prompts[1::4] = [text[: len(text) // 2 + 1] for text in prompts[::4]]  # prefixes to share
    kinds = kinds_of(prompts, NEW, CONTEXT)

    def engine(tree: tuple[int, int, int], **more: Any) -> Engine:
        config = SpecConfig(*tree, CONTEXT, args.rows)
        return Engine(target, draft, config, **{"buckets": [4, args.rows], **more})

    plain, fresh = engine((0, 1, 1)), engine(TREE)
    report: dict[str, Any] = {
        "machine": machine(args.commit),
        "dtype": "float32",
        "tree": TREE,
        "rows": args.rows,
        "seed": args.seed,
    }

    def keep(part: str) -> Callable[[dict[str, Any]], None]:
        def write(seen: dict[str, Any]) -> None:
            report[part] = seen
            results.write(report, args.out)

        return write

    others = [SpecConfig(*tree, CONTEXT, args.rows) for tree in OTHERS]
    runs: dict[str, tuple[int, dict[str, Any]]] = {
        "one_setting": (args.steps, {"buckets": None}),
        "switching": (args.steps // 4, {"configs": others, "policy": Dice(args.seed)}),
        "piecewise": (args.steps // 10, {"cudagraph": "piecewise"}),
        "halves": (args.steps // 10, {"tbo": True}),
    }
    for at, (part, (steps, options)) in enumerate(runs.items()):
        soak(
            engine(TREE, **options),
            fresh,
            plain,
            kinds,
            steps,
            seed=args.seed + at,
            keep=keep(part),
        )
        print(json.dumps(report[part]), flush=True)


if __name__ == "__main__":
    main()
