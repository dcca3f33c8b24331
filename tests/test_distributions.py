"""The statistics of tests: what is right passes, what is wrong does not, and scipy agrees."""

from __future__ import annotations

import random

import pytest

from tests.distributions import joint, p_value, pearson

# of two tokens, of which the second depends on the first; the last is rare
PAIRS = joint(lambda text: {0: 0.5, 1: 0.3, 2: 0.2} if text != [2] else {0: 0.999, 3: 0.001}, 2)


def draw(pairs: dict[tuple[int, ...], float], seed: int, count: int = 2000):
    return random.Random(seed).choices([*pairs], [*pairs.values()], k=count)


def test_joint_probabilities_are_products():
    assert sum(PAIRS.values()) == pytest.approx(1)
    assert PAIRS[1, 2] == pytest.approx(0.3 * 0.2)
    assert (2, 1) not in PAIRS


def test_p_values_of_what_is_right_are_uniform():
    # every process collects this module, and scipy.stats takes a second to import
    from scipy.stats import kstest

    assert (
        kstest([p_value(draw(PAIRS, seed), PAIRS) for seed in range(200)], "uniform").pvalue > 0.01
    )


@pytest.mark.parametrize(
    "other",
    [
        PAIRS | {(0, 0): 0.2, (0, 1): 0.2},
        # each token alone comes as often as it should
        PAIRS | {(0, 0): 0.28, (0, 1): 0.12, (1, 0): 0.12, (1, 1): 0.12},
        # a rare outcome is seen, and so is one that never comes
        PAIRS | {(2, 3): 0.02},
        {pair: p for pair, p in PAIRS.items() if pair != (1, 2)},
    ],
)
def test_what_is_wrong_has_a_small_one(other):
    assert p_value(draw(other, 0, 5000), PAIRS) < 1e-6


def test_what_cannot_come_has_none():
    assert p_value([*draw(PAIRS, 0), (2, 1)], PAIRS) == 0
    assert pearson([50, 50, 50, 1], [0.4, 0.3, 0.3, 0]) == 0
    with pytest.raises(AssertionError, match="too few draws"):
        pearson([2, 2], [0.5, 0.5])


def test_rare_outcomes_are_one():
    from scipy.stats import chisquare

    probabilities = [0.25, 0.25, 0.25, 0.245, 0.003, 0.002]
    want = chisquare([260, 240, 250, 243, 7], [250, 250, 250, 245, 5]).pvalue
    assert pearson([260, 240, 250, 243, 3, 4], probabilities) == pytest.approx(want)
