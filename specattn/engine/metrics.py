"""An engine's numbers for monitoring."""

from __future__ import annotations

from dataclasses import dataclass, field


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
