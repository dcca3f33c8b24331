"""R31: vllm#39775, vllm#32591.

Metadata builders took the target's number of heads, and its tokens per request, for a draft model
that has others.

A model comes with the geometry of its own layers, and its attention, pool and plans are made from
that: a draft with other heads, widths and layers drafts, and the output is the target's.
"""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

PROMPTS = [[3, 14, 15, 9], [35]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_of_other_heads_drafts(backend):
    target = TinyTarget(device=DEVICE, heads=(4, 2), head_dim=64)
    draft = TinyDraft(device=DEVICE, heads=(3, 3), head_dim=32)
    run = Engine(target, draft, SpecConfig(2, 2, 4, 64, 2), backend=backend, buckets=[2])
    assert run.target.pool.k.shape[2:] == (2, 64)
    assert run.draft.pool.k.shape[2:] == (3, 32)
    assert [layer.backend.config for layer in run.draft.backend.layers] == list(draft.layers)
    for result, prompt in zip(
        run.generate([Request(p, 16) for p in PROMPTS]), PROMPTS, strict=True
    ):
        assert result.tokens == dense_greedy(target, prompt, 16)
        assert max(result.accept_lens) > 1, "nothing was ever accepted"
