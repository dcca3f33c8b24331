"""R13: sglang#39287, sglang#39160, sglang#22679, sglang#22892.

With EAGLE and a sliding window, the prefix length was clipped but gathered from offset 0, the mask
kept the full prefix's pitch (misaligning later requests), and the window was tested by the flat
query index, which differs between siblings.

Siblings have one position, hence one window; requests do not shift each other, in any order.
"""

from __future__ import annotations

import pytest
import torch

from tests.oracle import check, make_tree_case, oracle_tree
from tests.regressions.attend import KINDS, attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NODES = 6


def outputs(case, kind) -> torch.Tensor:
    attend(case, kind)
    return case.out.view(-1, NODES, *case.out.shape[1:]).clone()


def siblings(lens: list[int]):
    """A root with five equal children per request: same query, same own key."""
    case = make_tree_case(
        lens, q_len=NODES, heads=(2, 1), head_dim=16, window_left=3, device=DEVICE
    )
    words = [1, *(1 | 1 << node for node in range(1, NODES))]
    case.args["tail_words"].copy_(torch.tensor(words, device=DEVICE)[None, :, None])
    prefix = case.args["seq_lens"][:, None]
    depth = torch.tensor([0] + [1] * (NODES - 1), device=DEVICE)
    for name in ("positions", "tail_positions"):
        case.args[name].copy_(prefix + depth)
    for row, slots in enumerate(case.args["tail_slots"].long()):
        for tensor in (case.k_cache, case.v_cache):
            tensor[slots[1:]] = tensor[slots[1]].clone()
        case.q[row * NODES + 1 : (row + 1) * NODES] = case.q[row * NODES + 1].clone()
    return case


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_see_one_window(kind):
    case = siblings([40, 2, 0, 17])
    out = outputs(case, kind)
    check(case, oracle_tree(case))
    for sibling in range(2, NODES):
        torch.testing.assert_close(out[:, sibling], out[:, 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_long_and_short_requests_does_not_matter(kind):
    case = siblings([40, 2, 0, 17])
    out = outputs(case, kind)
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    case.args = {n: t if n == "req_to_token" else t[order] for n, t in case.args.items()}
    case.q = case.q.view(4, NODES, 2, 16)[order].flatten(0, 1)
    torch.testing.assert_close(outputs(case, kind), out[order], rtol=1e-5, atol=1e-6)
