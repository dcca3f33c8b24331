"""R06: sglang#27545.

The draft-extend graph laid its queries out with a stride of ``num_steps + 1`` while the batch had
``num_draft_tokens`` rows per request. The two agree for chains only: NaN at topk > 1 with more
than one request.

Rows per request come from the layout of the mode. Wherever trees have a number of nodes other than
``num_steps + 1``, a batch's extend is that of each of its requests alone.
"""

from __future__ import annotations

import pytest

from specattn.batch import ForwardMode
from specattn.config import SpecConfig
from tests.worlds import BACKENDS, DEVICE, MODES, inputs, same, world

STEPS = 2
NODES = {1: 3, 2: 4, 4: 8, 8: 16}


@pytest.mark.parametrize("topk", NODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_extend_of_a_batch_is_that_of_each_request(backend, topk):
    config = SpecConfig(STEPS, topk, NODES[topk], 64, 8, 4)
    both = world(backend, [1, 3], config)
    mode, lens = ForwardMode.DRAFT_EXTEND, [33, 0, 7]
    values = inputs(mode, lens, topk, config)
    both.poison(lens)
    together = both.run(mode, lens, values)
    for at, length in enumerate(lens):
        both.poison(lens)
        both.rows.insert(0, both.rows.pop(at))
        alone = both.run(mode, [length], {n: v[at : at + 1] for n, v in values.items()})
        both.rows.insert(at, both.rows.pop(0))
        same(alone, {name: value[at : at + 1] for name, value in together.items()})


@pytest.mark.parametrize("topk", NODES)
def test_every_mode_has_as_many_tokens_as_its_graph(topk):
    config = SpecConfig(STEPS, topk, NODES[topk], 64, 8, 4)
    one = world("torch_native", [1, 2, 3], config)
    for bucket in (1, 2, 3):
        for mode in MODES:
            for step, attention in enumerate(one.step(mode, bucket).attention(mode)):
                plan, layout = attention.plan, config.layout(mode, step)
                assert plan.out_slots.device.type == DEVICE.type
                assert plan.out_slots.numel() == bucket * layout.q_len
                assert plan.positions.numel() == bucket * layout.q_len
                assert plan.tail_words.shape[:2] == (bucket, layout.q_len)
