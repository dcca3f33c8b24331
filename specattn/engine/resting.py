"""Rests of drafts: how long they last."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Rest:
    """A draft's rest, which a judgement at any batch size may end.

    Parameters
    ----------
    drafted : int
        Steps that drafted for the judgement under way.
    due : dict of int to float
        By bucket where plain decoding was found to be better: the step from which on the draft is
        judged again. Where it was not judged yet, that is at once.
    """

    drafted: int = 0
    due: dict[int, float] = field(default_factory=dict)

    def is_due(self, bucket: int, step: int) -> bool:
        """Return whether the draft is to be judged."""
        return step >= self.due.get(bucket, 0)

    def go_on(self, bucket: int, due: float) -> None:
        """Let the draft rest until ``due``: plain decoding was better."""
        self.drafted, self.due[bucket] = 0, due
