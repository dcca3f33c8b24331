"""Steps neither wait for the device nor allocate on it, whoever joins, grows and ends.

`tests.churn.Watch` says what is noticed. A step's tokens may be waited for once; a joining
request's prompt is excepted. Nor do texts, and what steps gain, depend on the company.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.proposers.standalone import LMDraft
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.churn import COUNTERS, Churn, Dice, Groups, Texts, Watch
from tests.processors import GREEDY, greedy_text
from tests.tiny import VOCAB, TinyBlockDraft, TinyDraft, TinyTarget, attentive

pytestmark = pytest.mark.gpu

DRAWN = SamplingParams(0.8, top_p=0.9, seed=7)
KINDS = [
    Request([3, 14, 15, 9, 26, 5], 150),
    Request([35], 150, DRAWN),
    Request([8, 9, 7], 60),
    Request([3, 14, 15, 2], 90, SamplingParams(1.2, 20, seed=3)),
    Request([6, 1], 150),
]
# beside them, each processor alone and with draws, and log-probabilities
PROCESSED = [
    *KINDS,
    *(Request([3, 14, 15, at], 150 - at, params) for at, params in enumerate(GREEDY.values())),
    Request([9, 26], 70, replace(GREEDY["three"], temperature=0.9, min_p=0.1, seed=4, logprobs=3)),
    Request([5, 35], 50, SamplingParams(logprobs=0)),
]
TREE = SpecConfig(3, 4, 9, max_context_len=192, max_num_reqs=6, page_size=2)
CHAIN = replace(TREE, num_steps=5, topk=1, num_draft_tokens=6)
BEST_FIRST = replace(CHAIN, num_draft_tokens=16, tree="best_first", ranks=4)
OTHERS = replace(TREE, num_steps=2, topk=1, num_draft_tokens=3), TREE.plain()
RUNS = {
    "full": (1000, {"cudagraph": "full"}, KINDS),
    "piecewise": (300, {"cudagraph": "piecewise"}, KINDS),
    "switching": (300, {"policy": Dice(2), "configs": OTHERS}, KINDS),
    "processed": (500, {"cudagraph": "full", "processed": True}, PROCESSED),
    "processed parts": (300, {"cudagraph": "piecewise", "processed": True}, PROCESSED),
    "halves": (300, {"tbo": True}, KINDS),
}
# a run of a minute
SOAK = (10_000, {"cudagraph": "full", "processed": True}, PROCESSED)
# they begin alike for more keys than sharing asks for
TEXT = random.Random(1).choices(range(VOCAB), k=490)
LONG = [*TEXT[:290], *reversed(TEXT[290:])]
OVER_PREFIXES = [
    Request([*TEXT[:300], 5], 90),
    Request([*TEXT[:300], 9, 3, 11], 60, GREEDY["three"]),
    Request([*TEXT[:280], 4, 1], 90, GREEDY["frequency"]),
    Request([*LONG, 2], 40, GREEDY["frequency"]),
    Request([*LONG, 7, 7], 80, DRAWN),
    Request([8, 9, 7], 60),
]
# several requests have room in a tile
SMALL = replace(TREE, topk=2, num_draft_tokens=4, max_context_len=640)
# a chance per step that everything is dropped after it
DROPS = 0.005
LOOKUP = LookupProposer(1, 4)
PROPOSERS = {
    "EAGLE, best first": (TinyDraft, BEST_FIRST),
    "lookup": (lambda device: LOOKUP, TREE),
    "lookup before EAGLE": (lambda device: LookupFirst(LOOKUP, TinyDraft(device=device)), TREE),
    "DFlash, chain": (TinyBlockDraft, CHAIN),
    "DFlash, chain, drawn": (TinyBlockDraft, replace(CHAIN, draft_sampling=True)),
    "DFlash, best first": (TinyBlockDraft, BEST_FIRST),
    "lookup before DFlash": (
        lambda device: LookupFirst(LOOKUP, TinyBlockDraft(device=device)),
        BEST_FIRST,
    ),
    "LM": (lambda device: LMDraft(TinyTarget(device=device, layers=1, seed=3), VOCAB), TREE),
}


def engine(options, draft=TinyDraft, config=TREE, device="cuda", backend="triton") -> Engine:
    models = TinyTarget(device=device), draft(device=device)
    return Engine(*models, config, backend=backend, buckets=[2, 6], **options)


@pytest.mark.parametrize(
    ("steps", "options", "kinds"),
    [*RUNS.values(), pytest.param(*SOAK, marks=pytest.mark.whole)],
    ids=[*RUNS, "soak"],
)
def test_steps_neither_wait_nor_allocate(steps, options, kinds):
    sizes = check(engine(options), steps, kinds)
    assert len(sizes) > 4, "of six"


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_steps_of_any_proposer_neither_wait_nor_allocate(proposer):
    check(engine({"processed": True}, *PROPOSERS[proposer]), 300, PROCESSED)


@pytest.mark.parametrize(
    "steps", [300, pytest.param(10_000, marks=pytest.mark.whole)], ids=["short", "soak"]
)
def test_groups_over_one_prefix_form_and_dissolve(steps, monkeypatch):
    groups = Groups(monkeypatch)
    models, options = (attentive("cuda"), TinyDraft(device="cuda")), {"processed": True}
    run = Engine(*models, SMALL, backend="triton_sharing", buckets=[2, 6], **options)
    check(run, steps, OVER_PREFIXES, groups.look)
    assert {0, 2, 3} <= groups.sizes


def check(
    run: Engine, steps: int, kinds: list[Request], look: Callable[[], None] = lambda: None
) -> set[int]:
    """Let requests come and go for so many steps; return how many ran at once."""
    watch, ended, dropped = Watch(), [], []
    texts, slots = Texts(run, kinds), run.table.num_free_slots
    churn = Churn(run, kinds, 5, watch.paused)
    with watch.over(run):
        for at in range(60 + steps):
            if at == 60:  # everything has been compiled, and both kinds of steps captured
                dropped += churn.drop()
                watch.reset()
                # prompts that no graph holds multiply on this stream, with a workspace of its own
                torch.ones(1, 1, device="cuda").mm(torch.ones(1, 1, device="cuda"))
                captured, held = run.graphs(), torch.cuda.memory_allocated()
            with watch.watching():
                ended += churn.step()
            if at % 8 == 0:
                look()
            if churn.rng.random() < DROPS:
                dropped += churn.drop()
                assert run.table.num_free_slots == slots
    assert watch.allocations == dict.fromkeys(COUNTERS, 0)
    assert not watch.launch_waits
    assert watch.waits <= steps
    assert run.graphs() == captured
    assert len(ended) > steps // 20, f"only {len(ended)} requests ended"
    for decoder in run.decoders:
        assert decoder.config in run.configs.all
        assert all(map(decoder.runner.recorded, decoder.modes))
        assert not decoder.runner.stats.eager
    assert {result.finish_reason for _, result in ended} == {"length"}
    greedy = {
        at: greedy_text(run.target.model, list(kind.prompt), kind.max_new_tokens, kind.sampling)
        for at, kind in enumerate(kinds)
        if not kind.sampling.temperature
    }
    texts.hold([*ended, *dropped])
    for kind, result in (*ended, *dropped):
        if kind in greedy:
            assert result.tokens == greedy[kind][: len(result.tokens)]
    churn.drop()
    check_books(run.table)
    assert torch.cuda.memory_allocated() - held <= 2**20
    return churn.sizes


def test_what_waits_or_allocates_is_noticed():
    """The control."""
    watch, number, done = Watch(), torch.zeros(1, device="cuda"), torch.cuda.Event()
    with watch.over():
        with watch.watching(), pytest.raises(RuntimeError, match="synchronizing"):
            number.item()
        with watch.watching(), pytest.raises(RuntimeError, match="synchronizing"):
            torch.tensor([1.0], device="cuda")
        with watch.watching():
            kept = number + 1
            torch.cuda._sleep(10_000_000)
            done.record()
            done.synchronize()
            with pytest.raises(AssertionError, match="waited for"):
                torch.cuda.current_stream().synchronize()
    assert kept.is_cuda
    assert watch.waits == 1
    # the tensor that was refused above was allocated first
    assert watch.allocations["allocation.all.allocated"] >= 1
