"""R37: sglang#24481.

Multi-layer EAGLE on the Triton backend: from the second draft step on ``kv_indices`` was None, and
the kernel failed to compile.

A step's plan has no optional tensor, and every kind of layer of a draft model is bound to it.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.cache.kv_pool import KVPool
from specattn.config import AttnConfig, SpecConfig
from specattn.plan import MultiStepDims
from tests.filling import put
from tests.worlds import BACKENDS, DEVICE

# a draft of three layers, one of them with a sliding window
LAYERS = [AttnConfig(2, 1, 16), AttnConfig(2, 1, 16, window_left=5), AttnConfig(2, 1, 16)]
CONFIG = SpecConfig(4, 2, 6, 32, 2)


@pytest.mark.parametrize("indices", ["table", "csr"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_steps_and_layers_attend(backend, indices):
    pool = KVPool(LAYERS, 65, DEVICE)
    table = torch.arange(3 * 32, dtype=torch.int32, device=DEVICE).view(3, 32) % 65
    layers = LayeredBackend(backend, LAYERS, pool, DEVICE)
    bound = MultiStepDraftBackend(layers, MultiStepDims.of(CONFIG), table, 2, indices).bind(2)
    put(
        bound.inputs,
        bound.dims,
        req_pool_indices=torch.tensor([1, 2], device=DEVICE),
        seq_lens=torch.tensor([9, 0], dtype=torch.int32, device=DEVICE),
    )
    bound.schedule(torch.tensor([9, 0], dtype=torch.int32))
    bound.fill_slots()
    bound.fill()
    assert len(bound.steps) == 3
    for step, attend in enumerate(bound.steps):
        bound.fill_ancestors(step)
        for item in fields(attend.plan):
            assert getattr(attend.plan, item.name) is not None, item.name
        assert len(attend.layers) == 3
        assert len(attend.bounds) == 2, "equal layers share their plan"
        for layer in range(3):
            kv = torch.randn(4, 1, 16, device=DEVICE)
            q = torch.randn(4, 2, 16, device=DEVICE)
            assert attend(layer, q, kv, kv).isfinite().all()
