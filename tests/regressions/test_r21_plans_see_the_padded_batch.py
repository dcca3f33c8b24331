"""R21: sglang#25512, sglang#25529.

Padding 3 requests to a graph of 4, the metadata was prepared from the raw batch's 9 slots while
the graph had 12: a segmentation fault in replay.

Preparation reads the static buffers alone, and those have the bucket's size whatever the batch.
The caller's own tensors are read, so there is nothing to restore.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from tests.worlds import BACKENDS, DEVICE, MODES, buffer_sets, inputs, world


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_requests_in_a_bucket_of_four(backend, mode):
    one, lens = world(backend, [4]), [9, 0, 77]
    values = inputs(mode, lens, 2)
    before = {name: value.clone() for name, value in values.items()}
    step = one.step(mode, 4)
    attend = step.attention(mode)[0]
    one.poison(lens)
    with patch.object(attend, "schedule", wraps=attend.schedule) as schedule:
        out = one.run(mode, lens, values)
    assert [call.args[0].tolist() for call in schedule.call_args_list] == [[9, 0, 77, 0]]
    for part in buffer_sets(step):
        for name, tensor in part.tensors().items():
            assert tensor.device.type == DEVICE.type
            assert len(tensor) == 4, name
    assert {len(value) for value in out.values()} == {3}
    for name, value in values.items():
        assert torch.equal(value, before[name]), "the caller's tensors are the caller's"
