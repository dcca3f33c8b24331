"""R47: flashinfer#4647, sglang#5404.

Results depended on the ``max_seq_len`` that the host passed, and merging partial results went
wrong where a part had a log-sum-exp of -inf.

There is no such bound to pass: a table twice as wide gives the same bits. Parts without keys have
weight zero, whatever they are merged with.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.config import SpecConfig
from tests.kernels.attention.calls import make_kernel, plan, run
from tests.oracle import check, make_tree_case, oracle_tree
from tests.regressions.attend import attend
from tests.worlds import BACKENDS, DEVICE, MODES, identical, inputs, world


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_width_of_the_table_does_not_show(backend, mode):
    lens = [100, 0, 33]
    outs = []
    for context in (128, 256):
        one = world(backend, [3], SpecConfig(4, 3, 9, context, 8, 4))
        one.poison(lens)
        outs.append(one.run(mode, lens, inputs(mode, lens, 0)))
    identical(*outs)


def test_parts_without_a_visible_key_weigh_nothing():
    """A long prefix cut into many parts, all but the last outside the window; and empty rows."""
    case = make_tree_case(
        [300, 0, 0],
        q_len=3,
        tail_len=3,
        heads=(2, 1),
        head_dim=16,
        window_left=3,
        device=DEVICE.type,
    )
    case.args["tail_words"][1] = 0
    expected = oracle_tree(case)
    kernel = make_kernel(case)
    kernel = make_kernel(case, tile=replace(kernel.tile, ctas_per_sm=8))
    plan(kernel, case)
    run(kernel, case)
    check(case, expected)
    assert (case.lse[3:6] == -torch.inf).all()
    case.clear()
    attend(case, "twin")
    check(case, expected)
