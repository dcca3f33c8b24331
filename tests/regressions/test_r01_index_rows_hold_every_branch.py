"""R01: sglang#27338, sglang#27460, sglang#26340.

A topk > 1 draft graph sized a row of ``kv_indices`` for one list per request; the kernel packed
``topk`` lists and wrote past the row, into whatever the graph pool held next.

One function sizes the rows, for eager and captured batches alike; a row that is too short is
refused before anything is written; the longest lists leave the cells after their row alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specattn.batch import ForwardMode
from specattn.kernels.indices import KeySlots, draft_kv_width, fill_draft_kv
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE
from tests.worlds import CONFIG, world

BATCH, TOPK, STEPS, CONTEXT, CANARY = 3, 2, 3, 16, -99


def longest(width: int) -> dict[str, Any]:
    """Every request at the context limit."""
    keys = (
        torch.arange((BATCH + 1) * CONTEXT, dtype=torch.int32).view(-1, CONTEXT),
        torch.arange(1, BATCH + 1),
        torch.full((BATCH,), CONTEXT, dtype=torch.int32),
        torch.ones(BATCH, STEPS, TOPK, dtype=torch.int32),
    )
    words = torch.tensor([[1 << s * TOPK + k for k in range(TOPK)] for s in range(STEPS)])
    tensors = {
        "words": words.expand(BATCH, -1, -1)[..., None].contiguous(),
        "kv_indptr": torch.zeros(STEPS, BATCH * TOPK + 1, dtype=torch.int32),
        "kv_indices": torch.full((STEPS, width), CANARY, dtype=torch.int32),
    }
    case = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    return {"keys": KeySlots(*(tensor.to(DEVICE) for tensor in keys)), **case}


@pytest.mark.parametrize("kind", ["naive", "triton"])
def test_the_longest_lists_stay_inside_their_row(kind):
    width = draft_kv_width(BATCH, TOPK, CONTEXT, STEPS)
    case = longest(width + 40)
    with using(kind):
        fill_draft_kv(**case)
    for step in range(STEPS):
        used = int(case["kv_indptr"][step, -1])
        assert used == BATCH * TOPK * (CONTEXT + step + 1) <= width
        assert (case["kv_indices"][step, :used] != CANARY).all()
        assert (case["kv_indices"][step, used:] == CANARY).all()


@pytest.mark.parametrize("kind", ["naive", "triton"])
def test_a_row_for_one_branch_per_request_is_refused_before_launch(kind):
    case = longest(BATCH * (CONTEXT + STEPS))
    with pytest.raises(ValueError, match="kv_indices must be"), using(kind):
        fill_draft_kv(**case)
    assert (case["kv_indices"] == CANARY).all()


def test_every_bucket_shares_the_one_width():
    shared = world("torch_native", [1, 8], indices="csr")
    steps = [shared.step(ForwardMode.DRAFT_DECODE, bucket).bound.multi_step for bucket in (1, 8)]
    width = draft_kv_width(8, CONFIG.topk, CONFIG.max_context_len, CONFIG.num_draft_forwards)
    assert [step.kv_indices.shape[1] for step in steps] == [width, width]
