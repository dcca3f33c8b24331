"""R51: sglang#26866, sglang#26981, sglang#26997.

``accept_index`` was read as ``num_draft_tokens`` wide where it has ``num_steps + 1`` entries, the
bonus token was looked up with the wrong stride, and the tree path did not move KV at all.

Trees here have other sizes than their paths, and greedy decoding gives one text: without drafts,
with chains, with trees of topk 4.
"""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

PROMPTS = [[3, 14, 15, 9], [35], list(range(1, 20))]
TREES = [(0, 1, 1), (3, 1, 4), (3, 4, 8), (5, 4, 4), (2, 4, 16)]


@pytest.fixture(scope="module")
def wanted():
    return [dense_greedy(TinyTarget(device=DEVICE, window=9), prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_setting_writes_the_same_tokens(backend, tree, wanted):
    steps, topk, nodes = tree
    assert topk == 1 or nodes != steps + 1
    target = TinyTarget(device=DEVICE, window=9)
    config = SpecConfig(*tree, 64, 3)
    run = Engine(target, TinyDraft(device=DEVICE), config, backend=backend, buckets=[3])
    out = run.generate([Request(prompt, 24) for prompt in PROMPTS])
    assert [result.tokens for result in out] == wanted
    if steps > 1:
        assert max(max(result.accept_lens) for result in out) > 2, "no path was ever moved"
    assert all(1 <= n <= steps + 1 for result in out for n in result.accept_lens)
