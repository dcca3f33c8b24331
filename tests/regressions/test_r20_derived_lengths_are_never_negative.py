"""R20: sglang#31270, sglang#30378, vllm-ascend#13861.

Padded rows had a length of 1, and widths were subtracted from it: a width of 4 gave the positions
-2, -1, 0, 1.

A padded row has an empty prefix and lengths are only added to: nothing derived from it is
negative, for any width.
"""

from __future__ import annotations

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.batch import ForwardMode
from specattn.cache.kv_pool import KVPool
from specattn.config import AttnConfig, SpecConfig
from specattn.plan import AttnInputs, AttnPlan, MultiStepDims
from tests.worlds import BACKENDS, DEVICE

HEADS = AttnConfig(2, 1, 16)
MODES = [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND]
TABLE = torch.zeros(2, 128, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("nodes", [2, 3, 4, 17, 33, 64])
def test_padding_derives_no_negative_number(nodes):
    config = SpecConfig(nodes - 1, 1, nodes, 128, 1)
    for mode in MODES:
        inputs = AttnInputs.alloc(3, config.layout(mode), DEVICE)
        AttnPlan.over(config.layout(mode), TABLE, inputs).fill()
        for name in ("req_pool_indices", "seq_lens", "positions", "tail_slots"):
            assert not inputs.tensors()[name].any(), name
    layers = LayeredBackend("torch_native", [HEADS], KVPool([HEADS], 4, DEVICE), DEVICE)
    bound = MultiStepDraftBackend(layers, MultiStepDims.of(config), TABLE, 3, "csr").bind(3)
    bound.fill_slots()
    bound.fill()
    for step in range(config.num_draft_forwards):
        assert bound.kv_indptr[step].tolist() == [0, step + 1, 2 * step + 2, 3 * step + 3]
    assert not bound.kv_indices.any(), "a padded row lists slot 0 alone"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_padding_attends_without_nan(backend):
    config = SpecConfig(5, 1, 6, 128, 1)
    layers = LayeredBackend(backend, [HEADS], KVPool([HEADS], 4, DEVICE), DEVICE)
    plan = AttnPlan.over(
        config.layout(MODES[0]), TABLE, AttnInputs.alloc(3, config.layout(MODES[0]), DEVICE)
    )
    bound = layers.bind(plan)
    plan.fill()
    bound.schedule(torch.zeros(3, dtype=torch.int32))
    bound.fill()
    kv = torch.randn(18, 1, 16, device=DEVICE)
    assert bound(0, torch.randn(18, 2, 16, device=DEVICE), kv, kv).isfinite().all()
