"""R33: NVIDIA/TensorRT-LLM#15708.

The buffer that captures the target's hidden states was sized for the real tokens, and a padded
batch ran past it.

Features are an output of the forward over the whole bucket, and the extend's input buffer has the
bucket's rows times the path's length.
"""

from __future__ import annotations

import pytest
import torch

from specattn.batch import ForwardMode
from tests.worlds import BACKENDS, CONFIG, DEVICE, inputs, world


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_cover_every_padded_token(backend):
    mode, lens = ForwardMode.TARGET_VERIFY, [9, 80, 3]
    one = world(backend, [8])
    one.poison(lens)
    one.run(mode, lens, inputs(mode, lens, 0))
    step = one.step(mode, 8)
    with torch.no_grad():
        _, features = step.verify(step.tree)
    assert features.shape == (8, CONFIG.num_draft_tokens, 64)
    assert features.device.type == DEVICE.type
    taken = step.buffers.features
    assert taken.shape == (8, CONFIG.num_steps + 1, 64)
    given = inputs(ForwardMode.DRAFT_EXTEND, lens, 0)
    one.poison(lens)
    one.run(ForwardMode.DRAFT_EXTEND, lens, given)
    assert not taken[3:].any()
