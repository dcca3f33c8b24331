"""R50: sglang#7523, sglang#8409.

From the second draft step on, a branch attended to the KV of its own beam slot, not of its
parent: hidden states were reordered with the beams, KV was not. Drafts of topk > 1 were worse than
those of their paths, and some trees were invalid.

A branch reads the nodes of its ancestor words. Whatever the beams, the lists are the path's, and
attention is that of the path alone.
"""

from __future__ import annotations

import random

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.cache.kv_pool import KVPool
from specattn.config import AttnConfig, SpecConfig
from specattn.plan import MultiStepDims
from tests.filling import put
from tests.worlds import BACKENDS, DEVICE

HEADS = AttnConfig(2, 1, 16)
PREFIX, CONTEXT = 7, 32


def build(backend: str, indices: str, parents: list[list[int]]):
    """One request whose beam k of step s extends beam ``parents[s - 1][k]``."""
    topk, steps = len(parents[0]), len(parents) + 1
    config = SpecConfig(steps + 1, topk, 4, CONTEXT, 1)
    table = torch.randperm(CONTEXT)[None].repeat(2, 1).int().add(1).to(DEVICE)
    pool = KVPool([HEADS], CONTEXT + 1, DEVICE)
    pool.k.normal_()
    pool.v.normal_()
    layers = LayeredBackend(backend, [HEADS], pool, DEVICE)
    bound = MultiStepDraftBackend(layers, MultiStepDims.of(config), table, 1, indices).bind(1)
    put(
        bound.inputs,
        bound.dims,
        req_pool_indices=torch.tensor([1], device=DEVICE),
        seq_lens=torch.tensor([PREFIX], dtype=torch.int32, device=DEVICE),
    )
    paths = [[[k] for k in range(topk)]]
    for step, row in enumerate(parents, 1):
        paths.append([[*paths[-1][beam], step * topk + k] for k, beam in enumerate(row)])
    words = torch.tensor([[sum(1 << node for node in path) for path in row] for row in paths])
    bound.inputs.words.copy_(words[None, :, :, None])
    bound.schedule(torch.tensor([PREFIX], dtype=torch.int32))
    bound.fill_slots()
    bound.fill()
    for step in range(steps):
        bound.fill_ancestors(step)
    return bound, paths, table[1].tolist()


def test_the_reported_example():
    """A..E of the first step; the second extends A, A, A, C, C."""
    bound, _, slots = build("torch_native", "csr", [[0, 0, 0, 2, 2]])
    step = bound.kv_indices[1, : 5 * (PREFIX + 2)].view(5, PREFIX + 2).tolist()
    first = slots[PREFIX : PREFIX + 5]
    assert [row[PREFIX] for row in step] == [first[0]] * 3 + [first[2]] * 2
    assert [row[PREFIX + 1] for row in step] == slots[PREFIX + 5 : PREFIX + 10]


@pytest.mark.parametrize("indices", ["table", "csr"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_branch_attends_as_its_path_alone(backend, indices):
    rng = random.Random(4)
    beams = [[2, 1, 0], [0, 0, 0], [rng.randrange(3) for _ in range(3)]]
    bound, paths, slots = build(backend, indices, beams)
    pool = bound.steps[0].layers[0].pool
    for step, attend in enumerate(bound.steps):
        q = torch.randn(3, 2, 16, device=DEVICE)
        out = torch.full_like(q, torch.nan)
        attend.bounds[0].run(q, pool.k[0], pool.v[0], out)
        for k, path in enumerate(paths[step]):
            seen = slots[:PREFIX] + [slots[PREFIX + node] for node in path]
            keys, values = pool.k[0, seen, 0].double(), pool.v[0, seen, 0].double()
            weights = (q[k].double() @ keys.T * HEADS.sm_scale).softmax(-1)
            torch.testing.assert_close(out[k].double(), weights @ values, rtol=1e-5, atol=1e-5)
