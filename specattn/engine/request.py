"""A request, what became of it, and where it stands while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specattn.checks import whole_number
from specattn.engine.detokenizer import TextStream
from specattn.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


@dataclass(frozen=True)
class Request:
    """One text to continue.

    Parameters
    ----------
    prompt : sequence of int
        Token ids, at least one; kept as a tuple, whatever becomes of the sequence that is given.
    max_new_tokens : int
        Most tokens to generate, the end-of-text token included.
    sampling : SamplingParams
        How tokens are drawn; greedy by default.
    stop : sequence of str
        Texts that end the generation, none of them empty, looked for in what ``detokenize`` of the
        engine adds to the end of the prompt for the tokens generated. Kept as a tuple, too.
    ignore_eos : bool
        Go on past end-of-text tokens.

    Raises
    ------
    ValueError
        If the prompt's tokens or ``max_new_tokens`` are no whole numbers, ``stop`` is a single
        text, or one of its texts is empty.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    sampling: SamplingParams = SamplingParams()
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        prompt = tuple(whole_number("every prompt token", token) for token in self.prompt)
        object.__setattr__(self, "prompt", prompt)
        whole_number("max_new_tokens", self.max_new_tokens)
        # each of its characters would end the generation
        if isinstance(self.stop, str):
            raise ValueError(f"stop must be a sequence of texts, got the text {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must be texts that are not empty, got {text!r}")


@dataclass
class RequestOutput:
    """What became of a request.

    Parameters
    ----------
    tokens : list of int
        Generated tokens, never more than ``max_new_tokens``; an end-of-text token is the last.
    finish_reason : str
        ``""`` while running, then ``"eos"``, ``"stop"``, ``"length"`` (``max_new_tokens``),
        ``"context"`` (the context is full) or ``"dropped"`` (by the caller, or where an error or an
        interrupt has cost the engine a step's tokens).
    accept_lens : list of int
        Tokens that each step added, bonus included; those past the end are not counted.
    started_at, first_token_at, finished_at : float
        `time.perf_counter` readings, in seconds: when it was added, after its prompt, at its end.
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
class RunningRequest:
    """A request being decoded; ``length`` of its tokens are committed, as far as the host knows."""

    request: Request
    result: RequestOutput
    row: int
    length: int
    _stream: TextStream | None = field(default=None, init=False, repr=False)

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

    def take(
        self,
        tokens: Sequence[int],
        eos: Collection[int],
        limit: int,
        detokenize: Callable[[list[int]], str] | None,
    ) -> list[int]:
        """Append tokens up to whatever ends the request; returns those kept.

        Parameters
        ----------
        tokens : sequence of int
            What a step gained.
        eos : collection of int
            End-of-text tokens.
        limit : int
            Tokens that a context holds.
        detokenize : callable or None
            Maps token ids to text, for stop strings.
        """
        request, result = self.request, self.result
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            result.tokens.append(token)
            if token in eos and not request.ignore_eos:
                result.finish_reason = "eos"
            elif request.stop and self._stops(token, detokenize):
                result.finish_reason = "stop"
            elif len(result.tokens) >= request.max_new_tokens:
                result.finish_reason = "length"
            if result.finish_reason:
                break
        if not result.finish_reason and self.length >= limit:
            result.finish_reason = "context"
        if result.finish_reason:
            result.finished_at = time.perf_counter()
        return kept

    def _stops(self, token: int, detokenize: Callable[[list[int]], str] | None) -> bool:
        """Whether the text of all tokens, of which this is the next, holds a stop string."""
        assert detokenize is not None
        request = self.request
        self._stream = self._stream or TextStream(detokenize, request.prompt, request.stop)
        self._stream.feed([token])
        return self._stream.stopped
