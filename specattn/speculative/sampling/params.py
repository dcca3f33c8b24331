"""Sampling parameters of one request and of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from specattn.buffers import send
from specattn.checks import number, one_of, whole_number
from specattn.kernels.logprobs import MAX_LOGPROBS

#: Tokens with a bias, sequences that are bad words, and tokens of each, that a request may have.
MAX_BIAS, MAX_BAD_WORDS, MAX_BAD_WORD = 512, 64, 16


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request.

    Requests with one of the last ten need steps of the level "processed"; see
    docs/requests.md for their distributions.

    Parameters
    ----------
    temperature : float, optional
        Divides the logits; 0 is greedy decoding, and what None becomes. It must be given beside
        ``top_k``, ``top_p`` and ``min_p``.
    top_k : int
        Keep the ``top_k`` most probable tokens; 0 keeps all, and so does -1, which becomes 0.
    top_p : float
        Keep the fewest most probable tokens whose mass reaches ``top_p``, in (0, 1].
    seed : int, optional
        Names the request's random numbers. Each is a function of seed, position and draw, so that
        a request's tokens do not depend on the batch it runs in. None has the engine draw one for
        each request that draws.
    min_p : float
        Keep tokens at least ``min_p`` times as probable as the most probable one, in [0, 1]; 0
        keeps all.
    repetition_penalty : float
        Above 0: divides positive logits of tokens of prompt and output, multiplies negative ones; 1
        is off.
    presence_penalty, frequency_penalty : float
        In [-2, 2]: subtracted from the logits of the output's tokens, once, and once per time that
        they are there; 0 is off.
    logit_bias : mapping of int to float
        Numbers added to the logits of at most 512 tokens, -inf makes one impossible; kept as a
        tuple of pairs.
    bad_words : sequence of sequence of int
        At most 64 sequences of 1 to 16 tokens, which the text must not have: the token that would
        complete one is impossible. Kept as tuples.
    allowed_tokens : collection of int, optional
        The only possible tokens, at least one; kept as a frozenset. None allows all.
    logprobs : int, optional
        With each token, its log-probability and those of the ``logprobs`` most probable tokens, at
        most 20; 0 is the token's alone, None nothing.
    logprobs_of : {"raw", "processed"}
        Of which distribution: the softmax of the target's logits, or what the token was drawn from,
        which is the softmax of processed logits where decoding is greedy.
    processors : mapping of str to object
        Names of the engine's `LogitsProcessor` and their parameters; kept as a tuple of pairs.

    Raises
    ------
    ValueError
        If a parameter is of another kind or out of range.
    """

    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    bad_words: Sequence[Sequence[int]] = ()
    allowed_tokens: Collection[int] | None = None
    logprobs: int | None = None
    logprobs_of: Literal["raw", "processed"] = "raw"
    processors: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        self._check_choice()
        # tensors of integers would cut fractions
        if self.seed is not None and not -(2**63) <= whole_number("seed", self.seed) < 2**63:
            raise ValueError(f"seed must fit into 64 bits, got {self.seed}")
        if self.logprobs is not None:
            whole_number("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        one_of("logprobs_of", self.logprobs_of, "raw", "processed")
        self._check_penalties()
        self._keep_lists()

    def _check_choice(self) -> None:
        for name in ("top_p", "min_p"):
            number(name, getattr(self, name))
        if not -1 <= whole_number("top_k", self.top_k) < 2**31:
            raise ValueError(f"top_k must be 0 or -1 (off) or more, below 2**31, got {self.top_k}")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be 0 (off) to 1, got {self.min_p}")
        if self.temperature is None:
            self._be_greedy()
        if not 0 <= number("temperature", self.temperature) < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")

    def _be_greedy(self) -> None:
        """Decode greedily, unless what is asked for means nothing then."""
        drawn = {"top_k": self.top_k != 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        if asked := [f"{name}={getattr(self, name)}" for name, given in drawn.items() if given]:
            raise ValueError(
                f"temperature must be a number beside {' and '.join(asked)}, 0 is greedy, got None"
            )
        object.__setattr__(self, "temperature", 0.0)

    def _check_penalties(self) -> None:
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            number(name, getattr(self, name))
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be -2 to 2, got {getattr(self, name)}")

    def _keep_lists(self) -> None:
        if not isinstance(self.processors, Mapping | tuple):
            raise ValueError(f"processors must map names to parameters, got {self.processors!r}")
        object.__setattr__(self, "processors", tuple(dict(self.processors).items()))
        object.__setattr__(self, "logit_bias", tuple(self._biases().items()))
        words = tuple(
            _token_ids("bad_words", word) for word in _listed("bad_words", self.bad_words)
        )
        if len(words) > MAX_BAD_WORDS:
            raise ValueError(
                f"bad_words must be at most {MAX_BAD_WORDS} sequences, got {len(words)}"
            )
        if not all(1 <= len(word) <= MAX_BAD_WORD for word in words):
            raise ValueError(f"bad_words must have 1 to {MAX_BAD_WORD} tokens each, got {words}")
        object.__setattr__(self, "bad_words", words)
        if self.allowed_tokens is not None:
            allowed = frozenset(_token_ids("allowed_tokens", self.allowed_tokens))
            if not allowed:
                raise ValueError("allowed_tokens must be at least one token, got none")
            object.__setattr__(self, "allowed_tokens", allowed)

    def _biases(self) -> dict[int, float]:
        try:
            pairs = dict(self.logit_bias)
        except (TypeError, ValueError) as problem:
            raise ValueError(
                f"logit_bias must map tokens to numbers, got {self.logit_bias!r}"
            ) from problem
        bias = {
            whole_number("every token of logit_bias", token): number("every logit_bias", value)
            for token, value in pairs.items()
        }
        if len(bias) > MAX_BIAS:
            raise ValueError(f"logit_bias must have at most {MAX_BIAS} tokens, got {len(bias)}")
        if not all(isfinite(value) or value == -float("inf") for value in bias.values()):
            raise ValueError(f"every logit_bias must be finite or -inf, got {bias}")
        return bias

    @property
    def drawn(self) -> bool:
        """Whether tokens are drawn; otherwise decoding is greedy."""
        return bool(self.temperature)

    @property
    def lacks_seed(self) -> bool:
        """Whether tokens are drawn, and nothing names their random numbers."""
        return self.drawn and self.seed is None

    @property
    def penalised(self) -> bool:
        """Whether a penalty is on."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def processed(self) -> bool:
        """Whether steps of the request have to be processed ones."""
        lists = bool(self.logit_bias or self.bad_words) or self.allowed_tokens is not None
        lists = lists or bool(self.processors)
        return lists or self.penalised or self.min_p > 0 or self.logprobs is not None

    def check_tokens(self, vocab_size: int) -> None:
        """Raise a ValueError that names a field with tokens outside the vocabulary."""
        if not (self.logit_bias or self.bad_words or self.allowed_tokens):
            return
        named = {
            "logit_bias": dict(self.logit_bias),
            "bad_words": {token for word in self.bad_words for token in word},
            "allowed_tokens": self.allowed_tokens or (),
        }
        for name, tokens in named.items():
            if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
                raise ValueError(
                    f"tokens of {name} must be 0..{vocab_size - 1}, "
                    f"got {min(tokens)}..{max(tokens)}"
                )


def _listed(name: str, values: object) -> tuple[object, ...]:
    """Return what a sequence holds; a text is none."""
    if isinstance(values, Collection) and not isinstance(values, str | bytes | Mapping):
        return tuple(values)
    raise ValueError(f"{name} must be sequences of token ids, got {values!r}")


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    return tuple(whole_number(f"every token of {name}", one) for one in _listed(name, values))  # type: ignore[arg-type]  # whole_number refuses others


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of a batch as tensors.

    Parameters
    ----------
    greedy : bool
        Whether every request is greedy; known on the host, so that greedy batches compute no
        probabilities.
    temperature : Tensor
        ``[B]`` float32.
    top_k, top_p : Tensor or None
        ``[B]`` int32 and float32; None if no request of the batch uses it.
    seeds : Tensor
        ``[B]`` int64.
    min_p : Tensor or None
        ``[B]`` float32; None if no request of the batch uses it.
    """

    greedy: bool
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    seeds: Tensor
    min_p: Tensor | None = None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
        """Gather the parameters of the requests of a batch.

        Parameters
        ----------
        params : sequence of SamplingParams
            One per request. Those that draw have a seed; an engine gives one to those without.
        device : torch.device
            Where the tensors go.

        Raises
        ------
        ValueError
            If one draws and has no seed.
        """
        if any(p.lacks_seed for p in params):
            raise ValueError("seed must be given to parameters that draw, got None")

        def column(name: str, dtype: torch.dtype) -> Tensor:
            values = [getattr(p, name) or 0 for p in params]
            return send(torch.tensor(values, dtype=dtype), device)

        return cls(
            greedy=not any(p.drawn for p in params),
            temperature=column("temperature", torch.float32),
            top_k=column("top_k", torch.int32) if any(p.top_k for p in params) else None,
            top_p=column("top_p", torch.float32) if any(p.top_p < 1 for p in params) else None,
            seeds=column("seed", torch.int64),
            min_p=column("min_p", torch.float32) if any(p.min_p for p in params) else None,
        )
