"""R45: vllm-ascend#14510, vllm#28207, vllm#28015.

The number of requests was computed from the number of tokens; with a remainder, a request that
nobody had sent was served.

The number of requests is stated, and values are one row per request of the mode's width: other
shapes are refused, before anything runs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from specattn.batch import ForwardMode
from tests.worlds import BACKENDS, CONFIG, inputs, world

MODE, LENS = ForwardMode.TARGET_VERIFY, [9, 40, 3]
NODES = CONFIG.num_draft_tokens


@pytest.mark.parametrize("rows", [NODES - 1, NODES + 1, 1], ids=str)
def test_logits_are_a_row_per_node_of_every_request(rows, monkeypatch):
    """A target that gives others is refused by name before anything is accepted."""
    one = world(BACKENDS[-1], [8], record=False)
    values, forward = inputs(MODE, LENS, 0), one.decoder.target.model.forward

    def short(*args):
        out = forward(*args)
        return replace(out, logits=out.logits.new_zeros(8 * rows, out.logits.shape[1]))

    one.poison(LENS)
    with monkeypatch.context() as patch:
        patch.setattr(one.decoder.target.model, "forward", short)
        with pytest.raises(ValueError, match=rf"logits must be \[{8 * NODES}, 61\]"):
            one.run(MODE, LENS, values)
    one.poison(LENS)
    assert one.run(MODE, LENS, values)["logits"].shape == (3, NODES, 61)
