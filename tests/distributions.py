"""Distributions of tokens, and how probable what was drawn is by them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from scipy.special import chdtrc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

#: The probability of every text.
Distribution = dict[tuple[int, ...], float]
# Pearson's statistic wants several of every outcome
LEAST = 5


def joint(after: Callable[[list[int]], Mapping[int, float]], length: int = 3) -> Distribution:
    """The probability of every text of so many tokens; ``after`` gives those of the next one."""
    found: Distribution = {(): 1.0}
    for _ in range(length):
        found = {
            (*text, token): mass * p
            for text, mass in found.items()
            for token, p in after([*text]).items()
            if p > 0
        }
    return found


def p_value(drawn: Iterable[tuple[int, ...]], distribution: Distribution) -> float:
    """Pearson's test of what was drawn; 0 if something came that cannot."""
    counts = Counter(map(tuple, drawn))
    if not counts.keys() <= distribution.keys():
        return 0.0
    return pearson([counts[text] for text in distribution], [*distribution.values()])


def pearson(counts: Sequence[float], probabilities: Sequence[float]) -> float:
    """Pearson's test of how often every outcome came; rare outcomes are one."""
    draws = sum(counts)
    cells = [(count, draws * p) for count, p in zip(counts, probabilities, strict=True)]
    if any(count for count, want in cells if not want):
        return 0.0
    often = [cell for cell in cells if cell[1] >= LEAST]
    rare = [cell for cell in cells if 0 < cell[1] < LEAST]
    if rare:
        often.append((sum(count for count, _ in rare), sum(want for _, want in rare)))
    assert len(often) > 1, "too few draws to tell"
    found = sum((count - want) ** 2 / want for count, want in often)
    # the distribution of chi-squared; scipy.stats takes a second to import
    return float(chdtrc(len(often) - 1, found))
