"""Requests on their way from waiting to running."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from specattn.engine.prompts import begin_prompts
from specattn.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from specattn.cuda_graph import GraphReport
    from specattn.engine.decoders import Decoders
    from specattn.engine.flight import Flight, LaunchedPrompt
    from specattn.engine.metrics import Totals
    from specattn.engine.prompts import Prompts
    from specattn.engine.request import RequestOutput, RunningRequest
    from specattn.engine.scheduler import Item, Scheduler
    from specattn.speculative.prompts.runner import PromptWave
    from specattn.speculative.step.level import Level


class Admission:
    """Gives requests rows and slots, and runs their prompts.

    Prompts are launched and not waited for, unless what runs them waits: their requests take part
    in the next step. Else a request is admitted when its first token is drawn.

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
    prompts : Prompts
        Runs prompts: a `PromptRunner`, or `WaitedPrompts`.
    """

    def __init__(
        self,
        change: Callable[[], AbstractContextManager[Callable[[], None]]],
        decoders: Decoders,
        scheduler: Scheduler,
        flight: Flight,
        totals: Totals,
        prompts: Prompts,
    ) -> None:
        self.prompts = prompts
        # a request whose prompt is longer than a chunk, and what is left of that
        self._begun: tuple[RunningRequest, PromptWave] | None = None
        self._change, self._decoders, self._scheduler = change, decoders, scheduler
        self._flight, self._totals = flight, totals

    def admit_waiting(self) -> list[RequestOutput]:
        """Admit as many waiting requests as have slots to their ends.

        They come in their order, and those that run keep what they may grow into. One for whose
        longest text there are no slots at all runs by itself. Beside requests that run, a chunk is
        launched at most, for they wait for it: a longer prompt runs in parts, between their steps.
        Returns those whose first tokens are known; of others, steps hand them out.
        """
        scheduler = self._scheduler
        admitted: list[RequestOutput] = []
        parted = None if self._begun is None else self._begun[0]
        beside = any(one is not parted for one in scheduler.running) and not self.prompts.waits
        if (beside and self._flight.chunk_last) or self._goes_on(parts=beside):
            return admitted
        if scheduler.running and len(scheduler.running) >= scheduler.full:
            return admitted
        count = len(scheduler.waiting)
        while count := min(count, len(scheduler.waiting), scheduler.num_free):
            some = self._in_a_chunk(count) if beside else count
            try:
                admitted += self.admit(scheduler.waiting[:some], whole=True, parts=beside)
            except CapacityError:
                if some == 1 and not scheduler.running:
                    if not admitted:  # else their tokens come first
                        admitted += self.admit(scheduler.waiting[:1], whole=False)
                        del scheduler.waiting[:1]
                    break
                count = some // 2
            else:
                del scheduler.waiting[:some]
                if some < count:  # the others after a step
                    scheduler.full = len(scheduler.running) + 1
                    return []
        scheduler.full = len(scheduler.running)
        return [one for one in admitted if one.tokens or one.finish_reason]

    def _in_a_chunk(self, count: int) -> int:
        """Return how many of ``count`` prompts a chunk holds, or 1."""
        ahead, left = self.prompts.proposer.read_ahead, self.prompts.chunk
        for at, (request, _) in enumerate(self._scheduler.waiting[:count]):
            left -= self._scheduler.lacking(request) + ahead
            if left < 0:
                return max(at, 1)
        return count

    def _goes_on(self, *, parts: bool) -> bool:
        """Launch the next part of a prompt; returns whether there was one."""
        if self._begun is None:
            return False
        one, wave = self._begun
        with self._change():
            if one.result.finish_reason:  # it was dropped
                self._begun = None
                return False
            try:
                self._launch([one], wave, parts=parts)
            except Exception:
                self._begun = None
                self._scheduler.drop(one.result)
                self._totals.dropped(1)
                raise
        return True

    def admit(
        self, items: Sequence[Item], *, whole: bool, wait: bool = False, parts: bool = False
    ) -> list[RequestOutput]:
        """Run the prompts, of all requests or none.

        ``whole`` is whether there must be slots for all steps of these requests, as
        `Scheduler.admit` says, and ``wait`` whether to wait for their first tokens. With ``parts``,
        of one prompt a chunk alone is launched.

        Raises
        ------
        CapacityError
            If there are more requests than free rows, or slots run out.
        """
        results = [result for _, result in items]
        levels = {level for request, _ in items for level in request.levels}
        scheduler, table = self._scheduler, self._scheduler.table
        with self._change() as put_right:
            if len(items) > (free := table.num_free_rows):
                raise CapacityError(
                    f"requests must be at most {free}, as many as rows are free, got {len(items)}"
                )
            running, rows, launched = list(scheduler.running), table.rows, self._flight.prompts
            begun = self._begun
            try:
                self._decoders.capture_for(levels)
                self.capture(*levels)
                self._flight.untimed()
                self._flight.prompts = [*launched]
                shared = self._run_prompts(items, whole=whole, parts=parts)
                if wait or self.prompts.waits:
                    self._read_since(launched)
            except BaseException:
                if not table.changing:
                    self._flight.prompts = launched
                    self._begun = begun
                    scheduler.roll_back(running, rows, results)
                    put_right()
                raise
            self._totals.admitted(items, shared)
            return results

    def capture(self, *levels: Level) -> None:
        """Capture first tokens of these levels; see `PromptRunner.capture`."""
        self.prompts.capture(*levels, processors=self._decoders.processors, or_eager=True)

    def report(self) -> tuple[GraphReport, ...]:
        """Return what capturing chunks of prompts took."""
        return self.prompts.report()

    def clear(self) -> None:
        """Forget a prompt in parts, and wait for every chunk in flight."""
        self._begun = None
        self.prompts.settle()

    def _read_since(self, launched: Sequence[LaunchedPrompt]) -> None:
        """Wait for the prompts that were launched after these."""
        flight = self._flight
        new = flight.prompts[len(launched) :]
        flight.prompts = [*launched]
        flight.read(new)
        # the caller has waited, not the requests that run
        flight.chunk_last = False
        self._scheduler.remove_ended()

    def _run_prompts(self, items: Sequence[Item], *, whole: bool, parts: bool) -> int:
        """Run prompts; returns how many of their tokens others had run."""
        shared, started_at = 0, time.perf_counter()
        scheduler = self._scheduler
        for _, result in items:
            result.started_at = started_at
        while items:
            # prompts that run now, and those that wait to share them
            wave, items = scheduler.wave(items)
            admitted = scheduler.admit(wave, whole=whole)
            shared += sum(one.length for one in admitted)
            if self.prompts.waits:  # then the draft reads all
                for one in admitted:
                    one.ready = True
            vocab = self._decoders.setup.target.model.vocab_size
            begun = begin_prompts(self.prompts, admitted, self._decoders.processors, vocab)
            self._launch(admitted, begun, parts=parts and len(admitted) == 1)
        return shared

    def _launch(self, admitted: Sequence[RunningRequest], wave: PromptWave, *, parts: bool) -> None:
        """Launch prompts, or in ``parts`` a chunk of one."""
        began = time.perf_counter()
        self.prompts.launch(wave)
        while wave.left and not parts:
            self.prompts.launch(wave)
        self._flight.chunk_last = True
        if wave.left:
            (one,) = admitted
            one.awaited = one.held = True
            self._begun = one, wave
            return
        if self._begun is not None and self._begun[1] is wave:
            self._begun = None
        firsts = [wave.firsts[at] for at in range(len(admitted))]
        self._flight.expect(admitted, firsts, began, wave.launched if parts else 1)
