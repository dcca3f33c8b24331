"""How SGLang's requests draw, and what of them is refused."""

from __future__ import annotations

from hashlib import blake2b
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from specattn.integrations.sglang.names import ALGORITHM
from specattn.speculative.sampling import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Iterable


def seed_of(req: Any, base: int) -> int:
    """Return a request's own seed, or one that ranks derive alike.

    Parameters
    ----------
    req : Req
        SGLang's request.
    base : int
        The engine's seed.
    """
    seed = req.sampling_params.sampling_seed
    if seed is None:
        digest = blake2b(f"{base} {req.rid}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big")
    return (int(seed) + 2**63) % 2**64 - 2**63


def sampling_of(batch: Any, vocab_size: int, base: int) -> SamplingBatch:
    """Return how the requests of a prompt batch draw.

    SGLang spells greedy as a ``top_k`` of 1, and all tokens as a very large one.
    """
    info, device = batch.sampling_info, batch.sampling_info.top_ks.device
    top_k = info.top_ks.to(torch.int32)
    seeds = torch.tensor([seed_of(req, base) for req in batch.reqs], dtype=torch.int64)
    return SamplingBatch(
        info.is_all_greedy,
        torch.where(top_k == 1, 0.0, info.temperatures.flatten().float()),
        torch.where(top_k >= vocab_size, 0, top_k),
        info.top_ps.float(),
        seeds.to(device, non_blocking=True),
    )


def asked(req: Any) -> list[str]:
    """Say what of a request steps do not do."""
    params = req.sampling_params
    if params.max_new_tokens is not None and params.max_new_tokens <= 1:
        # its prompt gives the only token
        return []
    penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
    tests = {
        "logprobs": req.return_logprob,
        "hidden states": req.return_hidden_states,
        "a grammar": req.grammar is not None,
        "min_p": params.min_p > 0,
        "penalties": penalties != (0, 0, 1),
        "logit_bias": bool(params.logit_bias),
        "min_new_tokens": params.min_new_tokens > 0,
    }
    return [name for name, wanted in tests.items() if wanted]


def refuse(reqs: Iterable[Any]) -> None:
    """End requests that ask for what steps do not do.

    SGLang answers them with HTTP status 400 once their prompt has run.
    """
    for req in reqs:
        if found := asked(req):
            reason = f"{ALGORITHM} does not serve {', '.join(found)}"
            req.to_finish = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")


def shorten(reqs: Iterable[Any], longest: int) -> None:
    """Let requests end before a step has no room for them.

    Parameters
    ----------
    reqs : iterable of Req
        SGLang's requests.
    longest : int
        Tokens of prompt and answer that leave room for a step.
    """
    for req in reqs:
        params, room = req.sampling_params, max(1, longest - len(req.origin_input_ids))
        if params.max_new_tokens is None or params.max_new_tokens > room:
            params.max_new_tokens = room
