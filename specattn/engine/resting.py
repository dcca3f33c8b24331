"""Rests of drafts: how long they last."""

from __future__ import annotations

from dataclasses import dataclass, field

# how much sooner than later on a draft is judged for the first time; half as much the next
_SOONER = 8


@dataclass
class Rest:
    """A draft's rest, which a judgement at any batch size may end.

    Parameters
    ----------
    drafted : int
        Steps that drafted for the judgement under way.
    judged : dict of int to int
        By bucket: how often plain decoding was found to be better.
    due : dict of int to float
        By bucket: the step from which on the draft is judged again. Where it was not judged yet,
        that is at once.
    """

    drafted: int = 0
    judged: dict[int, int] = field(default_factory=dict)
    due: dict[int, float] = field(default_factory=dict)

    def is_due(self, bucket: int, step: int) -> bool:
        """Return whether the draft is to be judged."""
        return step >= self.due.get(bucket, 0)

    def go_on(self, bucket: int, step: int, pause: float) -> None:
        """Note that plain decoding was better.

        ``pause`` is how many steps a long rest lasts until the draft is judged again.
        """
        # what was found at first may be chance, or of texts that are gone
        judged = self.judged.get(bucket, 0)
        self.drafted, self.judged[bucket] = 0, judged + 1
        self.due[bucket] = step + pause / max(_SOONER >> judged, 1)
