"""R12: sglang#9279.

A sliding-window layer read the tree mask without the offset of its window: gpt-oss lost four
points of MMLU.

Visibility is words over the tail alone, and the window is a test of positions, so there is no
offset to forget: trees after prefixes around the window's length equal a dense reference.
"""

from __future__ import annotations

import pytest
import torch

from tests.oracle import check, make_tree_case, oracle_tree
from tests.regressions.attend import KINDS, attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW = 16


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_behind_a_window_equals_the_dense_reference(kind):
    case = make_tree_case(
        [WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW],
        q_len=6,
        heads=(2, 1),
        head_dim=16,
        window_left=WINDOW - 1,
        device=DEVICE,
    )
    attend(case, kind)
    check(case, oracle_tree(case))
