"""Offsets of positions: the same as models that shift whatever comes after the prompts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from specattn import (
    SamplingBatch,
    SamplingParams,
    SpecConfig,
    StepDecoder,
    StepSetup,
)
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.proposers.drafts import draft_of
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.proposers.standalone import LMDraft
from specattn.speculative.step.level import Level
from specattn.speculative.step.verify import accept
from tests.samples import half, sampled
from tests.tiny import VOCAB, DenseAttend, TinyBlockDraft, TinyDraft, TinyTarget
from tests.worlds import DEVICE

PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [35, 2, 8, 9, 7, 9], [32, 38, 4, 1, 9, 9, 4, 1, 9, 9]]
CONFIG = SpecConfig(3, 4, 9, max_context_len=96, max_num_reqs=3)
CHAIN = SpecConfig(3, 1, 4, max_context_len=96, max_num_reqs=3)
BEST = SpecConfig(3, 1, 6, max_context_len=96, max_num_reqs=3, tree="best_first", ranks=3)
# drafts that hear more of attention than of bigrams
EAGLE = partial(TinyDraft, noise=2.0, sharp=0.5)
SETTINGS = {
    "plain": (SpecConfig(0, 1, 1, max_context_len=96, max_num_reqs=3), None),
    "eagle": (CONFIG, EAGLE),
    "eagle chain": (BEST, EAGLE),
    "eagle drawn": (replace(CHAIN, draft_sampling=True), EAGLE),
    "block": (CHAIN, partial(TinyBlockDraft, noise=2.0, sharp=0.5)),
    "model": (CONFIG, lambda device: LMDraft(TinyTarget(device=device, sharp=0.5, seed=4), VOCAB)),
    "lookup first": (
        CONFIG,
        lambda device: LookupFirst(LookupProposer(), EAGLE(device=device)),
    ),
}
DRAWN = [SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(0.8, seed=3)]


class Loop:
    """Prompts that have run, and a decoder over their states."""

    def __init__(self, setting, offsets=None, sampling=None, **options) -> None:
        config, draft = SETTINGS[setting]
        self.target = TinyTarget(device=DEVICE, window=12, sharp=0.5)
        made = draft(device=DEVICE) if draft is not None else None
        self.models = [self.target]
        self.config = config = config.reserving(draft_of(made).draft_len(config))
        self.trees = []

        def watched(tree, *rest):
            self.trees[:] = [tree]  # static buffers
            return accept(tree, *rest)

        options |= {"backend": "torch_native", "accept": watched}
        setup = StepSetup.over(
            self.target, made, config, position_offsets=offsets is not None, **options
        )
        for slot in setup.slots[1:]:
            self.models.append(getattr(slot.model, "model", slot.model))
        self.states = states = setup.states
        self.rows = [setup.table.allocate() for _ in PROMPTS]
        setup.table.reserve(self.rows, [96] * 3)
        drawing = SamplingBatch.of(sampling or [SamplingParams()] * 3, DEVICE)
        self.decoder = StepDecoder.of(setup, buckets=(3,), levels=[Level.SAMPLED])
        first = Prefill.of(setup).run([*map(Prompt, self.rows, PROMPTS)], drawing)
        lens = torch.tensor([*map(len, PROMPTS)], dtype=torch.int32, device=DEVICE)
        if offsets is not None:
            offsets = torch.tensor(offsets, device=DEVICE)
        where = torch.tensor(self.rows, device=DEVICE)
        states.admit(where, lens, first.bonus_tokens, first.state, drawing, offsets)
        self.tokens = [[token] for token in first.bonus_tokens.tolist()]

    def step(self, sampled: bool) -> list[list[int]]:
        gained = self.decoder.step(self.rows, sampled=sampled)
        for text, new in zip(self.tokens, gained, strict=True):
            text += new
        return gained


def shifted(monkeypatch, model, by: int) -> None:
    """Let a model rotate by its positions and an offset."""
    names = [n for n in ("forward", "forward_block", "write_context") if hasattr(model, n)]
    for name in names:
        call = getattr(model, name)
        if name == "forward" and isinstance(model, TinyDraft):

            def moved(ids, hidden, positions, *rest, call=call, **more):
                return call(ids, hidden, positions + by, *rest, **more)
        else:

            def moved(ids, positions, *rest, call=call, **more):
                return call(ids, positions + by, *rest, **more)

        monkeypatch.setattr(model, name, moved)


def dense_from(target: TinyTarget, prompt: list[int], count: int, offset: int) -> list[int]:
    """Greedy decoding whose tokens after the prompt stand at place + offset."""
    attend, tokens, at, fed = DenseAttend(target.layers), [], 0, list(prompt)
    while len(tokens) < count:
        places = torch.arange(at, at + len(fed), device=DEVICE) + (offset if tokens else 0)
        logits = target(torch.tensor(fed, device=DEVICE), places, attend).logits
        at += len(fed)
        fed = [int(logits[-1].argmax())]
        tokens += fed
    return tokens


@sampled(half, setting=SETTINGS.keys(), cudagraph=["full", "piecewise"])
def test_each_request_decodes_at_its_own_offset(setting, cudagraph):
    offsets = [17, 0, -9]
    loop = Loop(setting, offsets, cudagraph=cudagraph)
    while min(map(len, loop.tokens)) < 24:
        loop.step(sampled=False)
    plain = Loop(setting)
    for prompt, text, offset in zip(PROMPTS, loop.tokens, offsets, strict=True):
        assert text == dense_from(plain.target, prompt, len(text), offset)
    # the offsets are of consequence
    for prompt, text in ((PROMPTS[0], loop.tokens[0]), (PROMPTS[2], loop.tokens[2])):
        assert text != dense_from(plain.target, prompt, len(text), 0)


@sampled(half, setting=SETTINGS.keys(), by=[7, -3])
def test_an_offset_is_that_of_models_which_shift_positions(monkeypatch, setting, by):
    """Drafts, too: what each step gains is equal, and so is what it leaves."""
    with_offset = Loop(setting, [by] * 3, DRAWN)
    models = Loop(setting, None, DRAWN)
    assert with_offset.tokens == models.tokens
    for model in models.models:
        shifted(monkeypatch, model, by)
    # graphs have recorded the models as they were
    if DEVICE.type == "cuda":
        models.decoder.capture(sampled=True)
        for part in models.decoder.modes:
            models.decoder.runner.capture(part)
        models.decoder._in_flight.align()
    for _ in range(6):
        assert with_offset.step(sampled=True) == models.step(sampled=True)
        (found,), (wanted,) = with_offset.trees, models.trees
        assert torch.equal(found.tokens, wanted.tokens)
        torch.testing.assert_close(found.draft_probs, wanted.draft_probs)
        for name, value in models.states.tensors().items():
            if name != "position_offsets":
                torch.testing.assert_close(with_offset.states.tensors()[name], value)


def test_offsets_are_kept_by_request_and_refused_where_they_are_not():
    loop = Loop("eagle", [5, 0, -4])
    assert loop.states.position_offsets[loop.rows].flatten().tolist() == [5, 0, -4]
    where = torch.tensor(loop.rows, device=DEVICE)
    lens = torch.tensor([4, 4, 4], dtype=torch.int32, device=DEVICE)
    greedy = SamplingBatch.of([SamplingParams()] * 3, DEVICE)
    loop.states.admit(where, lens, lens.long(), {}, greedy)
    assert not loop.states.position_offsets.any()
    with pytest.raises(ValueError, match=r"position_offsets must be \[3, 1\] torch.int64"):
        loop.states.admit(where, lens, lens.long(), {}, greedy, lens)
    none = Loop("eagle")
    with pytest.raises(ValueError, match="position_offsets need states that keep them"):
        none.states.admit(where, lens, lens.long(), {}, greedy, lens.long())


@pytest.mark.parametrize("offset", [-11, 90])
def test_an_offset_that_leaves_the_context_is_found_when_debugging(offset):
    loop = Loop("eagle", [0, 0, offset], cudagraph="piecewise", validate="debug")
    with pytest.raises(ValueError, match=r"seq_lens \+ position_offsets must be 0\.\.\d+, got"):
        loop.step(sampled=False)
