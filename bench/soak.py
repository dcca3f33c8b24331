"""Thousands of steps with requests that come and go at random, checked all along.

Requests are of a few kinds (prompt, how they are drawn, longest text), joined and ended at random,
some by their length, some by their context, some dropped while a step is in flight. A kind's
tokens do not depend on its company, so every text is held against a fresh run of its kind: greedy
ones against plain decoding, drawn ones (of one setting) against an engine that runs nothing else.
What a step gains is held against the same runs, at the start and at the end.

    python -m bench.soak [--steps 10000] [--rows 16] [--seed 0] [--commit SHA] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specattn.cli.compare import top2_margin
from specattn.config import SpecConfig
from specattn.spec.generate import Engine
from specattn.spec.request import Request
from specattn.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specattn.spec.policy import Observed
    from specattn.spec.request import Generation

OUT = Path(__file__).parent / "results" / "soak_h200.json"
TREE, OTHERS = (5, 4, 16), ((3, 1, 4), (0, 1, 1))
CONTEXT, WINDOWS, NEW = 384, 24, 120
# float32: a first difference may stand where the two best logits are this close
MARGIN = 1e-3
# and a drawn token where a coin is at the edge of two; by how many of all drawn texts
DRAWN_APART = 0.01
WINDOW = 1000
# a chance per step that requests join where there is room, and per request of a rare kind
JOINS, RARE = 0.12, 0.005


@dataclass(frozen=True)
class Wanted:
    """What a kind's requests come to: its tokens, and what the steps gain of a fixed setting."""

    tokens: list[int]
    accept_lens: list[int]


@dataclass
class Found:
    """What the checks have seen so far."""

    requests: int = 0
    dropped: int = 0
    tokens: int = 0
    greedy: int = 0
    drawn: int = 0
    greedy_apart: int = 0
    drawn_apart: int = 0
    largest_margin: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


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
        self, engine: Engine, kinds: Sequence[Request], seed: int,
        joining: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.engine, self.kinds, self.joining = engine, kinds, joining
        self.rng = random.Random(seed)
        self.running: list[tuple[int, Generation]] = []
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
            replace(kind, max_new_tokens=rng.randint(1, kind.max_new_tokens)
                    if kind.max_new_tokens < self.engine.config.max_context_len
                    else kind.max_new_tokens)
            for kind in (self.kinds[at] for at in picked)
        ]
        with self.joining():
            results = self.engine.add(requests)
        self.running += zip(picked, results, strict=True)
        self.joins += count

    def step(self) -> list[tuple[int, Generation]]:
        """Take a step, perhaps after requests joined; returns those that ended, by kind."""
        engine, rng = self.engine, self.rng
        if rng.random() < 0.02 or not self.gains:
            self.level = rng.randint(1, engine.config.max_num_reqs)
        missing = self.level - engine.num_live
        if not engine.num_live or (missing > 0 and rng.random() < JOINS):
            self.join(rng.randint(1, max(1, missing)))
        self.sizes.add(engine.num_live)
        before = {id(result): (kind, result.steps) for kind, result in self.running}
        engine.step(ahead=rng.random() < 0.9)
        self.gains.append([
            (*before[id(result)], result.accept_lens[-1]) for _, result in self.running
            if result.steps > before[id(result)][1]
        ])
        ended = [item for item in self.running if item[1].finish_reason]
        self.running = [item for item in self.running if not item[1].finish_reason]
        return ended

    def drop(self) -> list[tuple[int, Generation]]:
        """Drop everything that runs, a step in flight included; returns it."""
        self.engine.clear()
        dropped, self.running = self.running, []
        return dropped


