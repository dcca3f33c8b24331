"""R11: flashinfer#1005, flashinfer#1008.

The prefill kernel loaded its mask byte before it checked the query and key bounds: a mask at the
end of an allocation was read past its end.

Words, slots and positions lie directly before hostile values; for trees and prefixes around every
tile edge nothing of those is seen.
"""

from __future__ import annotations

import pytest
import torch

from tests.oracle import check, make_tree_case, oracle_tree
from tests.regressions.attend import KINDS, attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def at_the_end_of_an_allocation(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, followed by set bits and numbers that are no slot."""
    memory = torch.full((tensor.numel() + 256,), -1, dtype=tensor.dtype, device=tensor.device)
    if tensor.dtype == torch.int32:
        memory.fill_(2**30)
    view = memory[: tensor.numel()].view_as(tensor)
    return view.copy_(tensor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 3, 17])
def test_nothing_past_the_mask_is_seen(nodes, kind):
    case = make_tree_case(
        [31, 33, 64, 65, 63, 32], q_len=nodes, heads=(2, 1), head_dim=16, device=DEVICE
    )
    expected = oracle_tree(case)
    for name in ("tail_words", "tail_slots", "tail_positions", "positions", "seq_lens"):
        case.args[name] = at_the_end_of_an_allocation(case.args[name])
    attend(case, kind)
    check(case, expected)
