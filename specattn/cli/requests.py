"""Requests that options describe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specattn.cli.errors import ArgumentError, naming_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.cli.loading import Models
    from specattn.engine.request import Request

BIAS = "--logit-bias"


def forbid(request: Request, words: Sequence[str], models: Models) -> Request:
    """Return a request whose text has none of the words.

    A word is spelled in two ways, as at a text's beginning and after a space.
    """
    listed = [
        tuple(models.tokenizer(spelling, add_special_tokens=False).input_ids)
        for word in words
        for spelling in (word, f" {word}")
    ]
    with naming_options():
        sampling = replace(request.sampling, bad_words=tuple(dict.fromkeys(listed)))
        sampling.check_tokens(models.target.vocab_size)
    return replace(request, sampling=sampling)


def requests_for(
    prompts: Sequence[Sequence[int]], request: Request, *, samples: int
) -> tuple[Request, ...]:
    """Return the requests of every prompt; seeds count up, within 64 bits."""
    texts = [ids for ids in prompts for _ in range(samples)]
    seed = request.sampling.seed or 0
    return tuple(
        replace(request, prompt=ids).seeded((seed + index + 2**63) % 2**64 - 2**63)
        for index, ids in enumerate(texts)
    )


def biases(pairs: Sequence[str] | None) -> dict[int, float]:
    """Return the biases of tokens, each of which reads TOKEN=VALUE."""
    found: dict[int, float] = {}
    for pair in pairs or ():
        token, _, value = pair.partition("=")
        try:
            index, bias = int(token), float(value)
        except ValueError as error:
            expected = "must be TOKEN=VALUE, the id of a token and a number"
            raise ArgumentError(BIAS, f"{expected}, got {pair!r}") from error
        if index in found:
            raise ArgumentError(BIAS, f"must name every token once, got {index} twice")
        found[index] = bias
    return found
