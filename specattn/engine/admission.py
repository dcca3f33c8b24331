"""Requests on their way from waiting to running."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from specattn.engine.prompts import run_prompts
from specattn.errors import CapacityError
from specattn.speculative.prompts.prefill import Prefill

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from specattn.engine.decoders import Decoders
    from specattn.engine.flight import Flight
    from specattn.engine.metrics import Totals
    from specattn.engine.request import RequestOutput
    from specattn.engine.scheduler import Item, Scheduler


class Admission:
    """Gives requests rows and slots, and runs their prompts.

    A request is admitted when its first token is drawn.

    Parameters
    ----------
    change : callable
        Makes a context manager, in which the engine's books change. It gives what is to be called
        when all is undone.
    decoders : Decoders
        Capture what the requests need of steps.
    scheduler : Scheduler
        Says who waits and who runs.
    flight : Flight
        Told that something else runs between its steps.
    totals : Totals
        What the engine counts.

    Attributes
    ----------
    prefill : Prefill
        Runs the prompts.
    """

    def __init__(
        self,
        change: Callable[[], AbstractContextManager[Callable[[], None]]],
        decoders: Decoders,
        scheduler: Scheduler,
        flight: Flight,
        totals: Totals,
    ) -> None:
        self.prefill = Prefill.of(decoders.setup)
        self._change, self._decoders, self._scheduler = change, decoders, scheduler
        self._flight, self._totals = flight, totals

    def admit_waiting(self) -> list[RequestOutput]:
        """Admit as many waiting requests as have slots to their ends.

        They come in their order, and those that run keep what they may grow into. One for whose
        longest text there are no slots at all runs by itself.
        """
        scheduler = self._scheduler
        admitted: list[RequestOutput] = []
        if scheduler.running and len(scheduler.running) >= scheduler.full:
            return admitted
        count = len(scheduler.waiting)
        while count := min(count, len(scheduler.waiting), scheduler.num_free):
            try:
                admitted += self.admit(scheduler.waiting[:count], whole=True)
            except CapacityError:
                if count == 1 and not scheduler.running:
                    if not admitted:  # else their tokens come first
                        admitted += self.admit(scheduler.waiting[:1], whole=False)
                        del scheduler.waiting[:1]
                    break
                count //= 2
            else:
                del scheduler.waiting[:count]
        scheduler.full = len(scheduler.running)
        return admitted

    def admit(self, items: Sequence[Item], *, whole: bool) -> list[RequestOutput]:
        """Run the prompts and draw first tokens, of all requests or none.

        ``whole`` is whether there must be slots for all steps of these requests, as
        `Scheduler.admit` says.

        Raises
        ------
        CapacityError
            If there are more requests than free rows, or slots run out.
        """
        requests = [request for request, _ in items]
        results = [result for _, result in items]
        scheduler, table = self._scheduler, self._scheduler.table
        with self._change() as put_right:
            if len(items) > (free := table.num_free_rows):
                raise CapacityError(
                    f"requests must be at most {free}, as many as rows are free, got {len(items)}"
                )
            running, rows = list(scheduler.running), table.rows
            try:
                self._decoders.capture_for(requests)
                self._flight.untimed()
                shared = self._run_prompts(items, whole=whole)
            except BaseException:
                if not table.changing:
                    scheduler.roll_back(running, rows, results)
                    put_right()
                raise
            self._totals.admitted(items, shared)
            return results

    def _run_prompts(self, items: Sequence[Item], *, whole: bool) -> int:
        """Run prompts, draw first tokens; returns how many tokens others had run."""
        shared, started_at = 0, time.perf_counter()
        scheduler, states = self._scheduler, self._decoders.setup.states
        for _, result in items:
            result.started_at = started_at
        while items:
            # prompts that run now, and those that wait to share them
            wave, items = scheduler.wave(items)
            admitted = scheduler.admit(wave, whole=whole)
            shared += sum(one.length for one in admitted)
            firsts, scored = run_prompts(self.prefill, states, admitted, self._decoders.processors)
            for at, (one, token) in enumerate(zip(admitted, firsts, strict=True)):
                one.length = one.prompt_len
                one.result.first_token_at = time.perf_counter()
                read = None if scored is None else partial(scored.read, at, 1)
                scheduler.append(one, [token], read)
            scheduler.remove_ended()
        return shared
