"""Distributions, coins and draws against plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specattn.kernels.reference.sampling import (
    ACCEPT,
    DRAFT,
    FINAL,
    draw_tokens,
    target_probs,
    uniform,
)
from tests.kernels.tree_oracle import DEVICE

LAST_COIN = 1 - 2.0**-24


def law(logits, temperature, top_k, top_p):
    """Temperature, then top-k, then top-p, in float64."""
    vocab = len(logits)
    ranked = sorted(range(vocab), key=lambda t: (-logits[t], t))
    if temperature == 0:
        return [float(t == ranked[0]) for t in range(vocab)]
    kept = ranked[:top_k] if 0 < top_k < vocab else ranked
    weight = {t: math.exp((logits[t] - logits[ranked[0]]) / temperature) for t in kept}
    total = sum(weight.values())
    if top_p < 1:
        mass, prefix = 0.0, []
        for token in kept:
            if prefix and mass >= top_p:
                break
            prefix.append(token)
            mass += weight[token] / total
        kept, total = prefix, sum(weight[t] for t in prefix)
    return [weight[t] / total if t in kept else 0.0 for t in range(vocab)]


def probs_of(logits, temperature, top_k, top_p, rows_per_req):
    return target_probs(
        torch.tensor(logits, device=DEVICE),
        torch.tensor(temperature, dtype=torch.float32, device=DEVICE),
        None if top_k is None else torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        None if top_p is None else torch.tensor(top_p, dtype=torch.float32, device=DEVICE),
        rows_per_req,
    )


@pytest.mark.parametrize("vocab", [1, 7, 33, 301])
def test_target_probs(vocab):
    rng = random.Random(vocab)
    settings = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (2.0, 9, 0.3),
                (0.01, vocab + 4, 0.999), (1.0, 1, 0.01)]
    # quarters: ties are frequent
    logits = [[rng.randrange(-12, 13) / 4 for _ in range(vocab)] for _ in range(3 * len(settings))]
    got = probs_of(logits, *zip(*settings, strict=True), rows_per_req=3)
    expect = [law(row, *settings[i // 3]) for i, row in enumerate(logits)]
    torch.testing.assert_close(got.cpu(), torch.tensor(expect), atol=1e-6, rtol=1e-5)
    assert ((got == 0).cpu() == (torch.tensor(expect) == 0)).all()


def test_ties_keep_the_lower_token():
    row = [1.0, 3.0, 3.0, 3.0, 0.0]
    got = probs_of([row] * 3, [0.0, 1.0, 1.0], [0, 2, 0], [1.0, 1.0, 0.5], 1)
    assert got.tolist() == [[0, 1, 0, 0, 0], [0, 0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0, 0]]


def test_settings_that_are_off_change_nothing():
    logits = torch.randn(4, 50).tolist()
    plain = probs_of(logits, [0.8, 0.0], None, None, 2)
    assert torch.equal(probs_of(logits, [0.8, 0.0], [0, 50], [1.0, 1.0], 2), plain)


def test_extreme_logits_stay_finite():
    logits = [[-math.inf, 1e30, 0.0], [3e38, -3e38, 3e38]]
    got = probs_of(logits, [1e-30, 1.0], [2, 0], [0.9, 1.0], 1)
    assert got.tolist() == [[0, 1, 0], [0.5, 0, 0.5]]


def coin(seed, position, draw):
    """SplitMix64 chained over the three, in unbounded integers."""
    state = seed
    for step in (0, position, draw):
        state = state + step + 0x9E3779B97F4A7C15 & 2**64 - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 2**64 - 1
        state ^= state >> 31
    return (state >> 40) / 2**24


def test_coins_are_the_published_hash():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 12345]
    positions = [[0, 1, 2**31], [7, 7, 8]] * 3
    tensors = [torch.tensor(x, device=DEVICE) for x in (seeds, positions)]
    for draw in (ACCEPT, FINAL, DRAFT, 9):
        got = uniform(*tensors, draw)
        assert got.dtype == torch.float32
        assert got.tolist() == [
            [coin(s, p, draw) for p in row] for s, row in zip(seeds, positions, strict=True)
        ]


def test_coins_do_not_depend_on_the_batch():
    seeds, positions = torch.arange(9), torch.arange(9)[:, None] * 3 + torch.arange(4)
    whole = uniform(seeds, positions, ACCEPT)
    assert torch.equal(uniform(seeds[4:6], positions[4:6], ACCEPT), whole[4:6])
    assert torch.equal(uniform(seeds, positions[:, 2], ACCEPT), whole[:, 2])


def test_coins_are_uniform_and_uncorrelated():
    seeds, positions = torch.arange(300), torch.arange(300).expand(300, 300)
    draws = [uniform(seeds, positions, d).double() for d in (ACCEPT, FINAL, DRAFT)]
    for coins in draws:
        assert 0 <= coins.min() <= coins.max() < 1
        counts = torch.histc(coins, 100, 0, 1)
        assert ((counts - 900) ** 2 / 900).sum() < 170  # chi-square, 99 degrees: p > 1e-5
    pairs = [(draws[0], draws[1]), (draws[1], draws[2]), (draws[0][1:], draws[0][:-1]),
             (draws[0][:, 1:], draws[0][:, :-1]), (draws[0][1:, :-1], draws[0][:-1, 1:])]
    for left, right in pairs:
        assert torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1].abs() < 0.015


def test_r18_draws_are_half_open():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], device=DEVICE)
    coins = torch.tensor([0.0, 0.25 - 2.0**-24, 0.25, 0.5, LAST_COIN], device=DEVICE)
    assert draw_tokens(weights.expand(5, 5), coins).tolist() == [1, 1, 3, 3, 3]
    # scale does not matter, nor do what cannot be weights
    odd = torch.tensor([-1.0, 1.0, math.nan, 3.0, 0.0], device=DEVICE)
    assert draw_tokens(odd.expand(5, 5), coins).tolist() == [1, 1, 3, 3, 3]


def test_draws_without_weight_fall_back():
    empty = torch.zeros(1, 3, device=DEVICE)
    fallback = torch.tensor([[0.0, 0.0, 1.0]], device=DEVICE)
    half = torch.tensor([0.5], device=DEVICE)
    assert draw_tokens(empty, half).tolist() == [0]
    assert draw_tokens(empty, half, fallback=fallback).tolist() == [2]
