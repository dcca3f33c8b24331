"""Prompts of admitted requests: their KV, their states and their first tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.sampling.grammar import open_bitmask
from specattn.speculative.sampling.params import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.engine.request import RunningRequest
    from specattn.speculative.prompts.prefill import Prefill
    from specattn.speculative.sampling.processors import ProcessorStates
    from specattn.speculative.states import RequestStates
    from specattn.speculative.step.host_buffers import LogprobBuffers


def run_prompts(
    prefill: Prefill,
    states: RequestStates,
    admitted: Sequence[RunningRequest],
    processors: ProcessorStates | None,
) -> tuple[list[int], LogprobBuffers | None]:
    """Fill the KV of prompts, and note what later steps read.

    Returns
    -------
    tuple of list of int and LogprobBuffers or None
        First tokens, and a copy on the host of their log-probabilities, if anyone wants any.
    """
    device = states.seq_lens.device
    prompts = [Prompt(one.row, one.request.prompt, one.length) for one in admitted]
    params = [one.request.sampling for one in admitted]
    sampling = SamplingBatch.of(params, device)
    if processors is not None:
        for one in admitted:
            processors.admit(
                one.row,
                one.request.sampling,
                one.request.prompt,
                min_new_tokens=one.request.min_new_tokens,
                # a grammar puts the others off by itself, see `LateEnds`
                end_ids=one.end_ids if one.grammar is None else one.end_ids.difference(one.eos),
                bitmask=one.grammar is not None,
            )
    vocab = prefill.target.model.vocab_size
    out = prefill.run(prompts, sampling, processors, _bitmask(admitted, vocab, device))
    lens = torch.tensor([len(prompt.tokens) for prompt in prompts], dtype=torch.int32)
    rows = torch.tensor([prompt.row for prompt in prompts])
    states.admit(rows.to(device), lens.to(device), out.bonus_tokens, out.state, sampling)
    firsts, scored = out.bonus_tokens.tolist(), None
    if out.logprobs is not None and any(one.logprobs is not None for one in params):
        scored = out.logprobs.entry(0, len(admitted))
    return firsts, scored


def _bitmask(admitted: Sequence[RunningRequest], vocab: int, device: torch.device) -> Tensor | None:
    """Return which first tokens grammars allow, ``[B, 1, ceil(V / 32)]``."""
    if all(one.grammar is None for one in admitted):
        return None
    masks = open_bitmask(len(admitted), 1, vocab=vocab)
    for at, one in enumerate(admitted):
        if one.grammar is not None:
            one.grammar.fill(one.request.prompt[-1:], [-1], masks[at])
    return masks.to(device)
