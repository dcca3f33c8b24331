"""R27: vllm#39773.

``last_token_indices`` were not padded, and FlashInfer's ``paged_kv_indptr``, one per request, was
padded per token.

A buffer's first axis is the request and the token axis is its second, so one count pads both; the
row of the last token stays inside its own request, in padding too.
"""

from __future__ import annotations

import pytest

from specattn.batch import ForwardMode
from tests.worlds import CONFIG, DEVICE, MODES, buffer_sets, inputs, world

# the tensors of each mode that have a token axis
PER_TOKEN = {
    ForwardMode.TARGET_VERIFY: ("tokens", "tree_positions", "words", "next_token", "next_sibling"),
    ForwardMode.DRAFT_EXTEND: ("accept_index", "accept_tokens", "features", "positions"),
}


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=lambda mode: mode.value)
def test_tokens_are_the_second_axis(mode):
    width, step = CONFIG.layout(mode).q_len, world("torch_native", [8]).step(mode, 8)
    assert width != 8
    for part in buffer_sets(step):
        for name, tensor in part.tensors().items():
            assert len(tensor) == 8, name
    for name in PER_TOKEN[mode]:
        assert getattr(step.buffers, name).shape[1] == width, name


def test_the_last_token_of_a_row_is_in_that_row():
    mode, lens = ForwardMode.DRAFT_EXTEND, [12, 40, 3]
    one = world("torch_native", [8], record=False)
    seen = []
    model = one.decoder.draft.model
    forward = model.forward

    def spy(*args, **named):
        # draft forwards want every row
        if len(args) == 5:
            seen.append(args[-1].tolist())
        return forward(*args, **named)

    model.forward = spy
    for batch in ([9] * 8, lens):
        one.poison(batch)
        one.run(mode, batch, inputs(mode, batch, 7))
    width = CONFIG.num_steps + 1
    assert DEVICE.type == one.pools[1].k.device.type
    assert [row // width for row in seen[-1]] == list(range(8))
    assert [row % width for row in seen[-1][3:]] == [0] * 5, "padding gains nothing"
