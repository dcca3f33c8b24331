"""R15: sglang#28250.

With topk > 1 and every request shorter than a page, the cascade's prefix pass had no full page at
all, hence zero-length KV for the whole batch: an illegal access.

The prefix counts tokens, and a part without keys has output 0 and log-sum-exp -inf, which merging
ignores.
"""

from __future__ import annotations

import pytest
import torch

from specattn.config import SpecConfig
from tests.oracle import check, make_tree_case, oracle_tree
from tests.regressions.attend import KINDS, attend
from tests.worlds import BACKENDS, DEVICE, MODES, inputs, same, world

PAGE = 16


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("lens", [[0, 0, 0], [0, 1, PAGE - 1], [PAGE, 1, 0]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_short_prefixes_do_as_with_single_slot_pages(backend, lens, mode):
    outs = []
    for page_size in (1, PAGE):
        one = world(backend, [3], SpecConfig(4, 3, 9, 256, 8, page_size))
        one.poison(lens)
        outs.append(one.run(mode, lens, inputs(mode, lens, 5)))
    same(*outs)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_any_key_are_zero_with_lse_minus_infinity(kind):
    case = make_tree_case([0, 0, PAGE], q_len=3, heads=(2, 1), head_dim=16, device=DEVICE.type)
    case.args["tail_words"][:2] = 0
    for lse in (True, False):
        case.out.fill_(torch.nan)
        attend(case, kind, lse=lse)
        assert not case.out[:6].any()
        check(case, oracle_tree(case), lse=lse)
    assert (case.lse[:6] == -torch.inf).all()
