"""Thousands of steps of many engines, with requests that come and go at random, checked all along.

An engine per proposer, and per way to record or choose a step (`bench.soak_engines`), all on one
device; one of them, at random, takes each step. Requests are of a few kinds: prompt, how they are
drawn, processors, log-probabilities, longest text. They join and end at random, some by their
length, some by their context, some dropped while a step is in flight. A kind's tokens do not
depend on its company, so every text is held against its engine's first run of its kind, before the
steps, and greedy ones against plain decoding's. Drawn ones run, but are not compared, where a
setting is chosen anew for every step: another tree spends the same coins on other tokens, so of
those texts only the distribution is the same, which `tests/engine/test_engine_laws.py` tests. What
a step gains is held against the same runs, at the start and at the end.

Steps are watched: a sync ends the run, and waits and allocations are counted (`bench.soak_watch`).
Requests with a grammar are left out: their steps wait for the host by design. What is known is
written every thousand steps, and before it is judged: a run that is cut short or refused leaves
what it has seen. The record also has what each engine needs of memory.

    python -m bench.soak [--steps 10000] [--rows 8] [--only DFlash] [--commit SHA] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import soak_engines
from bench.acceptance import PROMPT_TOKENS, held_out_prompts
from bench.soak_checks import (
    Found,
    compare,
    greedy_texts,
    judge_memory,
    judge_steps,
    judge_texts,
    memory,
    wanted,
)
from bench.soak_watch import Watch
from bench.suite import results
from bench.suite.machine import machine
from specattn.engine.request import Request
from specattn.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from bench.soak_checks import Wanted
    from specattn.config import SpecConfig
    from specattn.engine.engine import Engine
    from specattn.engine.policy import Observed
    from specattn.engine.request import RequestOutput

OUT = Path(__file__).parent / "results" / "soak_proposers.json"
CONTEXT, WINDOWS, NEW = 384, 16, 200
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
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=3),
    SamplingParams(0.9, min_p=0.05, presence_penalty=0.6, seed=8, logprobs=0),
    SamplingParams(logprobs=2, logprobs_of="processed"),
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
        if rng.random() < 0.02 or not self.level:
            self.level = rng.randint(1, engine.config.max_num_reqs)
        missing = self.level - engine.num_running
        if not engine.num_running or (missing > 0 and rng.random() < JOINS):
            self.join(rng.randint(1, max(1, missing)))
        self.sizes.add(engine.num_running)
        engine.step(ahead=rng.random() < 0.9)
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


class Trial(Churn):
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
    watch : Watch
        What watches steps, but for the prompts of those who join.
    """

    def __init__(
        self,
        engine: Engine,
        plain: Engine,
        kinds: Sequence[Request],
        want: Sequence[Wanted],
        seed: int,
        watch: Watch,
    ) -> None:
        super().__init__(engine, kinds, seed, watch.paused)
        self.plain, self.want, self.watch, self.found = plain, want, watch, Found()
        # one setting: drawn tokens and gains have to be equal, too
        self.fixed = not engine.configs.adaptive
        self.slots, self.rows = engine.table.num_free_slots, engine.table.num_free_rows
        last = engine.configs.fit(engine.config, 1)
        for config in (*engine.configs.all, last):  # what is made on first use
            engine.decoder(config).capture(sampled=True)

    def begin(self) -> None:
        """Let the last kinds come, as many as there are rows."""
        self.join(self.rows, range(len(self.kinds) - self.rows, len(self.kinds)))

    def step(self) -> list[tuple[int, RequestOutput]]:
        """Take a step, perhaps drop everything after it, and check the texts that ended."""
        with self.watch.watching():
            ended = super().step()
        self._check(ended)
        if self.rng.random() < DROPS:
            self.drop()
        return ended

    def drop(self) -> list[tuple[int, RequestOutput]]:
        """Drop everything; all slots and rows must be free then."""
        dropped = super().drop()
        self.found.dropped += len(dropped)
        assert self.engine.table.num_free_slots == self.slots, "slots were lost"
        assert self.engine.table.num_free_rows == self.rows, "rows were lost"
        self._check(dropped)
        return dropped

    def _check(self, ended: Sequence[tuple[int, RequestOutput]]) -> None:
        for at, result in ended:
            kind, want = self.kinds[at], self.want[at]
            compare(kind, want, result, self.plain, self.found, fixed=self.fixed)

    def seen(self) -> dict[str, Any]:
        """Return what came, what the checks saw, and what the engine needs."""
        came = {"joins": self.joins, "batch_sizes": sorted(self.sizes)}
        return came | vars(self.found) | soak_engines.needs(self.engine)


