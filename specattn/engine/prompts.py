"""Prompts of admitted requests: their KV, their states and their first tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from specattn.buffers import send, send_parts
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.prompts.runner import (
    FirstToken,
    KnownTokens,
    NewPrompt,
    Piece,
    PromptRunner,
    PromptWave,
)
from specattn.speculative.sampling.grammar import bitmask_of, open_bitmask
from specattn.speculative.sampling.params import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.cuda_graph import GraphReport
    from specattn.engine.request import RunningRequest
    from specattn.speculative.proposers.proposer import Proposer
    from specattn.speculative.sampling.processors import ProcessorStates
    from specattn.speculative.states import RequestStates
    from specattn.speculative.step.level import Level
    from specattn.speculative.step.setup import StepSetup


class Prompts(Protocol):
    """Runs the prompts of an engine, chunk by chunk.

    Attributes
    ----------
    waits : bool
        Whether `launch` waits for first tokens, and runs all that is left.
    chunk : int
        Most tokens of a chunk.
    """

    waits: bool
    chunk: int

    @property
    def proposer(self) -> Proposer:
        """The source of draft tokens."""

    def capture(
        self, *levels: Level, processors: ProcessorStates | None = None, or_eager: bool = False
    ) -> None:
        """Record what first tokens of these levels need."""

    def report(self) -> tuple[GraphReport, ...]:
        """Return what recording took."""

    def begin(self, prompts: Sequence[NewPrompt]) -> PromptWave:
        """Return prompts for `launch`, which `take` has checked."""

    def launch(self, wave: PromptWave) -> None:
        """Launch the next chunk of what is left."""

    def settle(self) -> None:
        """Wait for every chunk in flight."""


class WaitedPrompts:
    """Runs prompts with a `Prefill`, which needs the host between its forwards.

    Parameters
    ----------
    prefill : Prefill
        Runs both models.
    states : RequestStates
        What later steps read.
    """

    waits = True

    def __init__(self, prefill: Prefill, states: RequestStates) -> None:
        self._prefill, self._states = prefill, states
        self.chunk = prefill.chunk
        self._processors: ProcessorStates | None = None

    @property
    def proposer(self) -> Proposer:
        """The source of draft tokens."""
        return self._prefill.proposer

    def capture(
        self, *_: Level, processors: ProcessorStates | None = None, or_eager: bool = False
    ) -> None:
        """Note the processors: nothing is recorded."""
        self._processors = processors

    def report(self) -> tuple[GraphReport, ...]:
        """Return nothing, for nothing is recorded."""
        return ()

    def settle(self) -> None:
        """Do nothing: nothing is in flight."""

    def begin(self, prompts: Sequence[NewPrompt]) -> PromptWave:
        """Return the prompts; running them checks them."""
        pieces = (
            Piece(at, new.prompt.cached, len(new.prompt.tokens), 0)
            for at, new in enumerate(prompts)
        )
        return PromptWave(prompts, deque(pieces))

    def launch(self, wave: PromptWave) -> None:
        """Run all prompts, and wait for their first tokens."""
        states, news, prefill = self._states, wave.prompts, self._prefill
        device = states.seq_lens.device
        sampling = SamplingBatch.of([one.sampling for one in news], device)
        masks = _bitmask(news, prefill.target.model.vocab_size, device)
        prompts = [one.prompt for one in news]
        out = prefill.run(prompts, sampling, self._processors, masks)
        rows, lens = send_parts(
            ([one.row for one in prompts], [len(one.tokens) for one in prompts]), device
        )
        states.admit(rows, lens.to(torch.int32), out.bonus_tokens, out.state, sampling)
        firsts, scored = out.bonus_tokens.tolist(), None
        if out.logprobs is not None and any(one.sampling.logprobs is not None for one in news):
            scored = out.logprobs.entry(0, len(news))
        known = KnownTokens(firsts, scored)
        wave.left.clear()
        wave.firsts.update((at, FirstToken(known, at)) for at in range(len(news)))


def prompts_of(
    setup: StepSetup, chunk: int, buckets: Sequence[int] | None, *, resting: Proposer | None
) -> Prompts:
    """Return what runs a setup's prompts.

    It waits for them only where it has to. ``chunk``, ``buckets`` and ``resting`` are those of
    `PromptRunner.of`.
    """
    runner = PromptRunner.of(setup, buckets=buckets, chunk=chunk, resting=resting)
    if runner is not None:
        return runner
    return WaitedPrompts(replace(Prefill.of(setup), chunk=chunk), setup.states)


def begin_prompts(
    runner: Prompts,
    admitted: Sequence[RunningRequest],
    processors: ProcessorStates | None,
    vocab: int,
) -> PromptWave:
    """Return prompts to be launched, of which processors have been told.

    ``vocab`` is the target's ``vocab_size``.
    """
    _admit(admitted, processors)
    return runner.begin(
        [
            NewPrompt(
                Prompt(one.row, one.request.prompt, one.length),
                one.request.sampling,
                one.level,
                None if one.grammar is None else _first_mask(one, vocab),
                one.ready,
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


def _bitmask(news: Sequence[NewPrompt], vocab: int, device: torch.device) -> Tensor | None:
    """Return which first tokens grammars allow, ``[B, 1, ceil(V / 32)]``."""
    if all(one.bitmask is None for one in news):
        return None
    masks = open_bitmask(len(news), 1, vocab=vocab)
    for at, one in enumerate(news):
        if one.bitmask is not None:
            masks[at, 0] = one.bitmask
    return send(masks, device)
