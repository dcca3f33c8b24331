"""R23: vllm#41162, vllm#46849, vllm#45258, vllm#57632.

The draft loop advanced positions and lengths but not the metadata derived from them, which went
wrong from the third step on; rebuilding it in every step cost one graph launch per step.

All steps are described up front, each at its own length, and recorded as one graph that computes
what the eager steps compute.
"""

from __future__ import annotations

import pytest
import torch

from specattn.batch import ForwardMode
from specattn.config import SpecConfig
from tests.worlds import BACKENDS, DEVICE, identical, inputs, world

MODE = ForwardMode.DRAFT_DECODE
LENS = [33, 0, 7, 64]


@pytest.mark.parametrize(("steps", "topk", "nodes"), [(5, 1, 6), (4, 3, 9)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_step_i_is_a_decode_at_its_length(backend, steps, topk, nodes):
    config = SpecConfig(steps, topk, nodes, 256, 8, 4)
    one = world(backend, [4], config, indices="csr")
    one.poison(LENS)
    one.run(MODE, LENS, inputs(MODE, LENS, 1, config))
    bound = one.step(MODE, 4).bound.multi_step
    lens = torch.tensor(LENS).repeat_interleave(topk)
    for step in range(steps - 1):
        want = [0, *(lens + step + 1).cumsum(0).tolist()]
        assert bound.kv_indptr[step].tolist() == want
        positions = bound.inputs.positions[:, step].flatten()
        assert positions.tolist() == (lens + step).tolist()


@pytest.mark.parametrize("indices", ["table", "csr"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_is_all_eager_steps_bitwise(backend, indices):
    graph = world(backend, [4], indices=indices)
    eager = world(backend, [4], indices=indices, record=False)
    assert graph.decoder.runner.recording == (DEVICE.type == "cuda")
    for one in (graph, eager):
        one.poison(LENS)
    values = inputs(MODE, LENS, 2)
    identical(graph.run(MODE, LENS, values), eager.run(MODE, LENS, values))
