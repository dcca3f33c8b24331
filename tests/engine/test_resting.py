"""Drafts that rest: prompts and plain steps leave them out, whatever comes later."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.policy import GoodputPolicy, Observed
from specattn.engine.prompts import WaitedPrompts
from specattn.speculative.prompts.launch import ADMIT, BARE
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.proposers.standalone import LMDraft
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.samples import half, on_cpu
from tests.tiny import VOCAB, TinyBlockDraft, TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

TREE, PLAIN = SpecConfig(3, 2, 6, 96, 4), SpecConfig(0, 1, 1, 96, 4)
CHAIN = replace(TREE, num_steps=2, topk=1, num_draft_tokens=3)
LONG = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 4, 6, 2]
PROMPTS = [LONG, [35, 2], [*LONG[:10], 7], [6], [8, 9, 7, 9], LONG[:12]]
DRAFTS = {
    "EAGLE": (lambda: TinyDraft(device=DEVICE), TREE),
    "a model": (lambda: LMDraft(TinyTarget(device=DEVICE, layers=1, seed=3), VOCAB), CHAIN),
    "DFlash": (lambda: TinyBlockDraft(device=DEVICE), CHAIN),
    "lookup, else EAGLE": (
        lambda: LookupFirst(LookupProposer(1, 4), TinyDraft(device=DEVICE)),
        CHAIN,
    ),
}


class Dice:
    """A policy that is any config at random, and lets the draft rest at random for a while."""

    def __init__(self, seed: int) -> None:
        self.rng, self.rests, self.seen = random.Random(seed), False, []

    def __call__(self, observed: Observed) -> SpecConfig:
        self.seen.append(observed)
        if self.rng.random() < 0.2:
            self.rests = not self.rests
        return self.rng.choice(observed.configs)

    def drafts(self, observed: Observed) -> bool:
        return not self.rests


class Set:
    """A policy that is told."""

    def __init__(self, config: SpecConfig, *, drafts: bool) -> None:
        self.config, self.keeps, self.seen = config, drafts, []

    def __call__(self, observed: Observed) -> SpecConfig:
        self.seen.append(observed)
        return self.config

    def drafts(self, observed: Observed) -> bool:
        return self.keeps


def make(policy, draft="EAGLE", target=None, **options) -> Engine:
    made, config = DRAFTS[draft]
    others = [] if config is CHAIN else [CHAIN]
    options = {"backend": "torch_native", "buckets": (2, 4), "prompt_buckets": (8, 20)} | options
    target = target or TinyTarget(device=DEVICE)
    return Engine(target, made(), config, configs=[*others, PLAIN], policy=policy, **options)


@on_cpu(half, "draft", "seed")
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("seed", "cudagraph"), [(1, "full"), (2, "piecewise")])
def test_texts_are_those_of_plain_decoding_whenever_a_draft_rests(draft, seed, cudagraph):
    policy = Dice(seed)
    run = make(policy, draft, cudagraph=cudagraph)
    requests = [Request(prompt, 30 + 4 * at) for at, prompt in enumerate([*PROMPTS, *PROMPTS])]
    for request, result in zip(requests, run.generate(requests), strict=True):
        want = dense_greedy(run.target.model, list(request.prompt), request.max_new_tokens)
        assert result.tokens == want
    assert {True, False} == {0 < one.ready < one.batch for one in policy.seen}
    check_books(run.table)
    replays = run._admission.prompts.targets.stats.replays
    assert replays[ADMIT]
    assert replays[BARE]
    assert sum(run._decoders.bare.runner.stats.replays.values())


def test_drawn_requests_rest_too():
    run = make(Dice(3), sampled=True)
    drawn = [Request(one, 30, SamplingParams(0.9, seed=at)) for at, one in enumerate(PROMPTS)]
    likely = [Request(one, 20, SamplingParams(0.7, top_k=1, seed=1)) for one in PROMPTS]
    results = run.generate([*drawn, *likely])
    assert all(len(one.tokens) == 30 for one in results[: len(drawn)])
    for prompt, result in zip(PROMPTS, results[len(drawn) :], strict=True):
        assert result.tokens == dense_greedy(run.target.model, prompt, 20)


def test_a_draft_that_rests_runs_neither_in_prompts_nor_in_steps(monkeypatch):
    run = make(Set(PLAIN, drafts=False), prompt_buckets=(), graphs=False)
    run.configs.drafting = False
    monkeypatch.setattr(run.draft.model, "forward", None)
    (result,) = run.generate([Request(LONG, 12)])
    assert result.tokens == dense_greedy(run.target.model, LONG, 12)
    assert not run.configs.acceptance[run.configs.resting].steps
    assert run.configs.bare.steps == run.configs.used[run.configs.resting] == 11


def test_a_draft_that_does_not_rest_keeps_up_in_plain_steps():
    """What a step gains then is what it would have gained had the text been a prompt."""
    policy = Set(PLAIN, drafts=True)
    run = make(policy)
    (result,) = run.add([Request(LONG, 40)])
    for _ in range(10):
        run.step()
    text = [*LONG, *result.tokens]
    policy.config = TREE
    while run.num_running:
        run.step()
    run.clear()
    (other,) = run.add([Request(text[:-1], 30)])
    while run.num_running:
        run.step()
    assert result.accept_lens[10:-1] == other.accept_lens[: len(result.accept_lens) - 11]
    assert {(one.ready, one.batch) for one in policy.seen} == {(1, 1)}


def test_requests_whose_text_the_draft_has_not_read_tell_nothing():
    """Nor do those that share a prefix with such a one."""
    policy = Set(PLAIN, drafts=False)
    run = make(policy)
    run.configs.drafting = False
    run.add([Request(LONG, 40)])
    policy.config, policy.keeps = CHAIN, True
    run.step()
    run.add([Request([*LONG, 5], 40), Request([1, 2], 40)])
    assert [one.ready for one in run.running] == [False, False, True]
    steps = run.configs.acceptance[CHAIN].reached[0]
    run.step()
    run.step()
    assert policy.seen[-1].ready == 1
    assert run.configs.acceptance[CHAIN].reached[0] - steps == 2
    policy.keeps, policy.config = False, PLAIN
    run.step()
    assert not any(one.ready for one in run.running)


@pytest.mark.parametrize(
    ("policy", "options", "rests"),
    [
        (None, {}, True),
        (GoodputPolicy(), {}, True),
        (lambda observed: observed.configs[0], {}, False),
    ],
)
def test_who_lets_a_draft_rest(policy, options, rests):
    run = make(policy, **options)
    assert (run.configs.resting is not None) == rests == (run._decoders.bare is not None)


def test_plain_decoding_is_always_a_choice():
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    options = {"backend": "torch_native", "buckets": (2, 4)}
    run = Engine(target, draft, TREE, configs=[CHAIN], **options)
    assert [one.num_steps for one in run.configs.all] == [3, 2, 0]
    assert run.configs.resting == run.configs.all[-1]
    run = Engine(target, draft, TREE, configs=[CHAIN], policy=lambda seen: seen.current, **options)
    assert run.configs.all == (TREE, CHAIN)
    drawn = [replace(one, draft_sampling=True, topk=1) for one in (CHAIN, PLAIN)]
    run = Engine(target, draft, drawn[0], configs=drawn[1:], **options)
    assert run.configs.resting is None
    run = Engine(target, LookupProposer(1, 4), CHAIN, configs=[PLAIN], **options)
    assert run.configs.resting is None, "it has no model"


def test_prompts_that_are_waited_for_are_read_by_both():
    run = make(Dice(4))
    setup = run._decoders.setup
    run._admission.prompts = WaitedPrompts(Prefill.of(setup), setup.states)
    run.configs.drafting = False
    run.add([Request(LONG, 20)])
    assert run.running[0].ready
