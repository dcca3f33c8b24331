"""A request and what becomes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, Self

from specattn.checks import flag, listed, whole_number, whole_numbers
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step.level import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from specattn.engine.detokenizer import TextStream
    from specattn.speculative.sampling.grammar import Grammar
    from specattn.speculative.step.host_buffers import TokenLogprobs


@dataclass(frozen=True)
class Request:
    """One text to continue.

    Parameters
    ----------
    prompt : sequence of int, or str
        Token ids, at least one; kept as a tuple, whatever becomes of the sequence that is given. Of
        a text, which an engine with a ``tokenizer`` takes, it makes them.
    max_new_tokens : int
        Most tokens to generate, the end-of-text token included.
    sampling : SamplingParams
        How tokens are drawn; greedy by default.
    stop : sequence of str, or str
        Texts that end the generation, none of them empty, or one. They are looked for in what
        ``detokenize`` of the engine adds to the end of the prompt for the generated tokens. Kept as
        a tuple, too.
    ignore_eos : bool
        Go on past end-of-text tokens.
    stop_token_ids : sequence of int
        Tokens that end the generation, with ``ignore_eos``, too; the one that does is the last
        token. Kept as a frozenset.
    min_new_tokens : int
        Before so many tokens, neither an end-of-text nor a stop token is drawn, and in their text
        no stop string is looked for. 0 is off. Where the ``grammar`` leaves nothing else, the text
        ends by its end-of-text token all the same.
    grammar : callable, optional
        Makes the `Grammar` that the text must match, for every run of the request; the tokens that
        end the text are among those it allows. Steps of a batch with a grammar wait for the host,
        which asks it along the trees (docs/requests.md).

    Raises
    ------
    ValueError
        If the prompt's tokens, ``max_new_tokens`` or ``min_new_tokens`` are no whole numbers,
        ``min_new_tokens`` not in 0..``max_new_tokens``, ``sampling`` is no `SamplingParams`,
        ``ignore_eos`` no bool, ``grammar`` no callable, a text of ``stop`` empty, or
        ``stop_token_ids`` no whole numbers.
    """

    # of int, or a text until an engine has made tokens of it
    prompt: Sequence[Any]
    max_new_tokens: int = 128
    sampling: SamplingParams = SamplingParams()
    stop: Sequence[str] | str = ()
    ignore_eos: bool = False
    stop_token_ids: Collection[int] = ()
    min_new_tokens: int = 0
    grammar: Callable[[], Grammar] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            tokens = listed("prompt", self.prompt, "token ids, or a text")
            whole_numbers("every prompt token", tokens)
            object.__setattr__(self, "prompt", tuple(map(index, tokens)))
        whole_number("max_new_tokens", self.max_new_tokens)
        if whole_number("min_new_tokens", self.min_new_tokens):
            whole_number("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        if not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling must be SamplingParams, got {self.sampling!r}")
        flag("ignore_eos", self.ignore_eos)
        if self.grammar is not None and not callable(self.grammar):
            raise ValueError(f"grammar must make a Grammar when it is called, got {self.grammar!r}")
        ends = listed("stop_token_ids", self.stop_token_ids, "tokens")
        whole = frozenset(whole_number("every stop token", token) for token in ends)
        object.__setattr__(self, "stop_token_ids", whole)
        texts = [self.stop] if isinstance(self.stop, str) else listed("stop", self.stop, "texts")
        object.__setattr__(self, "stop", tuple(texts))
        for text in texts:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must be texts that are not empty, got {text!r}")

    @cached_property
    def levels(self) -> frozenset[Level]:
        """Levels of steps that it needs, above greedy."""
        constrained = self.grammar is not None
        return Level.each(
            sampled=self.sampling.drawn,
            processed=self.sampling.processed or self.min_new_tokens > 0 or constrained,
            constrained=constrained,
        )

    def samples(self, n: int) -> list[Self]:
        """Return requests for samples of this one, with consecutive seeds.

        Their tokens are those of ``n`` requests by themselves. In one engine, they share the KV of
        whole pages of the prompt. Without a seed they are this request ``n`` times: an engine that
        is given all of them draws the first seed.

        Parameters
        ----------
        n : int
            At least 1.

        Raises
        ------
        ValueError
            If ``n`` is no such number, or a seed does not fit into 64 bits.
        """
        n, seed = whole_number("n", n, 1), self.sampling.seed
        if seed is None:
            return [self] * n
        if seed + n > 2**63:
            raise ValueError(f"seed must be at most {2**63 - n} for n = {n} samples, got {seed}")
        return [self.seeded(seed + at) for at in range(n)]

    def seeded(self, seed: int) -> Self:
        """Return the request with another seed."""
        return replace(self, sampling=replace(self.sampling, seed=seed))


@dataclass
class RequestOutput:
    """The output of a request.

    Parameters
    ----------
    tokens : list of int
        Generated tokens, never more than ``max_new_tokens``; one that ends the text is the last.
    finish_reason : str
        ``""`` while the request runs or waits. Then ``"eos"`` (an end-of-text token, `end_ids`),
        ``"stop"`` (a stop token or a stop string of the request), ``"length"``
        (``max_new_tokens``), ``"context"`` (the context is full), ``"blocked"`` (its grammar and
        processors leave no token, not even an end), ``"nonfinite"`` (the target's logits held NaN
        or infinity where the next token was to be chosen) or ``"dropped"`` (by the caller, or where
        an error or an interrupt has cost the engine a step's tokens). The tokens before are kept.
    accept_lens : list of int
        Tokens that each step added, bonus included; those past the end are not counted.
    logprobs : list of TokenLogprobs
        One per token if ``SamplingParams.logprobs`` asked for them; else none.
    started_at, first_token_at, finished_at : float
        `time.perf_counter` readings, in seconds: at its admission, after its prompt, at its end.
    text : str
        The text of the tokens, without a stop string or the text of a token that ended it. It is
        made by `Engine.generate` and `specattn.engine.serving.RequestStream` where the engine can
        detokenize; else it is ``""``.
    seed : int, optional
        What named the random numbers of its tokens, be it given or drawn by the engine.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    accept_lens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    text: str = ""
    seed: int | None = None

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
    """A request that has a row of the table.

    ``length`` counts the tokens that hold KV, as far as the host knows. The target's end-of-text
    tokens, ``eos``, may end it; ``end_ids`` are these and its own stop tokens. ``stream`` is its
    text, where stop strings are looked for; ``grammar`` is what its text must match;
    ``level`` is that of the steps that it needs. It is a `HostRequest`: ``tokens`` are all its
    tokens; the bonus token, last, holds no KV. While its first token is ``awaited``, its prompt
    has been launched and not read; if it is ``held`` then, no step may begin before it is read.
    It is ``ready`` while the draft reads all of its text.
    """

    request: Request
    result: RequestOutput
    row: int
    length: int
    eos: Collection[int] = ()
    stream: TextStream | None = None
    awaited: bool = False
    held: bool = False
    ready: bool = True
    end_ids: frozenset[int] = field(init=False)
    grammar: Grammar | None = field(init=False, default=None)
    level: Level = field(init=False)
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # once, not in every step
        self.level = max(self.request.levels, default=Level.GREEDY)
        self.tokens = [*self.request.prompt, *self.result.tokens]
        if self.request.grammar is not None:
            self.grammar = self.request.grammar()
        self.end_ids = frozenset(self.eos).union(self.request.stop_token_ids)

    @property
    def prompt_len(self) -> int:
        """The length of its prompt."""
        return len(self.request.prompt)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return bool(self.result.finish_reason)

    def append(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Append tokens up to whatever ends the request; returns those kept.

        A last token of -1 is none: the target's logits were not finite there. A context holds
        ``limit`` tokens. Where the text or the grammar raises, nothing is appended.
        """
        result, reason = self.result, ""
        kept: list[int] = []
        ends, room = self.end_ids, self.request.max_new_tokens - len(result.tokens)
        for token in tokens:
            if token < 0:
                reason = "nonfinite"
                break
            kept.append(token)
            if self.stream is not None and token not in ends:
                self.stream.feed([token])
            if token in ends:
                reason = "eos" if token in self.eos else "stop"
            elif self.stream is not None and self.stream.stopped:
                reason = "stop"
            elif len(kept) >= room:
                reason = "length"
            if reason:
                break
        if self.grammar is not None:
            self.grammar.accept(kept)
        result.tokens += kept
        self.tokens += kept
        if not reason and self.length >= limit:
            reason = "context"
        if reason:
            result.finish_reason, result.finished_at = reason, time.perf_counter()
        return kept