class Dice:
    """A policy: any of the settings, at random, for every step."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, observed: Observed) -> SpecConfig:
        return self._rng.choice(observed.settings)


def wanted(fresh: Engine, plain: Engine, kinds: Sequence[Request]) -> list[Wanted]:
    """Run every kind to its end: greedy texts are those of plain decoding."""
    own = fresh.generate(kinds)
    greedy = [at for at, kind in enumerate(kinds) if not kind.sampling.temperature]
    texts = dict(zip(greedy, plain.generate([kinds[at] for at in greedy]), strict=True))
    return [Wanted(texts.get(at, run).tokens, run.accept_lens) for at, run in enumerate(own)]


def compare(
    kind: Request, want: Wanted, result: Generation, plain: Engine, found: Found, *, drawn: bool
) -> None:
    """Hold a text against its kind's; drawn ones if they do not depend on the setting.

    Raises
    ------
    AssertionError
        If a greedy text departs where plain decoding was decided.
    """
    found.tokens += len(result.tokens)
    found.reasons[result.finish_reason] = found.reasons.get(result.finish_reason, 0) + 1
    pairs = list(zip(result.tokens, want.tokens, strict=False))
    apart = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if not kind.sampling.temperature:
        found.greedy += 1
        if apart is not None:
            margin = top2_margin(plain, [*kind.prompt, *want.tokens[:apart]])
            assert margin < MARGIN, (
                f"token {apart} after {kind.prompt[:8]}...: {pairs[apart]}, margin {margin}"
            )
            found.greedy_apart += 1
            found.largest_margin = max(found.largest_margin, margin)
    elif drawn:
        found.drawn += 1
        found.drawn_apart += apart is not None


def acceptance(
    gains: Sequence[Sequence[tuple[int, int, int]]], want: Sequence[Wanted]
) -> dict[str, float]:
    """Return tokens per request and step, the noise, and what fresh runs gained.

    ``fresh`` is what they gained in the very same steps, ``kinds`` what they gain on average.
    """
    taken = [
        (gained, want[kind].accept_lens[at])
        for step in gains for kind, at, gained in step if at < len(want[kind].accept_lens)
    ]
    numbers = [gained for gained, _ in taken]
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0
    return {
        "mean": statistics.fmean(numbers), "standard_error": error,
        "fresh": statistics.fmean(alone for _, alone in taken),
        "kinds": statistics.fmean(
            statistics.fmean(want[kind].accept_lens)
            for step in gains for kind, at, _ in step if at < len(want[kind].accept_lens)
        ),
    }


def memory() -> dict[str, int]:
    """Return device bytes in use and held, and the most that the process held, in KiB."""
    found = {"rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        found |= {"allocated": torch.cuda.memory_allocated(),
                  "reserved": torch.cuda.memory_reserved()}
    return found


def soak(
    engine: Engine, fresh: Engine, plain: Engine, kinds: Sequence[Request], steps: int, *,
    seed: int = 0, check_every: int = 250,
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

    Raises
    ------
    AssertionError
        If a text is wrong, a slot or row was lost, device memory grew, or acceptance moved.
    """
    # one setting: drawn tokens and gains have to be equal, too
    fixed = not engine.settings.adaptive
    want = wanted(fresh, plain, kinds)
    slots, rows = engine.table.num_free_slots, engine.table.num_free_rows
    for config in engine.settings.configs:  # what is made on first use
        for narrower in config.ladder():
            engine.decoder(narrower).capture(sampled=True)
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
        if at % WINDOW == 0:  # all that is left of a run that is cut short
            seconds = time.perf_counter() - begin
            print(f"{at} steps, {seconds:.0f} s, {found.requests} texts checked", flush=True)
    window = min(WINDOW, steps // 2)
    first, last = (
        acceptance(part, want) for part in (churn.gains[:window], churn.gains[-window:])
    )
    report = {
        "steps": steps, "joins": churn.joins, "seconds": round(time.perf_counter() - begin, 1),
        "batch_sizes": sorted(churn.sizes), **vars(found), "slots_lost": 0, "rows_lost": 0,
        "first_steps": first, "last_steps": last, "memory_warm": marks[0],
        "memory_end": marks[-1],
    }
    if not fixed:
        report["steps_by_setting"] = {
            f"{config.num_steps},{config.topk},{config.num_draft_tokens}": count
            for config, count in engine.settings.used.items()
        }
    judge(report, fixed=fixed)
    return report


def judge(report: dict[str, Any], *, fixed: bool) -> None:
    """Raise an AssertionError if memory grew, acceptance moved or drawn texts differ."""
    grown = report["memory_end"].get("allocated", 0) - report["memory_warm"].get("allocated", 0)
    assert grown <= 1 << 20, f"{grown} bytes more are in use than after the warm-up"
    held = report["memory_end"].get("reserved", 0) - report["memory_warm"].get("reserved", 0)
    assert held <= 64 << 20, f"{held} bytes more are held than after the warm-up"
    first, last = report["first_steps"], report["last_steps"]
    if not fixed:
        # a request's steps are not independent of each other
        noise = 8 * math.hypot(*(part["standard_error"] / part["kinds"] for part in (first, last)))
        early, late = (part["mean"] / part["kinds"] for part in (first, last))
        assert abs(early - late) < noise + 0.1 * early, (first, last)
        return
    for part in (first, last):
        assert abs(part["mean"] - part["fresh"]) < 0.01 * part["fresh"], part
    allowed = max(1, DRAWN_APART * report["drawn"])
    assert report["drawn_apart"] <= allowed, f"{report['drawn_apart']} drawn texts differ"


def kinds_of(prompts: Sequence[Sequence[int]], new: int, context: int) -> list[Request]:
    """Return greedy and drawn requests of every prompt, and a sixteenth that fill the context."""
    drawing = (
        SamplingParams(), SamplingParams(1.0, seed=5), SamplingParams(),
        SamplingParams(0.7, top_p=0.9, seed=6), SamplingParams(), SamplingParams(1.2, 20, seed=7),
    )
    found = [
        Request(prompt, new, drawing[(turn + at) % len(drawing)], ignore_eos=True)
        for turn in (0, 1) for at, prompt in enumerate(prompts)
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
    from bench.suite.machine import machine
    from specattn.models import HFTarget, load_draft

    cuda = torch.cuda.is_available()
    pair, device = files("specattn") / "pair", "cuda" if cuda else "cpu"
    target = HFTarget.from_pretrained(str(pair / "target"), dtype=torch.float32, device=device)
    draft = load_draft(str(pair / "draft"), target, dtype=torch.float32, device=device)
    target = target.with_features(draft.features)
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
        "machine": machine(args.commit), "dtype": "float32", "tree": TREE, "rows": args.rows,
        "seed": args.seed,
    }
    report["one_setting"] = soak(
        engine(TREE, buckets=None), fresh, plain, kinds, args.steps, seed=args.seed
    )
    print(json.dumps(report["one_setting"]), flush=True)
    switching = engine(
        TREE, configs=[SpecConfig(*tree, CONTEXT, args.rows) for tree in OTHERS],
        policy=Dice(args.seed),
    )
    report["switching"] = soak(
        switching, fresh, plain, kinds, args.steps // 4, seed=args.seed + 1
    )
    print(json.dumps(report["switching"]), flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
