"""R72: vllm#49262.

A draft read float8 keys and values with a scale of 1 where theirs was 0.003, and acceptance
collapsed.

Target and draft have scales of their own, by layer. A model whose keys and values are smaller or
larger by a power of two, with scales to match, has the very bits of the model itself: its texts,
and what is accepted. With other scales it has not.
"""

from __future__ import annotations

import pytest
import torch

from specattn.config import KVScales, SpecConfig
from specattn.engine.engine import Engine, Request
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE

FLOAT8 = torch.float8_e4m3fn
# the Triton kernels multiply float8 keys by 16-bit queries
DTYPES = {"torch_native": torch.float32, "triton": torch.bfloat16}
PROMPTS = [[3, 14, 15, 9, 26, 5], [35], [7 * at % 61 for at in range(25)]]
SMALL, LARGE = 2.0**-12, 2.0**10


def scaled(model, by: float):
    """The same model, with other keys and values."""
    for block in getattr(model, "blocks", None) or [model.block]:
        queries = block.config.num_qo_heads * block.config.head_dim
        block.qkv.weight[:queries].mul_(1 / by)
        block.qkv.weight[queries:].mul_(by)
        block.o.weight.mul_(1 / by)
    return model


def decoded(backend, sizes, scales, tree=(4, 3, 9)):
    """Texts and what was accepted, of models of these sizes with these scales."""
    dtype = DTYPES[backend]
    models = (
        scaled(TinyTarget(device=DEVICE, dtype=dtype), sizes[0]),
        scaled(TinyDraft(device=DEVICE, dtype=dtype, noise=1.5), sizes[1]),
    )
    given = tuple(
        None if scale is None else [KVScales(scale, scale)] * len(model.layers)
        for model, scale in zip(models, scales, strict=True)
    )
    config = SpecConfig(*tree, 64, 3)
    run = Engine(*models, config, backend=backend, kv_dtype=FLOAT8, kv_scales=given, buckets=[3])
    outs = run.generate([Request(prompt, 30) for prompt in PROMPTS])
    return [out.tokens for out in outs], [out.accept_lens for out in outs]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_that_match_change_no_bit(backend):
    texts, accepted = plain = decoded(backend, (1, 1), (None, None))
    assert max(map(max, accepted)) > 2
    for sizes in ((SMALL, LARGE), (LARGE, SMALL)):
        assert decoded(backend, sizes, sizes) == plain
        assert decoded(backend, (1, sizes[1]), (None, sizes[1])) == plain
        assert decoded(backend, (sizes[0], 1), (sizes[0], None)) == plain
    # 1 for the draft alone
    for size in (SMALL, LARGE):
        assert decoded(backend, (1, size), (None, None))[1] != accepted
    # the two swapped
    assert decoded(backend, (SMALL, LARGE), (LARGE, SMALL))[0] != texts