def soak(
    engines: Mapping[str, Engine],
    plain: Engine,
    kinds: Sequence[Request],
    steps: int,
    *,
    seed: int = 0,
    check_every: int = 250,
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Run ``steps`` steps of engines at random and check them; returns what was seen.

    Parameters
    ----------
    engines : mapping of str to Engine
        What is soaked; none has requests.
    plain : Engine
        Decodes plainly; has no requests.
    kinds : sequence of Request
        What comes to each; the last sixteenth comes seldom.
    steps, check_every : int
        How many of all together, and after how many of them the slots are checked.
    seed : int
        Of all that is random.
    keep : callable
        Is handed what is known now and then, and what will be returned before it is judged.

    Raises
    ------
    AssertionError
        If a text is wrong, a slot or row was lost, memory grew, acceptance moved, or steps waited
        or allocated.
    """
    begin, watch, trials = time.perf_counter(), Watch(), dict[str, Trial]()
    texts = greedy_texts(plain, kinds)
    for at, (name, engine) in enumerate(engines.items()):
        want = wanted(engine, texts, kinds)
        trials[name] = Trial(engine, plain, kinds, want, seed + at, watch)
        print(f"{name}: ready after {time.perf_counter() - begin:.0f} s", flush=True)
    ready = round(time.perf_counter() - begin, 1)
    report: dict[str, Any] = {"passed": False, "seconds_to_get_ready": ready}
    begin = time.perf_counter()

    def note(at: int, **more: Any) -> None:
        seconds = round(time.perf_counter() - begin, 1)
        seen = {name: trial.seen() for name, trial in trials.items()}
        report.update(steps=at, seconds=seconds, proposers=seen, memory=memory(), **more)
        keep(report)
        texts = sum(trial.found.requests for trial in trials.values())
        print(f"{at} steps, {seconds:.0f} s, {texts} texts checked", flush=True)

    with watch.over(*engines.values()):
        marks = _take_steps(list(trials.values()), steps, seed, check_every, watch, note)
    for when, mark in zip(("warm", "end"), marks, strict=True):
        report[f"memory_{when}"] = mark["memory"]
    note(steps, watched=marks[-1]["watched"])
    judge_memory(report)
    judge_steps(report["watched"])
    for name, part in report["proposers"].items():
        judge_texts(part)
        assert not part["eager_steps"], f"{name}: {part['eager_steps']} steps ran eagerly"
    report["passed"] = True
    keep(report)
    return report


def _take_steps(
    trials: Sequence[Trial],
    steps: int,
    seed: int,
    check_every: int,
    watch: Watch,
    note: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Take steps of trials at random; return memory and waits after the warm-up and at the end."""
    rng, warm, marks = random.Random(seed), max(1, steps // 10), list[dict[str, Any]]()
    for trial in trials:
        trial.begin()
    for at in range(1, steps + 1):
        rng.choice(trials).step()
        if at in (warm, steps):
            for trial in trials:
                trial.drop()
            marks.append({"memory": memory(), "watched": watch.counted()})
            watch.reset()
        if at % check_every == 0 or at == steps:
            for trial in trials:
                trial.engine.table.check()
        if at % WINDOW == 0:
            note(at)
    return marks


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
    rng, texts = random.Random(seed), held_out_prompts(count, tokenizer)
    prompts = [text[: rng.randint(4, PROMPT_TOKENS)] for text in texts]
    prompts[1::4] = [text[: len(text) // 2 + 1] for text in prompts[::4]]
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=8, help="requests at once, of each engine")
    parser.add_argument("--only", default="", help="engines whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = soak_engines.Loader(device, torch.float32, CONTEXT, args.rows, Dice(args.seed))
    engines = {one.name: load.engine(one) for one in soak_engines.SETTINGS if args.only in one.name}
    plain = load.engine(soak_engines.PLAIN)
    prompts = random_prompts(WINDOWS, plain.target.model.tokenizer, args.seed)
    report: dict[str, Any] = {
        "machine": machine(args.commit),
        "dtype": "float32",
        "rows": args.rows,
        "context": CONTEXT,
        "seed": args.seed,
    }

    def keep(seen: dict[str, Any]) -> None:
        results.write(report | seen, args.out)

    kinds = kinds_of(prompts, NEW, CONTEXT)
    found = soak(engines, plain, kinds, args.steps, seed=args.seed, keep=keep)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
