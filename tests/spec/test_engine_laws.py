"""Whole steps emit exactly the target's law: the joint law of three tokens, against a product.

The target keeps its three most probable tokens, so that three tokens have 27 outcomes.
"""

from __future__ import annotations

import random

import pytest
import torch
from scipy.stats import chi2

from specattn.config import SpecConfig
from specattn.kernels import ops
from specattn.kernels.reference.sampling import DRAFT, target_probs
from specattn.spec import verify
from specattn.spec.generate import Engine, Request
from specattn.spec.sampling import SamplingParams
from tests.tiny import DenseAttend, TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [3, 14, 15, 9]
# the samplers that must fail do so at 1e-60
DRAWS = 1500
TOP_K, TEMPERATURE = 3, 1.5
SETTINGS = {
    "plain": SpecConfig(0, 1, 1, 32, 250),
    "chain": SpecConfig(2, 1, 3, 32, 250),
    "tree": SpecConfig(2, 3, 7, 32, 250),
    "rejection": SpecConfig(2, 1, 3, 32, 250, draft_sampling=True),
}


@pytest.fixture(scope="module")
def models():
    return TinyTarget(device=DEVICE, sharp=1.0), TinyDraft(device=DEVICE, sharp=6.0)


@pytest.fixture(scope="module")
def law(models) -> dict[tuple[int, ...], float]:
    """The exact joint law, from the dense model alone."""
    paths = {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, mass in paths.items():
            probs = dense_probs(models[0], [*PROMPT, *path])
            longer |= {(*path, t): mass * p for t, p in enumerate(probs) if p > 0}
        paths = longer
    assert len(paths) == 27
    return paths


def dense_probs(target: TinyTarget, tokens: list[int]) -> list[float]:
    ids = torch.tensor(tokens, device=target.device)
    positions = torch.arange(len(tokens), device=target.device)
    logits = target(ids, positions, DenseAttend(target.layers)).logits[-1:].double()
    kept = logits.topk(TOP_K)
    weights = torch.softmax(kept.values / TEMPERATURE, -1)
    return torch.zeros_like(logits).scatter(1, kept.indices, weights)[0].tolist()


def p_value(models, config: SpecConfig, law, **options) -> float:
    run = Engine(*models, config, buckets=[250], **options)
    requests = [
        Request(PROMPT, 3, SamplingParams(TEMPERATURE, TOP_K, seed=1000 + i)) for i in range(DRAWS)
    ]
    counts = dict.fromkeys(law, 0)
    for result in run.generate(requests):
        assert tuple(result.tokens) in counts, "a token of probability 0 was emitted"
        counts[tuple(result.tokens)] += 1
    statistic = sum((counts[path] - DRAWS * p) ** 2 / (DRAWS * p) for path, p in law.items())
    return float(chi2.sf(statistic, len(law) - 1))


@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_have_the_targets_joint_law(models, law, name):
    assert p_value(models, SETTINGS[name], law) > 1e-3


def test_settings_that_change_every_step_keep_the_law(models, law):
    rng, others = random.Random(3), [SETTINGS["chain"], SETTINGS["plain"]]
    options = {"configs": others, "policy": lambda observed: rng.choice(observed.settings)}
    assert p_value(models, SETTINGS["tree"], law, **options) > 1e-3


def test_a_biased_sampler_fails_the_same_test(models, law, monkeypatch):
    """R19: one coin for both decisions is not the target's law, and the test sees it."""
    monkeypatch.setattr(verify, "FINAL", verify.ACCEPT)
    assert p_value(models, SETTINGS["tree"], law) < 1e-30


def test_a_lenient_rejection_fails_the_same_test(models, law, monkeypatch):
    """Accepting every draft the target could have drawn is not the target's law."""
    sampling = ops("sampling", torch.device(DEVICE))
    honest = sampling.path_coins

    def lenient(*args):
        coins = honest(*args)
        coins[verify.ACCEPT] = 0
        return coins

    monkeypatch.setattr(sampling, "path_coins", lenient)
    assert p_value(models, SETTINGS["rejection"], law) < 1e-30


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


def test_the_law_is_that_of_target_probs():
    """The dense law above and the library's distribution agree on truncation and temperature."""
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
    sampling, used = ops("sampling", torch.device(DEVICE)), []
    honest = sampling.uniform

    def noted(seeds, positions, draw):
        if draw == DRAFT:
            used.append(positions.flatten().tolist())
        return honest(seeds, positions, draw)

    monkeypatch.setattr(sampling, "uniform", noted)
    config = SpecConfig(3, 1, 4, 64, 1, draft_sampling=True)
    run = Engine(*models, config, buckets=[1], graphs=False)
    run.decoder(config).capture(sampled=True)
    used.clear()
    run.add([Request(PROMPT, 30, SamplingParams(TEMPERATURE, seed=2))])
    (live,) = run._live
    assert used == [[len(PROMPT)]]
    while run.num_live:
        before = live.length
        used.clear()
        run.step()
        assert used == [[before + 1], [before + 2], [live.length]]
    assert len(set(live.result.accept_lens)) > 1
