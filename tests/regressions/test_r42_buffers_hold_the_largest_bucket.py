"""R42: sglang#25124.

``kv_indptr`` was sized by the request pool while larger batch sizes were asked to be captured:
slices came out shorter than the batch.

Buffers are sized by the largest bucket, whatever the pool, before anything is bound.
"""

from __future__ import annotations

import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.batch import ForwardMode
from specattn.cache.kv_pool import KVPool
from specattn.config import AttnConfig, SpecConfig
from specattn.plan import MultiStepDims
from tests.worlds import DEVICE, inputs, part_of, world

HEADS = AttnConfig(2, 1, 16)


def test_a_bucket_may_exceed_the_request_pool():
    config = SpecConfig(4, 2, 6, max_context_len=16, max_num_reqs=2)
    table = torch.zeros(3, 16, dtype=torch.int32, device=DEVICE)
    layers = LayeredBackend("torch_native", [HEADS], KVPool([HEADS], 64, DEVICE), DEVICE)
    bound = MultiStepDraftBackend(layers, MultiStepDims.of(config), table, 12, "csr").bind(12)
    bound.fill_slots()
    bound.fill()
    for step, attend in enumerate(bound.steps):
        assert len(attend.plan.kv_indptr) == 12 * 2 + 1
        assert int(attend.plan.kv_indptr[-1]) == 12 * 2 * (step + 1)


def test_a_decoder_captures_more_than_it_has_rows_for():
    """Eight requests exist; the bucket is twelve."""
    mode, lens = ForwardMode.DRAFT_DECODE, [9, 0, 70]
    one = world("torch_native", [12], indices="csr")
    assert one.decoder.runner.captured(part_of(mode)) == [12]
    one.poison(lens)
    out = one.run(mode, lens, inputs(mode, lens, 0))
    assert out["tokens"].shape == (3, one.decoder.config.num_draft_tokens)
    assert ((out["tokens"] >= 0) & (out["tokens"] < 61)).all()
