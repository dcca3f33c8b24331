"""A request, what became of it, and where it stands while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specattn.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Request:
    """One text to continue.

    Parameters
    ----------
    prompt : sequence of int
        Token ids, at least one.
    max_new_tokens : int
        Most tokens to generate, the end-of-text token included.
    sampling : SamplingParams
        How tokens are drawn; greedy by default.
    stop : tuple of str
        Texts that end the generation; needs the engine's ``detokenize``.
    ignore_eos : bool
        Go on past end-of-text tokens.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass
class Generation:
    """What became of a request.

    Parameters
    ----------
    tokens : list of int
        Generated tokens, never more than ``max_new_tokens``; an end-of-text token is the last.
    finish_reason : str
        ``""`` while running, then ``"eos"``, ``"stop"``, ``"length"`` (``max_new_tokens``) or
        ``"context"`` (the context is full).
    accept_lens : list of int
        Tokens gained by each step, bonus included, before truncation.
    first_token_at, finished_at : float
        `time.perf_counter` readings, in seconds.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    accept_lens: list[int] = field(default_factory=list)
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def steps(self) -> int:
        """Speculative steps taken."""
        return len(self.accept_lens)

    @property
    def accepted_per_step(self) -> float:
        """Mean tokens per step, bonus included; 0 before the first step."""
        return sum(self.accept_lens) / self.steps if self.steps else 0.0


@dataclass(eq=False)
class Live:
    """A request being decoded; ``length`` of its tokens are committed, as far as the host knows."""

    request: Request
    result: Generation
    row: int
    length: int

    @property
    def text(self) -> list[int]:
        """The prompt and all tokens since: committed ones, then the bonus token."""
        return [*self.request.prompt, *self.result.tokens]

    @property
    def bonus(self) -> int:
        """Its newest token, whose KV is not there yet."""
        return self.result.tokens[-1]

    @property
    def goes_on(self) -> bool:
        """Whether the step in flight may leave it unfinished: every step gains a token."""
        ended = bool(self.result.finish_reason)
        return not ended and len(self.result.tokens) + 1 < self.request.max_new_tokens
