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

PER_TOKEN = {"positions", "tail_slots", "tail_words", "tokens", "features"}


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=lambda mode: mode.value)
def test_tokens_are_the_second_axis(mode):
    width = CONFIG.layout(mode).q_len
    for part in buffer_sets(world("torch_native", [8]).bound(mode, 8)):
        for name, tensor in part.tensors().items():
            assert len(tensor) == 8
            assert (tensor.dim() > 1 and tensor.shape[1] == width) == (name in PER_TOKEN), name


def test_the_last_token_of_a_row_is_in_that_row():
    mode, lens = ForwardMode.DRAFT_EXTEND, [12, 40, 3]
    one = world("torch_native", [8], record=False)
    seen = []
    model = one.decoder.draft.model
    forward = model.forward

    def spy(*args):
        seen.append(args[-1].tolist())
        return forward(*args)

    model.forward = spy
    for batch in ([9] * 8, lens):
        one.poison(batch)
        one.run(mode, batch, inputs(mode, batch, 7))
    width = CONFIG.num_steps + 1
    assert DEVICE.type == one.pools[1].k.device.type
    assert [row // width for row in seen[-1]] == list(range(8))
    assert [row % width for row in seen[-1][3:]] == [0] * 5, "padding gains nothing"
