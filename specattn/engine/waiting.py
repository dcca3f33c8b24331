"""Requests that wait until there are rows for them, and slots for their whole texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from specattn.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.engine.request import Request, RequestOutput
    from specattn.engine.scheduler import Running


class Join(Protocol):
    """What lets requests run, or raises a `CapacityError` and lets none of them."""

    def __call__(self, requests: Sequence[Request], *, whole: bool) -> list[RequestOutput]:
        """Run their prompts, with slots for these or for the ``whole`` texts."""


class Waiting:
    """Requests that come in their order, as many at once as reach their ends together.

    Those that run keep their slots, be they of these requests or not, so one that would take what
    they grow into waits for them to end. One for whose longest text there are no slots at all runs
    by itself: it may end before.

    Parameters
    ----------
    requests : sequence of Request
        Who waits.
    rows : int
        Requests that may run at once.
    running : Running
        Those that run.
    join : callable
        Lets requests run.
    """

    def __init__(
        self, requests: Sequence[Request], rows: int, running: Running, join: Join
    ) -> None:
        self._requests, self._rows = list(requests), rows
        self._running, self._join = running, join
        # with so many running, nobody else found a row or slots
        self._full = rows

    def __len__(self) -> int:
        return len(self._requests)

    def join(self) -> list[RequestOutput]:
        """Let those run whose turn it is; returns their results, with their first tokens.

        Raises
        ------
        CapacityError
            If the first one lacks slots for its prompt though nobody runs; nobody has joined then.
        """
        joined: list[RequestOutput] = []
        if self._running.live and len(self._running.live) >= self._full:
            return joined
        count = len(self._requests)
        while count := min(count, len(self), self._rows - len(self._running.live)):
            try:
                joined += self._take(count, whole=True)
            except CapacityError:
                if count == 1 and not self._running.live:
                    if not joined:  # else their tokens come first
                        joined += self._take(1, whole=False)
                    break
                count //= 2
        self._full = len(self._running.live)
        return joined

    def _take(self, count: int, *, whole: bool) -> list[RequestOutput]:
        joined = self._join(self._requests[:count], whole=whole)
        del self._requests[:count]
        return joined
