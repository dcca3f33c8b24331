"""Thousands of steps in which every kind of proposer takes turns, checked all along.

An engine per proposer, all on one device; one of them, at random, takes each step. Requests come
and go in each as `bench.soak` lets them: greedy, drawn, and with processors and log-probabilities,
which are held against plain decoding's, too. Every text and what its steps gain is held against the
engine's first run of its kind, before the steps. Steps are watched: a sync ends the run, and waits
and allocations are counted (`bench.soak_watch`). Requests with a grammar are left out: their steps
wait for the host by design.

The record also has what each proposer needs: draft KV per token, state per request, and graphs.

    python -m bench.soak_proposers [--steps 10000] [--rows 8] [--seed 0] [--commit SHA] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from bench.soak import DRAWING, Trial, kinds_of, random_prompts, run, tell
from bench.soak_checks import (
    greedy_texts,
    judge_memory,
    judge_steps,
    judge_texts,
    memory,
    wanted,
)
from bench.soak_watch import Watch
from bench.suite import results
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.speculative.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specattn.engine.request import Request

    Pair = tuple[Any, Any]

OUT = Path(__file__).parent / "results" / "soak_proposers.json"
CONTEXT, WINDOWS, NEW = 384, 16, 200
# of the target's layers, those that the standalone draft has
LAYERS = 10
# the engines share shapes, so that they share compiled kernels
CHAIN = SpecConfig(5, 1, 6, draft_sampling=True)
BEAMS = SpecConfig(5, 4, 16)
BEST_FIRST = SpecConfig(5, 1, 16, tree="best_first", ranks=4)
MIXED = (
    *DRAWING,
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=3),
    SamplingParams(0.9, min_p=0.05, presence_penalty=0.6, seed=8, logprobs=0),
    SamplingParams(logprobs=2, logprobs_of="processed"),
)


@dataclass(frozen=True)
class Setting:
    """A proposer: a draft by its kind, perhaps lookup in front, and the tree it makes."""

    name: str
    kind: str
    config: SpecConfig
    lookup: bool = False

    def draft(self, drafts: Mapping[str, Pair]) -> Pair:
        """Return the target for its draft, and what proposes."""
        target, draft = drafts[self.kind]
        if not self.lookup:
            return target, draft
        found = LookupProposer()
        return target, found if draft is None else LookupFirst(found, draft)


SETTINGS = (
    Setting("EAGLE-3, chain of 5, drawn", "eagle3", CHAIN),
    Setting("EAGLE-3, topk 4, 16 nodes", "eagle3", BEAMS),
    Setting("EAGLE-3, best-first, 16 nodes", "eagle3", BEST_FIRST),
    Setting("DFlash, chain of 5, drawn", "dflash", CHAIN),
    Setting("DFlash, best-first, 16 nodes", "dflash", BEST_FIRST),
    Setting("lookup, 4 matches, 16 nodes", "none", BEAMS, lookup=True),
    Setting("lookup before EAGLE-3, topk 4, 16 nodes", "eagle3", BEAMS, lookup=True),
    Setting("lookup before DFlash, best-first, 16 nodes", "dflash", BEST_FIRST, lookup=True),
    Setting("a model, chain of 5, drawn", "lm", CHAIN),
    Setting("a model, topk 4, 16 nodes", "lm", BEAMS),
)


def soak(
    engines: Mapping[str, Engine],
    plain: Engine,
    kinds: Sequence[Request],
    steps: int,
    *,
    seed: int = 0,
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Run ``steps`` steps of engines at random and check them; returns what was seen.

    Parameters
    ----------
    engines : mapping of str to Engine
        What is soaked; each of one setting, none has requests.
    plain : Engine
        Decodes plainly; has no requests.
    kinds : sequence of Request
        What comes to each; the last sixteenth comes seldom.
    steps : int
        How many of all together.
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
    begin = time.perf_counter()

    def so_far(at: int, parts: dict[str, Any]) -> dict[str, Any]:
        times = {"seconds_to_get_ready": ready, "seconds": round(time.perf_counter() - begin, 1)}
        return {"passed": False, "steps": at, **times, "proposers": parts}

    def note(at: int) -> None:
        seen = {name: trial.seen() for name, trial in trials.items()}
        keep(so_far(at, seen) | {"memory": memory()})
        tell(at, begin, sum(trial.found.requests for trial in trials.values()))

    def measure() -> dict[str, Any]:
        found = {"memory": memory(), "watched": watch.counted()}
        watch.reset()
        return found

    with watch.over(*engines.values()):
        everyone = list(trials.values())
        for trial in everyone:
            trial.begin()
        warm, end = run(everyone, steps, seed=seed, check_every=250, measure=measure, keep=note)
    parts = {name: trial.result() | needs(trial.engine) for name, trial in trials.items()}
    report = so_far(steps, parts) | {
        "watched": end["watched"],
        "memory_warm": warm["memory"],
        "memory_end": end["memory"],
    }
    keep(report)
    judge_memory(report)
    judge_steps(report["watched"])
    for name, part in parts.items():
        judge_texts(part, fixed=True)
        assert not part["eager_steps"], f"{name}: {part['eager_steps']} steps ran eagerly"
    report["passed"] = True
    keep(report)
    return report


def needs(engine: Engine) -> dict[str, Any]:
    """Return which steps an engine has run, and what its proposer needs of memory, in bytes."""
    parts: dict[str, int] = {}
    for one in engine.decoder(engine.config).report():
        parts[one.part] = parts.get(one.part, 0) + one.nbytes
    stats = [decoder.runner.stats for decoder in engine.decoders]
    replays = sum((one.replays for one in stats), Counter[Any]())
    pool = engine.draft.pool if engine.draft is not None else None
    per_token = 0 if pool is None else sum(data[:1].nbytes for data in (*pool.k, *pool.v))
    return {
        "steps_by_part": {part.value: count for part, count in replays.items()},
        "eager_steps": sum(sum(one.eager.values()) for one in stats),
        "kv_bytes_per_token": per_token,
        "state_bytes_per_request": sum(one[:1].nbytes for one in engine.states.drafting.values()),
        "graph_bytes": parts,
        "buckets": engine.buckets,
    }


def load_drafts(device: str, dtype: torch.dtype) -> dict[str, Pair]:
    """Return the shipped drafts, and the first layers of the shipped target, by kind."""
    from bench.shipped import pair
    from specattn.models import HFTarget, fuse, load_lm_draft
    from specattn.models.hub import PAIR

    source = HFTarget.from_pretrained(str(PAIR / "target"), dtype=dtype, device=device)
    with TemporaryDirectory() as folder:
        save_first_layers(PAIR / "target", Path(folder), LAYERS)
        model = load_lm_draft(folder, source)
    return {
        "eagle3": pair(device, dtype),
        "dflash": pair(device, dtype, kind="dflash"),
        "lm": fuse(source, model),
        "none": pair(device, dtype, kind="none"),
    }


def save_first_layers(source: Path, folder: Path, count: int) -> None:
    """Write a causal LM of the first layers of another one, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source)
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    model.config.layer_types = model.config.layer_types[:count]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=8, help="requests at once, of each proposer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    from bench.suite.machine import machine

    drafts = load_drafts("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    target = drafts["none"][0]
    prompts = random_prompts(WINDOWS, target.tokenizer, args.seed)
    buckets = sorted({max(1, args.rows // 4), args.rows})

    def engine(models: Pair, config: SpecConfig) -> Engine:
        config = replace(config, max_context_len=CONTEXT, max_num_reqs=args.rows)
        return Engine(*models, config, buckets=buckets, sampled=True, processed=True)

    report: dict[str, Any] = {
        "machine": machine(args.commit),
        "dtype": "float32",
        "rows": args.rows,
        "context": CONTEXT,
        "seed": args.seed,
    }

    def keep(seen: dict[str, Any]) -> None:
        results.write(report | seen, args.out)

    found = soak(
        {one.name: engine(one.draft(drafts), one.config) for one in SETTINGS},
        engine(drafts["none"], BEAMS.plain()),
        kinds_of(prompts, NEW, CONTEXT, MIXED),
        args.steps,
        seed=args.seed,
        keep=keep,
    )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
