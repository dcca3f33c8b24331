"""When a policy lets a draft rest, and for how long: by hand."""

from __future__ import annotations

from itertools import groupby

import pytest

from specattn.config import SpecConfig
from specattn.engine.policy import Acceptance, GoodputPolicy, Observed, expected_tokens

DEEP, PLAIN = SpecConfig(3, 1, 4), SpecConfig(0, 1, 1)


def observed(gains: list[int], batch: int = 1, **seen) -> Observed:
    """Of so many steps of one request that drafted, in an engine whose draft may rest."""
    acceptance = {config: Acceptance(config) for config in (DEEP, PLAIN)}
    for tokens in gains:
        acceptance[DEEP].add([tokens])
    seen = {"bare": Acceptance(PLAIN), "ready": batch} | seen
    return Observed(batch, batch, DEEP, (DEEP, PLAIN), acceptance, **seen)


def policy(deep: float, **options) -> GoodputPolicy:
    """One to which a plain step costs 1, with or without the draft."""
    told = {"hold": 1, "trials": 0} | options
    return GoodputPolicy(lambda config, _: deep if config.num_steps else 1.0, **told)


def test_judging_a_draft_at_rest_takes_its_share():
    """Eight steps that take twice as long, in 800."""
    decide, seen = policy(2.0), observed([1] * 400)
    chosen = [decide(seen) for _ in range(3000)]
    runs = [(config, len(list(run))) for config, run in groupby(chosen)]
    plain = [count for config, count in runs[:-1] if config == PLAIN]
    assert plain == [800, 800, 800]
    assert {count for config, count in runs if config == DEEP} == {8}
    decide = policy(2.0, judging=0.1)
    assert next(step for step in range(99) if decide(seen) == DEEP) == 80


def test_each_batch_size_is_judged_by_itself():
    decide, one, many = policy(2.0), observed([1] * 400), observed([1] * 400, batch=8)
    many = Observed(8, 8, DEEP, many.configs, one.acceptance, one.bare, 8)
    assert decide(one) == PLAIN
    assert not decide.drafts(one)
    assert decide.drafts(many), "it was not judged there yet"
    assert decide(many) == DEEP
    assert decide(one) == PLAIN


@pytest.mark.parametrize(("ready", "chosen"), [(0, PLAIN), (1, DEEP), (8, DEEP), (None, DEEP)])
def test_a_judgement_waits_for_a_request_that_the_draft_has_read(ready, chosen):
    """``None`` is all."""
    decide, one = policy(2.0), observed([1] * 400)
    assert decide(one) == PLAIN
    assert decide(Observed(8, 8, DEEP, one.configs, one.acceptance, one.bare, ready)) == chosen


def test_what_ends_a_rest_is_held():
    decide, seen = policy(2.0, hold=5), observed([1] * 400)
    assert PLAIN in [decide(seen) for _ in range(5)]
    seen.acceptance[DEEP].reached = [400] * 4
    while not decide.drafts(seen):
        decide(seen)
    # eight steps that judge, and the one that is held first
    assert [decide(seen) for _ in range(8)] == [DEEP] * 8
    seen.acceptance[DEEP].reached = [400, 0, 0, 0]
    assert [decide(seen) for _ in range(5)] == [*[DEEP] * 4, PLAIN]


@pytest.mark.parametrize(("requests", "rests"), [(4, False), (16, False), (100, True), (900, True)])
def test_a_draft_of_which_little_is_known_does_not_rest(requests, rests):
    """Plain decoding gains a tenth more; four requests leave a doubt of a quarter."""
    seen = observed([1] * requests)
    tokens = expected_tokens(seen.acceptance, DEEP)
    decide = policy(1.1 * tokens)
    decide(seen)
    assert decide.drafts(seen) != rests


@pytest.mark.parametrize(("ready", "chosen"), [(8, DEEP), (None, DEEP), (4, DEEP), (1, PLAIN)])
def test_requests_that_are_not_ready_gain_a_token_each(ready, chosen):
    """Of eight requests at a price of 1.5: with four ready 20 tokens in place of 8, with one 11."""
    seen = observed([4] * 400, batch=8, ready=ready, bare=None)
    assert policy(1.5, margin=0.0)(seen) == chosen


def test_what_drafts_pays_for_its_part_of_prompts():
    """A plain step takes 1.2 with the draft and 1 without, prompts 0.06 for a token of a text."""
    seen = observed([1] * 400, batch=2, prompt_seconds=0.06)
    for config, seconds in ((DEEP, 2.0), (PLAIN, 1.2)):
        seen.acceptance[config].timed(2, seconds)
    seen.bare.timed(2, 1.0)
    decide = GoodputPolicy(hold=1, trials=0)
    tokens = expected_tokens(seen.acceptance, DEEP)
    # of 1.1 the draft has 0.1, for two requests
    drafting = {DEEP: 1 / (2 / tokens + 2 * 0.06 / 11), PLAIN: 1.0}
    assert decide.goodput(seen) == pytest.approx(drafting)
    assert decide(seen) == PLAIN
    # while it rests, prompts take 0.06 without it
    resting = drafting | {DEEP: 1 / (2 / tokens + 2 * 0.06 * 0.1)}
    assert decide.goodput(seen) == pytest.approx(resting)


@pytest.mark.parametrize(("bare", "rests"), [(1.0, False), (0.9, True)])
def test_a_rest_that_began_by_a_guess_lasts_until_such_steps_are_timed(bare, rests):
    """A step without the draft is thought to take 0.87; drafts gain a token per 1.0."""
    seen = observed([3] * 400)
    for _ in range(3):
        seen.acceptance[DEEP].timed(1, 3.0)
        seen.acceptance[PLAIN].timed(1, 1.4)
    decide = GoodputPolicy(hold=1)
    assert decide(seen) == PLAIN
    for _ in range(3):
        assert not decide.drafts(seen), "the draft would take part in such steps"
        assert decide(seen) == PLAIN
        seen.bare.timed(1, bare)
    assert decide.drafts(seen)
    assert [decide(seen) for _ in range(8)] == [DEEP] * 8
    assert decide(seen) == (PLAIN if rests else DEEP)
    assert decide.drafts(seen) != rests
