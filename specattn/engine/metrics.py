"""An engine's numbers for monitoring."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.cache.slot_table import SlotTable
    from specattn.config import SpecConfig
    from specattn.engine.request import RequestOutput
    from specattn.engine.scheduler import Item, Scheduler


@dataclass(frozen=True)
class EngineMetrics:
    """The contents of an engine, and totals since it was made.

    Parameters
    ----------
    running, waiting : int
        Requests that have a row, and those that wait for one.
    free_rows, free_slots, slots : int
        Rows and KV slots that no request holds, and slots that there are.
    prompt_tokens, shared_tokens : int
        Tokens of the prompts that ran, and how many of them were another request's prefix.
    generated_tokens : int
        Tokens that requests were given.
    finished : dict of str to int
        Requests that have ended, by `RequestOutput.finish_reason`.
    verify_steps, draft_steps : int
        Steps of a batch, each one forward of the target, and how many of them drafted.
    drafts, draft_tokens : int
        Trees of these, one per request, and their nodes without the roots.
    accept_lens : tuple of int
        Entry n counts how often a request gained n tokens in a step, bonus included. Tokens past
        its end are not gained.
    """

    running: int
    waiting: int
    free_rows: int
    free_slots: int
    slots: int
    prompt_tokens: int
    shared_tokens: int
    generated_tokens: int
    finished: dict[str, int]
    verify_steps: int
    draft_steps: int
    drafts: int
    draft_tokens: int
    accept_lens: tuple[int, ...]

    @property
    def accepted_per_step(self) -> float:
        """Mean tokens of a request and step, bonus included; 0 without."""
        tokens = sum(gained * count for gained, count in enumerate(self.accept_lens))
        return tokens / max(sum(self.accept_lens), 1)

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Steps of requests that kept at least 1, 2, ... draft tokens."""
        return tuple(sum(self.accept_lens[at:]) for at in range(2, len(self.accept_lens)))


class EngineCounters:
    """Counts what an engine's requests are given.

    Parameters
    ----------
    configs : sequence of SpecConfig
        The engine's.
    """

    def __init__(self, configs: Sequence[SpecConfig]) -> None:
        self._prompt_tokens = self._shared_tokens = self._first_tokens = 0
        self._verify_steps = self._draft_steps = self._drafts = self._draft_tokens = 0
        self._finished: Counter[str] = Counter()
        self._accept_lens = [0] * (2 + max(config.num_steps for config in configs))

    def admitted(self, items: Sequence[Item], shared: int) -> None:
        """Count requests whose prompts ran, and their first tokens."""
        self._shared_tokens += shared
        for request, result in items:
            self._prompt_tokens += len(request.prompt)
            self._first_tokens += len(result.tokens)
            if result.finish_reason:
                self._finished[result.finish_reason] += 1

    def stepped(self, config: SpecConfig, batch: int) -> None:
        """Count a step of a batch."""
        self._verify_steps += 1
        if config.num_steps:
            self._draft_steps += 1
            self._drafts += batch
            self._draft_tokens += batch * (config.num_draft_tokens - 1)

    def gained(self, result: RequestOutput, tokens: int) -> None:
        """Count what a request gained in a step."""
        self._accept_lens[tokens] += 1
        if result.finish_reason:
            self._finished[result.finish_reason] += 1

    def dropped(self, count: int) -> None:
        """Count requests that were dropped."""
        if count:
            self._finished["dropped"] += count

    def read(self, scheduler: Scheduler, table: SlotTable) -> EngineMetrics:
        """Return the numbers; from any thread, for each is read at once."""
        lens = tuple(self._accept_lens)
        return EngineMetrics(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_rows=table.num_free_rows,
            free_slots=table.num_free_slots,
            slots=(table.num_pages - 1) * table.page_size,
            prompt_tokens=self._prompt_tokens,
            shared_tokens=self._shared_tokens,
            generated_tokens=self._first_tokens + sum(n * count for n, count in enumerate(lens)),
            finished=dict(self._finished),
            verify_steps=self._verify_steps,
            draft_steps=self._draft_steps,
            drafts=self._drafts,
            draft_tokens=self._draft_tokens,
            accept_lens=lens,
        )
