"""R32: vllm#16087, vllm#48894, sglang#3574, sglang#6783.

Near the context limit drafts got positions beyond the model's last one, or slots beyond the
request's row.

A step that does not fit is made smaller, down to plain decoding: no position reaches the limit,
and a request ends with its context full to the last slot.
"""

from __future__ import annotations

import pytest

from specattn.attention.layers import BoundLayers
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.books import check_books
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

LIMIT = 24


@pytest.mark.parametrize("tree", [(4, 1, 5), (4, 3, 9)], ids=["chain", "topk3"])
@pytest.mark.parametrize("length", [LIMIT - 9, LIMIT - 4, LIMIT - 1, LIMIT])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_position_reaches_the_limit(backend, length, tree):
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    furthest = []
    for model in (target, draft):

        def spy(*args, forward=model.forward, **named):
            # positions come right before the attention
            at = next(i for i, arg in enumerate(args) if isinstance(arg, BoundLayers)) - 1
            furthest.append(int(args[at].max()))
            return forward(*args, **named)

        model.forward = spy
    run = Engine(
        target, draft, SpecConfig(*tree, LIMIT, 1), backend=backend, graphs=False, buckets=[1]
    )
    prompt = [5 * i % 61 for i in range(length)]
    (out,) = run.generate([Request(prompt, 99)])
    assert max(furthest) == LIMIT - 1
    assert out.finish_reason == "context"
    assert len(prompt) + len(out.tokens) in (LIMIT, LIMIT + 1)
    fresh = TinyTarget(device=DEVICE)
    assert out.tokens == dense_greedy(fresh, prompt, len(out.tokens))
    check_books(run.table)
