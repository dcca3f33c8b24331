"""R45: vllm-ascend#14510, vllm#28207, vllm#28015.

The number of requests was computed from the number of tokens; with a remainder, a request that
nobody had sent was served.

The number of requests is stated, and values are one row per request of the mode's width: other
shapes are refused, before anything runs.
"""

from __future__ import annotations

import pytest
import torch

from specattn.batch import ForwardMode
from tests.worlds import BACKENDS, CONFIG, DEVICE, inputs, world

MODE, LENS = ForwardMode.TARGET_VERIFY, [9, 40, 3]
NODES = CONFIG.num_draft_tokens


@pytest.mark.parametrize(
    "shape",
    [
        (3, NODES - 1),
        (3, NODES + 1),
        (3 * NODES,),
        (3 * NODES - 1,),
        (NODES,),
        (3, 1),
        (2, NODES),
        (4, NODES),
    ],
    ids=str,
)
def test_tokens_are_a_row_per_request(shape):
    one = world(BACKENDS[-1], [8])
    values = inputs(MODE, LENS, 0) | {"tokens": torch.zeros(shape, dtype=torch.int64).to(DEVICE)}
    one.poison(LENS)
    with pytest.raises(ValueError, match="tokens"):
        one.run(MODE, LENS, values)
    assert not one.decoder.runner.stats.replays[MODE]
