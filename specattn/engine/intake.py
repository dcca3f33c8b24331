"""Requests on their way into an engine: checked, with tokens and seeds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch

from specattn.checks import listed
from specattn.engine.ranks import agree, decide
from specattn.engine.request import Request
from specattn.speculative.sampling.grammar import LateEnds
from specattn.speculative.sampling.logits_processor import check_names
from specattn.speculative.sampling.processors import MAX_END_IDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from specattn.engine.engine import Engine


def take(requests: Iterable[Request | str], engine: Engine) -> list[Request]:
    """Return requests that an engine can run, with tokens and seeds.

    Raises
    ------
    ValueError
        If there is something else than a `Request` or a text among them, or one stands by itself;
        if a prompt is a text, and nothing makes tokens of it; if it is empty, longer than the
        context or has tokens outside the vocabulary; if stop tokens or tokens of ``sampling`` lie
        outside it, or there are too many to end a request with ``min_new_tokens``; if
        ``max_new_tokens`` is below 1; if one has stop strings, and there is no text, or asks for an
        unknown processor.
    RankError
        If ranks are given different ones.
    """
    if isinstance(requests, Request | str):
        raise ValueError(f"requests must be a sequence of Request, got the one {requests!r}")
    taken = [_encoded(one, engine.encode) for one in listed("requests", requests, "Request")]
    for request in taken:
        _check(request, engine)
    taken = [_late(one, engine) for one in taken]
    running = [one.result.tokens for one in engine.running]
    agree(engine.ranks, "requests, their seeds included,", (taken, running))
    if not any(one.sampling.lacks_seed for one in taken):
        return taken
    seeds = count(decide(engine.ranks, fresh_seed))
    return [one.seeded(next(seeds)) if one.sampling.lacks_seed else one for one in taken]


def _encoded(request: Request | str, encode: Callable[[str], list[int]] | None) -> Request:
    """Return a request whose prompt has tokens."""
    if isinstance(request, str):
        request = Request(request)
    if not isinstance(request, Request):
        raise ValueError(f"requests must be a sequence of Request, got {request!r} in it")
    if not isinstance(request.prompt, str):
        return request
    if encode is None:
        raise ValueError(
            f"prompt must be token ids in an engine without a tokenizer, got {request.prompt!r}"
        )
    return replace(request, prompt=encode(request.prompt))


def _check(request: Request, engine: Engine) -> None:
    target, limit = engine.target.model, engine.config.max_context_len
    if not request.prompt:
        raise ValueError("the prompt is empty")
    if len(request.prompt) > limit:
        raise ValueError(f"the prompt has {len(request.prompt)} tokens, the context holds {limit}")
    most, ends = target.vocab_size, request.stop_token_ids
    for name, ids in (("prompt", request.prompt), *([("stop", ends)] if ends else [])):
        low, high = min(ids), max(ids)
        if low < 0 or high >= most:
            raise ValueError(f"{name} tokens must be 0..{most - 1}, got {low}..{high}")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    request.sampling.check_tokens(most)
    if request.stop and engine.detokenize is None:
        raise ValueError("stop strings need detokenize")
    own = frozenset() if request.ignore_eos else engine.eos_token_ids
    if request.min_new_tokens and (size := len(own.union(ends))) > MAX_END_IDS:
        raise ValueError(
            f"tokens that end a request with min_new_tokens must be at most {MAX_END_IDS}, "
            f"got {size}"
        )
    if asked := request.sampling.processors:
        check_names(dict(asked), engine.processors)


def _late(request: Request, engine: Engine) -> Request:
    """Return a request whose grammar puts its ends off if need be."""
    if request.grammar is None or request.ignore_eos or not request.min_new_tokens:
        return request
    ends, vocab = engine.eos_token_ids, engine.target.model.vocab_size
    make = partial(LateEnds, request.grammar, ends, request.min_new_tokens, vocab)
    return replace(request, grammar=make)


def fresh_seed() -> int:
    """Draw a seed that others can follow; ``torch.manual_seed`` repeats it."""
    return int(torch.randint(2**62, (), device="cpu"))
