"""R38: sglang#4218.

``tl.arange`` wants a power of two, and kernels took the number of draft tokens for one: three
draft tokens crashed.

Any number of nodes, branches and requests works, in tree building and in attention.
"""

from __future__ import annotations

import random

import pytest

from tests.kernels.tree.test_tree import check_against_definition
from tests.kernels.tree_oracle import DEVICE, random_candidates
from tests.oracle import check, make_tree_case, oracle_tree
from tests.regressions.attend import KINDS, attend


@pytest.mark.parametrize("nodes", [3, 5, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_any_number_of_nodes(nodes, kind):
    case = make_tree_case([20, 0, 33], q_len=nodes, heads=(3, 1), head_dim=16, device=DEVICE)
    attend(case, kind)
    check(case, oracle_tree(case))


@pytest.mark.parametrize("nodes", range(1, 34))
def test_the_twin_over_every_number_of_nodes(nodes):
    case = make_tree_case([5, 0], q_len=nodes, heads=(1, 1), head_dim=8, device=DEVICE)
    attend(case, "twin")
    check(case, oracle_tree(case))


@pytest.mark.parametrize(("topk", "nodes"), [(1, 3), (3, 3), (5, 11), (7, 20), (10, 33)])
def test_trees_of_any_shape(topk, nodes, implementation):
    rng = random.Random(nodes)
    steps = 2
    cases = [random_candidates(rng, topk, steps) for _ in range(3)]
    check_against_definition(cases, topk, nodes)
