"""An engine's numbers for monitoring."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.config import SpecConfig
    from specattn.engine.request import RequestOutput
    from specattn.engine.scheduler import Item, Scheduler


@dataclass
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

    running: int = 0
    waiting: int = 0
    free_rows: int = 0
    free_slots: int = 0
    slots: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    verify_steps: int = 0
    draft_steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accept_lens: tuple[int, ...] = ()

    @property
    def accepted_per_step(self) -> float:
        """Mean tokens of a request and step, bonus included; 0 without."""
        tokens = sum(gained * count for gained, count in enumerate(self.accept_lens))
        return tokens / max(sum(self.accept_lens), 1)

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Steps of requests that kept at least 1, 2, ... draft tokens."""
        return tuple(sum(self.accept_lens[at:]) for at in range(2, len(self.accept_lens)))


class Totals:
    """What an engine counts; its steps draft up to ``most`` tokens deep."""

    def __init__(self, most: int) -> None:
        self._counted = EngineMetrics()
        self._finished: Counter[str] = Counter()
        self._accept_lens = [0] * (2 + most)

    def metrics(self, scheduler: Scheduler) -> EngineMetrics:
        """Return a copy, with the requests and slots of now."""
        table = scheduler.table
        return replace(
            self._counted,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_rows=table.num_free_rows,
            free_slots=table.num_free_slots,
            slots=(table.num_pages - 1) * table.page_size,
            finished=dict(self._finished),
            accept_lens=tuple(self._accept_lens),
        )

    def admitted(self, items: Sequence[Item], shared: int) -> None:
        """Count prompts that ran, and tokens of theirs that others had run."""
        self._counted.shared_tokens += shared
        for request, result in items:
            self._counted.prompt_tokens += len(request.prompt)
            self._given(result, len(result.tokens))

    def began(self, result: RequestOutput, count: int) -> None:
        """Count the first token of a prompt that was counted before."""
        self._given(result, count)

    def stepped(self, config: SpecConfig, batch: int) -> None:
        """Count a step of a batch."""
        self._counted.verify_steps += 1
        if config.num_steps:
            self._counted.draft_steps += 1
            self._counted.drafts += batch
            self._counted.draft_tokens += batch * (config.num_draft_tokens - 1)

    def kept(self, result: RequestOutput, count: int) -> None:
        """Count what a request gained in a step."""
        self._accept_lens[count] += 1
        self._given(result, count)

    def dropped(self, count: int) -> None:
        """Count requests that were dropped."""
        if count:
            self._finished["dropped"] += count

    def _given(self, result: RequestOutput, count: int) -> None:
        """Count tokens that a request was given, and its end."""
        self._counted.generated_tokens += count
        if result.finish_reason:
            self._finished[result.finish_reason] += 1
