"""Whole steps draw from exactly the target's distribution: three tokens, against a product."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.kernels.sampling import DRAFT, target_probs
from specattn.speculative.proposers import draft
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step import verify
from tests.speculative import three_tokens
from tests.speculative.three_tokens import PROMPT, SETTINGS, TEMPERATURE, TOP_K

if TYPE_CHECKING:
    from tests.distributions import Distribution


@pytest.fixture(scope="module")
def models():
    return three_tokens.make_models()


@pytest.fixture(scope="module")
def wanted(models) -> Distribution:
    return three_tokens.distribution(models[0], PROMPT)


def p_value(models, config: SpecConfig, wanted: Distribution, **options) -> float:
    run = Engine(*models, config, buckets=[250], **options)
    return three_tokens.drawn_p_value(run, wanted)


@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_have_the_targets_joint_distribution(models, wanted, name):
    assert p_value(models, SETTINGS[name], wanted) > 1e-3


def test_settings_that_change_every_step_keep_the_distribution(models, wanted):
    rng, others = random.Random(3), [SETTINGS["chain"], SETTINGS["plain"]]
    options = {"configs": others, "policy": lambda observed: rng.choice(observed.configs)}
    assert p_value(models, SETTINGS["tree"], wanted, **options) > 1e-3


def test_a_biased_sampler_fails_the_same_test(models, wanted, monkeypatch):
    """R19: one coin for both decisions is not the target's distribution, and the test sees it."""
    monkeypatch.setattr(verify, "FINAL", verify.ACCEPT)
    assert p_value(models, SETTINGS["tree"], wanted) < 1e-10


def test_a_lenient_rejection_fails_the_same_test(models, wanted, monkeypatch):
    """Accepting every draft the target could have drawn is not the target's distribution."""
    three_tokens.accept_every_draft(monkeypatch)
    assert p_value(models, SETTINGS["rejection"], wanted) < 1e-10


def test_greedy_requests_stay_greedy_under_rejection(models):
    plain, sampled = (
        Engine(*models, SETTINGS[name], buckets=[3]).generate(
            [Request(PROMPT, 25), Request([5], 25), Request([1, 2], 25, SamplingParams(1.0))]
        )
        for name in ("plain", "rejection")
    )
    for a, b in zip(plain[:2], sampled[:2], strict=True):
        assert a.tokens == b.tokens
    assert max(n for r in sampled for n in r.accept_lens) > 1


def test_the_distribution_is_that_of_target_probs():
    """The dense distribution above and the library's agree on truncation and temperature."""
    logits = torch.randn(5, 61)
    probs = target_probs(
        logits, torch.tensor([TEMPERATURE]), torch.tensor([TOP_K], dtype=torch.int32), None, 5
    )
    for row, got in zip(logits, probs, strict=True):
        kept = row.topk(TOP_K)
        want = torch.zeros(61).scatter(0, kept.indices, torch.softmax(kept.values / TEMPERATURE, 0))
        torch.testing.assert_close(got, want)


def test_every_draft_token_of_a_step_is_drawn_with_a_coin_of_its_own(models, monkeypatch):
    """By the position of the token before it: the last step's accepted ones are behind."""
    used, honest = [], draft.uniform

    def noted(seeds, positions, draw):
        if draw == DRAFT:
            used.append(positions.flatten().tolist())
        return honest(seeds, positions, draw)

    monkeypatch.setattr(draft, "uniform", noted)
    config = SpecConfig(3, 1, 4, 64, 1, draft_sampling=True)
    run = Engine(*models, config, buckets=[1], graphs=False)
    run.decoder(config).capture(sampled=True)
    used.clear()
    run.add([Request(PROMPT, 30, SamplingParams(TEMPERATURE, seed=2))])
    (live,) = run.running
    assert used == [[len(PROMPT)]]
    while run.num_running:
        before = live.length
        used.clear()
        run.step()
        assert used == [[before + 1], [before + 2], [live.length]]
    assert len(set(live.result.accept_lens)) > 1
