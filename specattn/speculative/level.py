"""The kinds of step that requests may need."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class Level(IntEnum):
    """A kind of step, which serves requests of lower levels, too.

    Greedy steps compute no distributions. Sampled ones serve requests that draw, processed ones
    those with logits processors, and constrained ones, which run in parts, those with a grammar.
    """

    GREEDY = 0
    SAMPLED = 1
    PROCESSED = 2
    CONSTRAINED = 3

    @classmethod
    def each(cls, *, sampled: bool, processed: bool, constrained: bool = False) -> frozenset[Self]:
        """Return every level above greedy that is asked for."""
        asked = zip(cls, (False, sampled, processed, constrained), strict=True)
        return frozenset(level for level, wanted in asked if wanted)
