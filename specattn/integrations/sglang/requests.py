"""How SGLang's requests draw, and what of them is refused."""

from __future__ import annotations

from hashlib import blake2b
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from specattn.integrations.sglang.names import ALGORITHM
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.sampling.processors import MAX_END_IDS

if TYPE_CHECKING:
    from collections.abc import Iterable

#: SGLang's ``top_k`` of requests that keep all tokens.
ALL_TOKENS = 1 << 30
#: 0 leaves out steps that process logits; requests that need them are refused then.
PROCESSED_VARIABLE = "SPECATTN_SGLANG_PROCESSED"


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
        info.min_ps.float() if info.need_min_p_sampling else None,
    )


def is_processed(req: Any) -> bool:
    """Return whether steps must process a request's logits, or score its tokens."""
    params = req.sampling_params
    penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
    return bool(
        req.return_logprob
        or req.grammar is not None
        or params.min_p > 0
        or params.logit_bias
        or params.min_new_tokens > 0
        or penalties != (0, 0, 1)
    )


def params_of(req: Any) -> SamplingParams:
    """Return what a request asks of its logits.

    Its log-probabilities are those of the law that its tokens are drawn from, or, where SGLang is
    told so (``SGLANG_RETURN_ORIGINAL_LOGPROB``), of the target's own.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    from sglang.srt.environ import envs

    params = req.sampling_params
    return SamplingParams(
        temperature=0.0 if params.top_k == 1 else params.temperature,
        top_k=0 if params.top_k >= ALL_TOKENS else params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias={int(token): value for token, value in (params.logit_bias or {}).items()},
        logprobs=req.logprob.top_logprobs_num if req.return_logprob else None,
        logprobs_of="raw" if envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get() else "processed",
    )


def end_ids(req: Any) -> set[int]:
    """Return the tokens that a request may end with."""
    found = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        found |= set(req.tokenizer.additional_stop_token_ids or ())
        found.add(req.tokenizer.eos_token_id)
    return found


def asked(req: Any, *, processed: bool) -> list[str]:
    """Say what of a request steps do not do.

    Parameters
    ----------
    req : Req
        SGLang's request.
    processed : bool
        Whether there are steps that process logits.
    """
    params, found = req.sampling_params, []
    if req.return_hidden_states:
        found.append("hidden states")
    if not is_processed(req):
        return found
    if not processed:
        what = "penalties, min_p, biases, min_new_tokens, grammars and log-probabilities"
        return [*found, f"{what} with {PROCESSED_VARIABLE}=0"]
    if req.return_logprob and req.logprob.token_ids_logprob is not None:
        found.append("log-probabilities of named tokens")
    if params.min_new_tokens > 0 and len(end_ids(req)) > MAX_END_IDS:
        found.append(f"min_new_tokens with more than {MAX_END_IDS} tokens that end a text")
    try:
        params_of(req)
    except ValueError as error:
        found.append(str(error))
    return found


def refuse(reqs: Iterable[Any], *, processed: bool, grammars: bool = True) -> None:
    """End requests that ask for what steps do not do.

    Without ``grammars`` they may have none: SGLang takes what follows a grammar's end off a text,
    and would keep the state behind it as the text's.

    SGLang answers them with HTTP status 400 once their prompt has run. Where that gives the only
    token, there is no step, and nothing is refused.
    """
    for req in reqs:
        most, found = req.sampling_params.max_new_tokens, asked(req, processed=processed)
        if req.grammar is not None and not grammars:
            found.append("grammars over states of mamba_radix_cache_strategy no_buffer")
        if found and (most is None or most > 1):
            reason = f"{ALGORITHM} does not serve {', '.join(found)}"
            req.to_finish = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")


def their_first(reqs: Iterable[Any], *, processed: bool) -> list[int]:
    """Return the places of requests whose first token SGLang's sampler chooses.

    It scores that token or masks it, or it processes logits as steps do not.
    """
    return [
        at
        for at, req in enumerate(reqs)
        if req.return_logprob
        or req.grammar is not None
        or (is_processed(req) and asked(req, processed=processed))
    ]


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
