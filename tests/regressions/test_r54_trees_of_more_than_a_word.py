"""R54: NVIDIA/TensorRT-LLM#8586, NVIDIA/TensorRT-LLM#13006.

The packed tree mask held fewer than 32 draft tokens, and its producer and consumer disagreed on
how many words a row has.

A row has ``mask_words(n)`` words of 64 bits for everyone: trees around one and two words are
built, spelled out and attended to node by node.
"""

from __future__ import annotations

import random

import pytest
import torch

from specattn.batch import Phase, RowLayout
from specattn.masks import qlen_mask, words_from_mask
from specattn.plan import causal_words, mask_words
from tests.kernels.tree.test_tree import check_against_definition
from tests.kernels.tree_oracle import DEVICE, random_candidates, random_tree
from tests.oracle import check, make_tree_case, oracle_tree
from tests.regressions.attend import KINDS, attend

NODES = [31, 32, 33, 63, 64, 65]


@pytest.mark.parametrize("nodes", NODES)
def test_words_and_masks_agree(nodes):
    tree = random_tree(random.Random(nodes), nodes, nodes)
    words = torch.tensor([tree.words(mask_words(nodes))], device=DEVICE)
    mask = qlen_mask(words)
    for node in range(nodes):
        assert mask[0, node].nonzero()[:, 0].tolist() == sorted(tree.ancestors(node))
    assert torch.equal(words_from_mask(mask), words)
    chain = causal_words(RowLayout(nodes, nodes, Phase.VERIFY))
    assert torch.equal(qlen_mask(chain[None])[0].sum(1), torch.arange(1, nodes + 1))


@pytest.mark.parametrize("nodes", [31, 33, 64, 65])
def test_trees_of_that_size_are_built(nodes, implementation):
    check_against_definition([random_candidates(random.Random(nodes), 8, 2)], 8, nodes)


@pytest.mark.parametrize("nodes", [33, 64, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_that_size_are_attended_to(nodes, kind):
    case = make_tree_case([9], q_len=nodes, heads=(1, 1), head_dim=16, device=DEVICE)
    attend(case, kind)
    check(case, oracle_tree(case))
