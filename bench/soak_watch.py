"""Counts what an engine's steps wait for, and what they allocate on the device.

torch's sync debug mode reports what it waits for itself. Waits for events, which it does not
report, are counted: a step's tokens may be waited for once, after the next step was launched or
not, and launching waits for nothing.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from specattn.speculative.host_buffers import PendingStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specattn.engine.engine import Engine

COUNTERS = (
    "allocation.all.allocated",
    "segment.all.allocated",
    "num_device_alloc",
    "num_alloc_retries",
)


class Watch:
    """While it watches, a sync is an error; counts allocations, and waits for events.

    Without CUDA nothing is counted.

    Attributes
    ----------
    steps : int
        How often it watched.
    waits, launch_waits : int
        For tokens or other events, while it watched; and how many of them launches made.
    allocations : dict
        By counter of torch's allocator, while it watched.
    """

    def __init__(self) -> None:
        self.reset()
        self._watches = False
        self._before: dict[str, int] = {}

    def reset(self) -> None:
        """Forget what was counted."""
        self.steps = self.waits = self.launch_waits = 0
        self.allocations = dict.fromkeys(COUNTERS, 0)

    def counted(self) -> dict[str, Any]:
        """Return what was counted, by name."""
        counts = {name: getattr(self, name) for name in ("steps", "waits", "launch_waits")}
        return counts | {"allocations": dict(self.allocations)}

    @contextmanager
    def over(self, *engines: Engine) -> Iterator[Watch]:
        """Count waits until the context ends, and those of these engines' launches."""
        if not torch.cuda.is_available():
            yield self
            return
        wait_for_event, wait_for_tokens = torch.cuda.Event.synchronize, PendingStep.wait
        wait_for_stream = torch.cuda.Stream.synchronize

        def event(event: torch.cuda.Event) -> None:
            self.waits += self._watches and not event.query()
            wait_for_event(event)

        def tokens(pending: PendingStep) -> list[list[int]]:
            self.waits += self._watches and not pending.ready
            return wait_for_tokens(pending)

        def stream(stream: torch.cuda.Stream) -> None:
            assert not self._watches, "a stream or the device was waited for"
            wait_for_stream(stream)

        calls: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.cuda.Event, "synchronize", event),
            (PendingStep, "wait", tokens),
            (torch.cuda.Stream, "synchronize", stream),
        ]
        for run in engines:
            for owner, name in (
                (run.scheduler, "schedule"),
                (run, "_launch"),
                (run, "_launch_ahead"),
            ):
                calls.append((owner, name, self._launching(getattr(owner, name))))
        with ExitStack() as stack:
            for call in calls:
                stack.enter_context(mock.patch.object(*call))
            yield self

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Refuse syncs, and count what is allocated."""
        self.steps += 1
        self._start()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away, for a prompt, if it watches."""
        watches = self._watches
        self._stop()
        try:
            yield
        finally:
            if watches:
                self._start()

    def _start(self) -> None:
        self._watches = torch.cuda.is_available()
        if self._watches:
            self._before = _counters()
            torch.cuda.set_sync_debug_mode("error")

    def _stop(self) -> None:
        if not self._watches:
            return
        self._watches = False
        torch.cuda.set_sync_debug_mode("default")
        for name, count in _counters().items():
            self.allocations[name] += count - self._before[name]

    def _launching(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            before = self.waits
            found = call(*args)
            self.launch_waits += self.waits - before
            return found

        return counted


def _counters() -> dict[str, int]:
    found = torch.cuda.memory_stats()
    return {name: found.get(name, 0) for name in COUNTERS}
