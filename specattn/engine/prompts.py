"""Prompts of admitted requests: their KV, their states and their first tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.buffers import send, send_parts
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.prompts.runner import NewPrompt
from specattn.speculative.sampling.grammar import bitmask_of, open_bitmask
from specattn.speculative.sampling.params import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.engine.request import RunningRequest
    from specattn.speculative.prompts.prefill import Prefill
    from specattn.speculative.prompts.runner import PromptRunner, PromptWave
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
    _admit(admitted, processors)
    vocab = prefill.target.model.vocab_size
    out = prefill.run(prompts, sampling, processors, _bitmask(admitted, vocab, device))
    rows, lens = send_parts(
        ([one.row for one in prompts], [len(one.tokens) for one in prompts]), device
    )
    states.admit(rows, lens.to(torch.int32), out.bonus_tokens, out.state, sampling)
    firsts, scored = out.bonus_tokens.tolist(), None
    if out.logprobs is not None and any(one.logprobs is not None for one in params):
        scored = out.logprobs.entry(0, len(admitted))
    return firsts, scored


def begin_prompts(
    runner: PromptRunner, admitted: Sequence[RunningRequest], processors: ProcessorStates | None
) -> PromptWave:
    """Return prompts to be launched, of which processors have been told."""
    _admit(admitted, processors)
    vocab = runner.setup.target.model.vocab_size
    return runner.begin(
        [
            NewPrompt(
                Prompt(one.row, one.request.prompt, one.length),
                one.request.sampling,
                one.level,
                None if one.grammar is None else _first_mask(one, vocab),
            )
            for one in admitted
        ]
    )


def _admit(admitted: Sequence[RunningRequest], processors: ProcessorStates | None) -> None:
    """Tell processors what requests ask of their logits."""
    if processors is None:
        return
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


def _first_mask(one: RunningRequest, vocab: int) -> Tensor:
    """Return which first tokens a grammar allows, ``[ceil(V / 32)]``."""
    assert one.grammar is not None
    return bitmask_of(one.grammar, one.request.prompt[-1:], [-1], vocab, pin=False)[0]


def _bitmask(admitted: Sequence[RunningRequest], vocab: int, device: torch.device) -> Tensor | None:
    """Return which first tokens grammars allow, ``[B, 1, ceil(V / 32)]``."""
    if all(one.grammar is None for one in admitted):
        return None
    masks = open_bitmask(len(admitted), 1, vocab=vocab)
    for at, one in enumerate(admitted):
        if one.grammar is not None:
            masks[at, 0] = _first_mask(one, vocab)
    return send(masks, device)
