"""Kinds of steps that requests need, and parts that graphs record."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Self

from specattn.batch import ForwardMode

if TYPE_CHECKING:
    from specattn.config import SpecConfig


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
        if not (sampled or processed or constrained):
            return frozenset()
        asked = zip(cls, (False, sampled, processed, constrained), strict=True)
        return frozenset(level for level, wanted in asked if wanted)


class StepPart(NamedTuple):
    """The phases of one CUDA graph: a whole step or a part.

    Parameters
    ----------
    mode : ForwardMode or None
        None for the whole step, or ``DRAFT_DECODE``, ``TARGET_VERIFY`` or ``DRAFT_EXTEND``.
    level : Level
        What its requests may need. Greedy ones have the target's distributions computed with
        ``draft_sampling`` only.
    """

    mode: ForwardMode | None = None
    level: Level = Level.GREEDY

    @property
    def value(self) -> str:
        """Its name in messages and reports."""
        name = "step" if self.mode is None else self.mode.value
        return f"{name} ({self.level.name.lower()})" if self.level else name

    def has(self, mode: ForwardMode) -> bool:
        """Whether the part runs the phases of this mode."""
        return self.mode in (None, mode)

    @classmethod
    def of(cls, config: SpecConfig, level: Level, *, piecewise: bool) -> tuple[StepPart, ...]:
        """Return the parts of a step in the order they run.

        Constrained steps consist of processed parts: the host works between the draft and the
        target, whatever others do.
        """
        piecewise |= level is Level.CONSTRAINED
        level = min(level, Level.PROCESSED)
        if not piecewise or not config.num_steps:
            return (cls(None, level),)
        # drafts and extends draw alike; a processed extend also notes what was emitted
        extends = level if level is Level.PROCESSED else Level.GREEDY
        return (
            cls(ForwardMode.DRAFT_DECODE),
            cls(ForwardMode.TARGET_VERIFY, level),
            cls(ForwardMode.DRAFT_EXTEND, extends),
        )


#: All phases, for requests that are greedy.
WHOLE = StepPart()
