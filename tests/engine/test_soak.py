"""Chunks of prompts and steps, thousands of them: no allocation, no wait, the texts of each alone.

On a GPU `tests.churn.Watch` looks on: a sync on the way of prompts or steps is an error, and so is
anything that torch's allocator is asked for. On a CPU texts and slots are checked.
"""

from __future__ import annotations

import gc
import random
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.models import FusedTarget, HFTarget
from specattn.speculative.prompts.launch import TARGET
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.churn import COUNTERS, Churn, Texts, Watch
from tests.hybrids import VOCAB as HYBRID_VOCAB
from tests.hybrids import hybrid
from tests.tiny import VOCAB, TinyDraft, TinyTarget
from tests.worlds import DEVICE

if TYPE_CHECKING:
    from specattn.engine.request import RequestOutput

CUDA = DEVICE.type == "cuda"
CONTEXT, ROWS, CHUNK = 256, 6, 64
# chances per step that requests arrive, that one is dropped, and that everything is
ARRIVALS, DROPS, CLEARS = 0.4, 0.04, 0.002
# most requests that wait
WAITING = 4
# before anything is counted: all is compiled and captured by then
WARM = 60
# chunks and steps together
COUNT = 2000 if CUDA else 120
TREE = SpecConfig(3, 2, 7, CONTEXT, ROWS, 4)
CASES = ("plain", "head", "hybrid")


class Arrivals(Churn):
    """Requests that arrive, wait for rows, run, end and are dropped at random."""

    def join(self, count: int) -> None:
        """Let requests of any kinds wait."""
        picked = [self.rng.randrange(len(self.kinds)) for _ in range(count)]
        results = self.engine.scheduler.wait([self.kinds[at] for at in picked])
        self.running += zip(picked, results, strict=True)
        self.joins += count

    def step(self) -> list[tuple[int, RequestOutput]]:
        """Launch what waits, take a step, perhaps drop some; returns those that ended, by kind."""
        engine, rng = self.engine, self.rng
        waiting = len(engine.scheduler.waiting)
        if not self.running or (waiting < WAITING and rng.random() < ARRIVALS):
            self.join(rng.randint(1, 3))
        engine._admission.admit_waiting()
        self.sizes.add(engine.num_running)
        engine.step(ahead=rng.random() < 0.9)
        if self.running and rng.random() < DROPS:
            (_, result) = rng.choice(self.running)
            if not result.finish_reason:
                engine.drop(result)
        ended = [item for item in self.running if item[1].finish_reason]
        self.running = [item for item in self.running if not item[1].finish_reason]
        return ended


def kinds_of(vocab: int) -> list[Request]:
    """Return requests of random lengths, drawn ones among them; the longest need four chunks."""
    rng, found = random.Random(3), []
    for at, most in enumerate([8, 8, 30, 30, 60, 60, 90, 150, 220]):
        prompt = rng.choices(range(vocab), k=rng.randint(max(most // 2, 1), most))
        sampling = SamplingParams(0.9, 20, seed=at) if at % 3 == 1 else SamplingParams()
        found.append(Request(prompt, rng.randint(1, 14), sampling, ignore_eos=True))
    # these begin alike
    return [*found, Request([*found[5].prompt[:40], 5, 7], 9)]


def engine(case: str) -> tuple[Engine, list[Request]]:
    """Make an engine, and what is asked of it."""
    config, vocab = TREE if case != "plain" else TREE.plain(), VOCAB
    target, draft = TinyTarget(device=DEVICE), None
    if case == "head":
        draft = TinyDraft(device=DEVICE)
    if case == "hybrid":
        model = hybrid().to(DEVICE)
        target, vocab = FusedTarget.from_target(HFTarget.from_model(model)), HYBRID_VOCAB
        draft = LookupProposer(1, 3)
    options = {"prompt_buckets": (16, CHUNK)} if CUDA else {"graphs": False}
    backend = "triton" if CUDA else "torch_native"
    options |= {"buckets": [2, ROWS], "sampled": True, "prompt_chunk": CHUNK, "backend": backend}
    return Engine(target, draft, config, **options), kinds_of(vocab)


def held() -> dict[str, int]:
    """Return the bytes that torch's allocator holds and has given."""
    stats = torch.cuda.memory_stats() if CUDA else {}
    return {name: stats.get(f"{name}_bytes.all.current", 0) for name in ("reserved", "allocated")}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "count", [COUNT, pytest.param(10_000, marks=pytest.mark.whole)], ids=["short", "soak"]
)
def test_chunks_and_steps_neither_wait_nor_allocate(case, count):
    run, kinds = engine(case)
    slots, watch, ended = run.table.num_free_slots, Watch(), []
    texts, churn = Texts(run, kinds), Arrivals(run, kinds, 7)
    chunks = run._admission.prompts.targets.stats
    begun = steps = 0

    def launched() -> int:
        return chunks.replays[TARGET] + chunks.eager[TARGET] - begun

    with watch.over(run):
        for _ in range(WARM):
            ended += churn.step()
        ended += churn.drop()
        watch.reset()
        begun = launched()
        # what was left before may go at any time
        gc.collect()
        captured, before = run.graphs(), held()
        while launched() + steps < count:
            with watch.watching():
                ended += churn.step()
            steps += 1
            if churn.rng.random() < CLEARS:
                ended += churn.drop()
                assert run.table.num_free_slots == slots
                check_books(run.table)
    assert watch.allocations == dict.fromkeys(COUNTERS, 0)
    assert not watch.launch_waits
    assert run.graphs() == captured
    ended += churn.drop()
    assert held() == before
    assert run.table.num_free_slots == slots
    check_books(run.table)
    if CUDA:
        assert not chunks.eager
    assert launched() > count // 5, "most are steps"
    assert len(churn.sizes) > 4, "of six"
    reasons = {result.finish_reason for _, result in ended}
    assert reasons == {"length", "dropped"}
    assert len(ended) > count // 20
    texts.hold(ended)
