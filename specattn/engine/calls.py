"""Calls of an engine: one thread at a time, interrupted or not."""

from __future__ import annotations

from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specattn.cache.slot_table import SlotTable


class Calls:
    """Lets one thread at a time call an engine, and notes interrupts.

    A call that changes the books notes it first. An interrupt that nothing undoes leaves the note,
    and calls are refused until the engine has dropped its requests.

    Parameters
    ----------
    table : SlotTable
        Says whether its own books were left amid a change.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table, self._lock = table, RLock()
        # whether a call changes the books; an interrupt that nothing undid leaves it so
        self._changing = False

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Lock the engine for this thread, or raise a ValueError at once."""
        lock = self._lock
        if not lock.acquire(blocking=False):
            raise ValueError(
                "an Engine must be called from one thread at a time: "
                "a call of another thread has not returned"
            )
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Note that the books change; the note outlives an interrupt."""
        with self.one_thread():
            if self._changing:
                raise ValueError(
                    "a call of this Engine was interrupted, or has not returned: call clear()"
                )
            self._changing = True
            try:
                yield
            except Exception:
                self._changing = self._table.changing
                raise
            self._changing = False

    def begin_again(self) -> bool:
        """Note a change, whatever was interrupted; returns whether anything was."""
        interrupted, self._changing = self._changing or self._table.changing, True
        return interrupted

    def put_right(self) -> None:
        """Note that the books are right."""
        self._changing = False

    def unlock(self) -> None:
        """Forget who called.

        An interrupt may come between taking the lock and noting it.
        """
        self._lock = RLock()
