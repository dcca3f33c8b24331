"""Prompts of admitted requests: their KV, their states and their first tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from specattn.speculative.grammar import bitmask_of, open_bitmask
from specattn.speculative.prefill import Prompt
from specattn.speculative.sampling import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.engine.request import RunningRequest
    from specattn.engine.scheduler import Item, Scheduler
    from specattn.speculative.prefill import Prefill
    from specattn.speculative.processors import ProcessorStates
    from specattn.speculative.sampling import SamplingParams
    from specattn.speculative.states import RequestStates


class PromptRunner:
    """Runs prompts, and notes what later steps read.

    Parameters
    ----------
    prefill : Prefill
        What fills the prompts' KV.
    states : RequestStates
        Where the next step finds the requests.
    scheduler : Scheduler
        What the first tokens are appended to.
    """

    def __init__(self, prefill: Prefill, states: RequestStates, scheduler: Scheduler) -> None:
        self.prefill, self.states, self.scheduler = prefill, states, scheduler
        self._sampling: tuple[tuple[SamplingParams, ...], SamplingBatch] | None = None

    def run(self, items: Sequence[Item], processors: ProcessorStates | None, *, whole: bool) -> int:
        """Admit requests, run their prompts, and append their first tokens.

        Parameters
        ----------
        items : sequence of (Request, RequestOutput)
            The requests, and where their tokens go.
        processors : ProcessorStates or None
            Where what they ask of their logits is written.
        whole : bool
            As in `Scheduler.admit`.

        Returns
        -------
        int
            How many tokens of the prompts others had run.
        """
        shared, started_at = 0, time.perf_counter()
        for _, result in items:
            result.started_at = started_at
        while items:
            # prompts that run now, and those that wait to share them
            wave, items = self.scheduler.wave(items)
            admitted = self.scheduler.admit(wave, whole=whole)
            shared += sum(one.length for one in admitted)
            self._run(admitted, processors)
        return shared

    def _run(self, admitted: Sequence[RunningRequest], processors: ProcessorStates | None) -> None:
        device = self.states.seq_lens.device
        prompts = [Prompt(one.row, one.request.prompt, one.length) for one in admitted]
        params = tuple(one.request.sampling for one in admitted)
        # a batch that stays the same is not sent again
        if self._sampling is None or self._sampling[0] != params:
            self._sampling = params, SamplingBatch.of(params, device)
        sampling = self._sampling[1]
        if processors is not None:
            _admit(admitted, processors)
        out = self.prefill.run(prompts, sampling, processors, self._bitmask(admitted))
        lens = torch.tensor([len(prompt.tokens) for prompt in prompts], dtype=torch.int32)
        rows = torch.tensor([prompt.row for prompt in prompts])
        self.states.admit(rows.to(device), lens.to(device), out.bonus_tokens, out.state, sampling)
        firsts = out.bonus_tokens.tolist()
        scored = None
        if out.logprobs is not None and any(p.logprobs is not None for p in params):
            scored = out.logprobs.entry(0, len(admitted))
        for at, (one, token) in enumerate(zip(admitted, firsts, strict=True)):
            one.length = len(one.request.prompt)
            one.result.first_token_at = time.perf_counter()
            kept = self.scheduler.append(one, [token])
            count = one.request.sampling.logprobs
            if count is not None and scored is not None:
                one.result.logprobs += scored.read(at, len(kept), count)
        self.scheduler.remove_ended()

    def _bitmask(self, admitted: Sequence[RunningRequest]) -> Tensor | None:
        """Return which first tokens grammars allow, ``[B, 1, ceil(V / 32)]``."""
        if all(one.grammar is None for one in admitted):
            return None
        vocab = self.prefill.target.model.vocab_size
        masks = open_bitmask(len(admitted), 1, vocab=vocab)
        for at, one in enumerate(admitted):
            if one.grammar is not None:
                last = one.request.prompt[-1:]
                masks[at] = bitmask_of(one.grammar, last, [-1], vocab, pin=False)
        return masks.to(self.states.seq_lens.device)


def _admit(admitted: Sequence[RunningRequest], processors: ProcessorStates) -> None:
    """Write what requests ask of their logits."""
    for one in admitted:
        request = one.request
        processors.admit(
            one.row,
            request.sampling,
            request.prompt,
            min_new_tokens=request.min_new_tokens,
            end_ids=one.end_ids,
            bitmask=one.grammar is not None,
        )
