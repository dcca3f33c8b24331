"""The launches of recorded steps follow from their phases; a phase that grows is noticed."""

from __future__ import annotations

import pytest
import torch

from bench.shipped import pair
from specattn.batch import ForwardMode
from specattn.config import SpecConfig
from specattn.cuda_graph import memset_nodes
from specattn.engine.engine import Engine
from specattn.speculative.proposers.lookup import LookupProposer

pytestmark = pytest.mark.gpu

BATCH, LAYERS = 4, 2
CONFIG = SpecConfig(8, 1, 16, 256, BATCH, tree="best_first", ranks=4)
# the library may split a product, and add up its parts in a second launch
PRODUCT = 2
# rotate and store, attend over splits, merge them, norm, gate, norm
LAYER = 4 * PRODUCT + 6
# gather, plan all attention
BEGIN = 2
# advance, tell the host
END = 2
BOUNDS = {
    "dflash": {
        # lay positions out, embed; layers; logits, the best in two, logarithms, the tree
        ForwardMode.DRAFT_DECODE: BEGIN + 2 + LAYERS * LAYER + PRODUCT + 2 + 1 + 1,
        # lay positions out, mix features, norm; per layer a product and a store
        ForwardMode.DRAFT_EXTEND: 1 + PRODUCT + 1 + LAYERS * (PRODUCT + 1) + END,
    },
    "lookup": {
        # search in two, link
        ForwardMode.DRAFT_DECODE: BEGIN + 2 + 1,
        # append
        ForwardMode.DRAFT_EXTEND: 1 + END,
    },
}


def launches(run: Engine) -> dict[ForwardMode | None, int]:
    """Count the kernels of every recorded part."""
    found = {}
    for part, done in run.decoder(run.config).runner._captured.items():
        raw = done[BATCH].graph.raw_cuda_graph()
        found[part.mode] = len(memset_nodes._nodes(raw, memset_nodes._KERNEL))
    return found


@pytest.mark.parametrize("kind", BOUNDS)
def test_launches_follow_from_the_phases(kind):
    target, head = pair("cuda", torch.bfloat16, kind="dflash")
    draft = LookupProposer() if kind == "lookup" else head
    options = {"backend": "triton", "buckets": [BATCH]}
    parts = launches(Engine(target, draft, CONFIG, cudagraph="piecewise", **options))
    for mode, most in BOUNDS[kind].items():
        assert 0 < parts[mode] <= most, (mode, parts)
    (whole,) = launches(Engine(target, draft, CONFIG, **options)).values()
    assert whole <= sum(parts.values())
