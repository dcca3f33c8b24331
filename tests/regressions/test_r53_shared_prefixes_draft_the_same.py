"""R53: sglang#10846.

A radix cache keyed EAGLE's KV by tokens, but the draft's KV at a position depends on the *next*
token too: at a page boundary a hit was one token too long, and acceptance fell.

The last common token is not shared. Texts that part exactly at, before or after a page boundary
draft and decode as from a cold start.
"""

from __future__ import annotations

import pytest
import torch

from specattn.engine.engine import Engine, Request
from tests.engines import engine as tiny_engine
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE

PAGE = 4
TEXT = [7 * i % 61 for i in range(4 * PAGE)]


def engine(backend: str, models) -> Engine:
    options = {"models": models, "backend": backend, "buckets": [2]}
    return tiny_engine((3, 4, 8), rows=2, page_size=PAGE, **options)


def states(run: Engine, at: int) -> list[torch.Tensor]:
    """What request ``at`` drafts from: its first proposal and its draft KV."""
    live = run.running[at]
    slots = run.table.req_to_token[live.row, : live.length].long()
    first = [run.states.drafting[name][live.row] for name in ("topk_probs", "hidden_states")]
    return [*first, run.draft.pool.k[:, slots], run.draft.pool.v[:, slots]]


@pytest.mark.parametrize("common", [2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 4 * PAGE])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_at_a_page_boundary_is_a_cold_run(backend, common):
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    prompt = [*TEXT[:common], 60, 2] if common < len(TEXT) else TEXT[:common]
    run, cold = engine(backend, models), engine(backend, models)
    (_, hit) = run.add([Request(TEXT, 20), Request(prompt, 20)])
    (alone,) = cold.add([Request(prompt, 20)])
    shared = [len(set(run.table.req_to_token[live.row, :common].tolist())) for live in run.running]
    assert shared == [common, common]
    rows = run.table.req_to_token[[live.row for live in run.running], :common]
    assert int((rows[0] == rows[1]).sum()) == (common - 1) // PAGE * PAGE
    for ours, scratch in zip(states(run, 1), states(cold, 0), strict=True):
        torch.testing.assert_close(ours, scratch, rtol=1e-4, atol=1e-5)
    while run.num_running:
        run.step()
    while cold.num_running:
        cold.step()
    assert hit.tokens == alone.tokens
    assert hit.accept_lens == alone.accept_lens
