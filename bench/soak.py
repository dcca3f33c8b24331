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

from bench.soak_checks import (
    Found,
    acceptance,
    compare,
    greedy_texts,
    judge,
    memory,
    wanted,
)
from bench.suite import results
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.soak_checks import Wanted
    from bench.soak_watch import Watch
    from specattn.engine.policy import Observed
    from specattn.engine.request import RequestOutput

OUT = Path(__file__).parent / "results" / "soak_h200.json"
TREE, OTHERS = (5, 4, 16), ((3, 1, 4), (0, 1, 1))
CONTEXT, WINDOWS, NEW = 384, 24, 120
WINDOW = 1000
# a chance per step that requests join where there is room, and per request of a rare kind
JOINS, RARE = 0.12, 0.005
# a chance per step that everything is dropped after it
DROPS = 0.002
DRAWING = (
    SamplingParams(),
    SamplingParams(1.0, seed=5),
    SamplingParams(),
    SamplingParams(0.7, top_p=0.9, seed=6),
    SamplingParams(),
    SamplingParams(1.2, 20, seed=7),
)


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


class Trial:
    """An engine that is soaked: what comes to it, and what its texts are held against.

    Parameters
    ----------
    engine, plain : Engine
        What is soaked, and one that decodes plainly; neither has requests.
    kinds : sequence of Request
        What comes; the last sixteenth comes seldom.
    want : sequence of Wanted
        What each of them comes to.
    seed : int
        Of all that is random here.
    watch : Watch, optional
        What watches steps, but for the prompts of those who join.
    """

    def __init__(
        self,
        engine: Engine,
        plain: Engine,
        kinds: Sequence[Request],
        want: Sequence[Wanted],
        seed: int,
        watch: Watch | None = None,
    ) -> None:
        self.engine, self.plain, self.kinds, self.want = engine, plain, kinds, want
        none = nullcontext, nullcontext
        self._watching, joining = (watch.watching, watch.paused) if watch is not None else none
        # one setting: drawn tokens and gains have to be equal, too
        self.fixed = not engine.configs.adaptive
        self.slots, self.rows = engine.table.num_free_slots, engine.table.num_free_rows
        last = engine.configs.fit(engine.config, 1)
        for config in (*engine.configs.all, last):  # what is made on first use
            engine.decoder(config).capture(sampled=True)
        self.churn, self.found = Churn(engine, kinds, seed, joining), Found()

    def begin(self) -> None:
        """Let the last kinds come, as many as there are rows."""
        self.churn.join(self.rows, range(len(self.kinds) - self.rows, len(self.kinds)))

    def step(self) -> None:
        """Take a step, perhaps drop everything after it, and check the texts that ended."""
        with self._watching():
            ended = self.churn.step()
        self._check(ended)
        if self.churn.rng.random() < DROPS:
            self.drop()

    def drop(self) -> None:
        """Drop everything; all slots and rows must be free then."""
        dropped = self.churn.drop()
        self.found.dropped += len(dropped)
        assert self.engine.table.num_free_slots == self.slots, "slots were lost"
        assert self.engine.table.num_free_rows == self.rows, "rows were lost"
        self._check(dropped)

    def _check(self, ended: Sequence[tuple[int, RequestOutput]]) -> None:
        for kind, result in ended:
            self.found.requests += 1
            compare(
                self.kinds[kind],
                self.want[kind],
                result,
                self.plain,
                self.found,
                drawn=self.fixed,
            )

    def seen(self) -> dict[str, Any]:
        """Return what came, and what the checks saw."""
        churn = self.churn
        return {"joins": churn.joins, "batch_sizes": sorted(churn.sizes), **vars(self.found)}

    def result(self) -> dict[str, Any]:
        """Return what was seen when all steps were taken."""
        steps = self.churn.gains
        window = min(WINDOW, len(steps) // 2)
        first, last = (acceptance(part, self.want) for part in (steps[:window], steps[-window:]))
        return self.seen() | {
            "slots_lost": 0,
            "rows_lost": 0,
            "first_steps": first,
            "last_steps": last,
        }


def run(
    trials: Sequence[Trial],
    steps: int,
    *,
    seed: int,
    check_every: int,
    measure: Callable[[], dict[str, Any]],
    keep: Callable[[int], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take steps of trials at random; returns what was measured after the warm-up and at the end.

    Parameters
    ----------
    trials : sequence of Trial
        Which have begun.
    steps, check_every : int
        How many of all trials together, and after how many of them the slots are checked.
    seed : int
        Of which trial takes a step.
    measure : callable
        Is called when nothing runs.
    keep : callable
        Is handed how many steps were taken, now and then.
    """
    rng, warm, marks = random.Random(seed), max(1, steps // 10), list[dict[str, Any]]()
    for at in range(1, steps + 1):
        rng.choice(trials).step()
        if at in (warm, steps):
            for trial in trials:
                trial.drop()
            marks.append(measure())
        if at % check_every == 0 or at == steps:
            for trial in trials:
                trial.engine.table.check()
        if at % WINDOW == 0:
            keep(at)
    return marks[0], marks[-1]


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
    begin = time.perf_counter()
    want = wanted(fresh, greedy_texts(plain, kinds), kinds)
    trial = Trial(engine, plain, kinds, want, seed)
    print(f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
    begin = time.perf_counter()
    trial.begin()

    def so_far(at: int) -> dict[str, Any]:
        seconds = round(time.perf_counter() - begin, 1)
        return {"passed": False, "steps": at, "seconds": seconds}

    def note(at: int) -> None:
        keep(so_far(at) | trial.seen() | {"memory": memory()})
        tell(at, begin, trial.found.requests)

    warm, end = run([trial], steps, seed=seed, check_every=check_every, measure=memory, keep=note)
    report = so_far(steps) | trial.result() | {"memory_warm": warm, "memory_end": end}
    if not trial.fixed:
        report["steps_by_setting"] = {
            f"{config.num_steps},{config.topk},{config.num_draft_tokens}": count
            for config, count in engine.configs.used.items()
        }
    keep(report)
    judge(report, fixed=trial.fixed)
    report["passed"] = True
    keep(report)
    return report


def tell(steps: int, begin: float, texts: int) -> None:
    """Print how far a soak is."""
    print(f"{steps} steps, {time.perf_counter() - begin:.0f} s, {texts} texts checked", flush=True)


def kinds_of(
    prompts: Sequence[Sequence[int]],
    new: int,
    context: int,
    drawing: Sequence[SamplingParams] = DRAWING,
) -> list[Request]:
    """Return requests of every prompt, drawn in turn, and a sixteenth that fill the context."""
    found = [
        Request(prompt, new, drawing[(turn + at) % len(drawing)], ignore_eos=True)
        for turn in (0, 1)
        for at, prompt in enumerate(prompts)
    ]
    long = [replace(kind, max_new_tokens=context) for kind in found[: max(1, len(found) // 15)]]
    return [*found, *long]


def random_prompts(count: int, tokenizer: Any, seed: int) -> list[list[int]]:
    """Return held-out texts of random lengths, a quarter of them prefixes of others."""
    from bench.acceptance import PROMPT_TOKENS, held_out_prompts

    rng, texts = random.Random(seed), held_out_prompts(count, tokenizer)
    prompts = [text[: rng.randint(4, PROMPT_TOKENS)] for text in texts]
    prompts[1::4] = [text[: len(text) // 2 + 1] for text in prompts[::4]]
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=16, help="requests at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    from bench.shipped import pair
    from bench.suite.machine import machine

    target, draft = pair("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    prompts = random_prompts(WINDOWS, target.tokenizer, args.seed)
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
