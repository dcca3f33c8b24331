"""R64: Blaizzy/mlx-vlm#2029.

The sampler of seeded requests knew no top-k: where both were asked for, tokens outside of it came,
or the seed did not repeat them.

A seed is part of every draw and changes nothing else: with any of top-k, top-p and min-p, under
drawn drafts and trees, every token lies in what they keep at its place, and the seed repeats it.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.processors import drawn_from
from tests.tiny import DenseAttend, TinyDraft, TinyTarget
from tests.worlds import DEVICE

PROMPT, NEW = [3, 14, 15, 9], 12
CONFIGS = {
    "plain": SpecConfig(0, 1, 1, 32, 16),
    "drawn chain": SpecConfig(3, 1, 4, 32, 16, draft_sampling=True),
    "chain": SpecConfig(3, 1, 4, 32, 16),
    "tree": SpecConfig(3, 3, 9, 32, 16),
}
# of a distribution so flat that uncut draws would leave it at once
PARAMS = [
    SamplingParams(4.0, top_k, top_p, seed, min_p)
    for seed, top_k, top_p, min_p in product((0, 5), (0, 3), (1.0, 0.5), (0.0, 0.6))
]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_token_is_one_that_is_kept(name):
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    run = Engine(*models, CONFIGS[name], buckets=[1, 16])
    requests = [Request(PROMPT, NEW, params) for params in PARAMS]
    outs, outside = run.generate(requests), 0
    for params, out in zip(PARAMS, outs, strict=True):
        ids = torch.tensor([*PROMPT, *out.tokens], device=DEVICE)
        positions = torch.arange(len(ids), device=DEVICE)
        rows = models[0](ids, positions, DenseAttend(models[0].layers)).logits[3:-1]
        for token, scores in zip(out.tokens, rows.double().tolist(), strict=True):
            probs = drawn_from(scores, params)
            assert probs[token] > 0
            outside += sorted(scores)[-3] > scores[token]
    assert outside > 20, "what is not cut draws from all"
    again = run.generate([requests[3]])[0], run.generate([requests[-1]])[0]
    assert [out.tokens for out in again] == [outs[3].tokens, outs[-1].tokens]
