"""Drafts over a part of the target's vocabulary, in an order of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.engine.engine import Engine
from specattn.models import load_draft
from specattn.speculative.proposers.draft import choose_tokens
from specattn.speculative.sampling.params import SamplingBatch
from specattn.speculative.step.verify import over_target_vocabulary
from tests.distributions import p_value
from tests.models.heads import VD, V, eagle3_tensors, write
from tests.speculative import three_tokens
from tests.tiny import VOCAB, TinyDraft

if TYPE_CHECKING:
    from specattn.speculative.model import DraftOutput

KEPT = 40


class MappedDraft(TinyDraft):
    """`TinyDraft` over ``KEPT`` of its tokens, shuffled."""

    vocab_size = KEPT

    def __init__(self, **options) -> None:
        super().__init__(**options)
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
        self.target_ids = order[:KEPT].to(self.table.device)

    def forward(self, *args, **named) -> DraftOutput:
        out = super().forward(*args, **named)
        return replace(out, logits=out.logits[:, self.target_ids])

    def to_target(self, token_ids):
        return self.target_ids[token_ids]


@pytest.mark.parametrize("name", ["chain", "rejection"])
def test_texts_follow_the_targets_probabilities(name) -> None:
    target, _ = three_tokens.make_models()
    draft = MappedDraft(device=three_tokens.DEVICE, sharp=6.0)
    probs = three_tokens.distribution(target, three_tokens.PROMPT)
    # the target's likeliest tokens are in part ones that the draft has
    assert len({path[0] for path in probs} & set(draft.target_ids.tolist())) in (1, 2)
    engine = Engine(target, draft, three_tokens.SETTINGS[name], buckets=[250])
    results = engine.generate(three_tokens.requests())
    assert p_value([tuple(result.tokens) for result in results], probs) > 1e-3
    assert max(n for result in results for n in result.accept_lens) > 1


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_tokens_that_the_target_has_not_are_refused(token) -> None:
    target, _ = three_tokens.make_models()
    draft = MappedDraft(device=three_tokens.DEVICE)
    draft.target_ids[7] = token
    with pytest.raises(ValueError, match=rf"must map to the target's tokens 0\.\.60, got {token}"):
        Engine(target, draft, three_tokens.SETTINGS["chain"], graphs=False)


def test_a_head_draws_by_probabilities_over_the_targets_tokens(target, tmp_path) -> None:
    tensors = eagle3_tensors()
    draft = load_draft(write(tmp_path, tensors), target)
    kept = tensors["t2d"].nonzero()[:, 0]
    assert not torch.equal(kept, torch.arange(VD))
    logits, temperature = torch.randn(64, VD), torch.linspace(0.5, 2, 64)
    draws = SamplingBatch(False, temperature, None, None, seeds=torch.arange(64))
    own, tokens, dense = choose_tokens(draft, logits, 1, draws, torch.arange(64))
    probs = over_target_vocabulary(draft, dense, V)
    want = torch.zeros(64, V, dtype=torch.float64)
    want[:, kept] = (logits.double() / temperature[:, None]).softmax(-1)
    torch.testing.assert_close(probs.double(), want)
    assert torch.equal(probs.gather(1, tokens), own)
    assert set(tokens.flatten().tolist()) <= set(kept.tolist())
    assert len(tokens.unique()) > 20
