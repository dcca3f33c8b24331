"""link_tree against trees in plain Python."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specattn.batch import Linked
from specattn.kernels.tree import link_tree
from tests.kernels.tree_oracle import (
    DEVICE,
    POISON,
    as_lists,
    poisoned,
    poisoned_tree,
    random_tree,
)


def link(tokens, parents, seq_lens, chosen=None):
    out = poisoned_tree(*tokens.shape)
    if chosen is not None:
        chosen = torch.tensor(chosen, dtype=torch.int32, device=DEVICE)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    link_tree(Linked(tokens, parents, chosen), lens, out=out)
    return as_lists(out)


def some_trees(rng, n, batch):
    """Trees, and their parent tables."""
    trees = [random_tree(rng, n, max_depth=rng.choice([1, 3, n])) for _ in range(batch)]
    tokens = torch.tensor([[rng.randrange(9999) for _ in range(n)] for _ in trees], device=DEVICE)
    return trees, tokens, torch.tensor([tree.parent for tree in trees], device=DEVICE)


@pytest.mark.parametrize("n", [1, 2, 7, 16, 63, 65, 100, 256])
def test_any_tree(implementation, n):
    trees, tokens, parents = some_trees(random.Random(n), n, 3)
    seq_lens = [0, 17, 4000]
    got = link(tokens, parents, seq_lens)
    assert got["tokens"] == tokens.tolist()
    for i, tree in enumerate(trees):
        assert got["positions"][i] == [seq_lens[i] + depth for depth in tree.depths()]
        assert got["words"][i] == tree.words(-(-n // 64))
        assert got["next_token"][i] == tree.next_token()
        assert got["next_sibling"][i] == tree.next_sibling()


@pytest.mark.parametrize("broken", [-1, -2, 3, 4, 2**40])
def test_nodes_without_a_parent_before_them_are_padding(implementation, broken):
    """Nodes 2, 3 and 5: alone, and nothing leads there."""
    parents = torch.tensor([[-1, 0, -1, broken, 1, -1]], device=DEVICE)
    got = link(torch.arange(6, device=DEVICE)[None], parents, [10])
    assert got["next_token"] == [[1, 4, -1, -1, -1, -1]]
    assert got["next_sibling"] == [[-1] * 6]
    assert got["words"] == [[[0b1], [0b11], [0b100], [0b1000], [0b10011], [0b100000]]]
    assert got["positions"] == [[10, 11, 10, 10, 12, 10]]


def test_only_chosen_requests_are_written(implementation):
    _, tokens, parents = some_trees(random.Random(1), 70, 4)
    chosen = [0, 3, 0, 1]
    got = link(tokens, parents, [5] * 4, chosen)
    whole = link(tokens, parents, [5] * 4)
    for name, rows in got.items():
        for i, taken in enumerate(chosen):
            if taken:
                assert rows[i] == whole[name][i]
            else:
                assert set(torch.tensor(rows[i]).flatten().tolist()) == {POISON}


def test_tokens_may_stay_where_they_are(implementation):
    _, tokens, parents = some_trees(random.Random(2), 9, 2)
    out = replace(poisoned_tree(2, 9), tokens=tokens)
    before = tokens.tolist()
    lens = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    link_tree(Linked(tokens, parents), lens, out=out)
    assert tokens.tolist() == before
    assert POISON not in out.retrieve_next_token.flatten().tolist()


def test_rows_may_lie_apart(implementation):
    """Tokens and parents of one tensor, between other numbers."""
    _, tokens, parents = some_trees(random.Random(4), 7, 3)
    apart = poisoned(3, 4, 7)
    apart[:, 0], apart[:, 2] = tokens, parents
    assert link(apart[:, 0], apart[:, 2], [5] * 3) == link(tokens, parents, [5] * 3)


def test_tensors_of_another_kind_are_named(implementation):
    _, tokens, parents = some_trees(random.Random(3), 5, 2)
    lens, out = torch.zeros(2, dtype=torch.int32, device=DEVICE), poisoned_tree(2, 5)
    with pytest.raises(ValueError, match=r"tokens must be \[B, 1..256\]"):
        link_tree(Linked(poisoned(2, 257), parents), lens, out=out)
    with pytest.raises(ValueError, match=r"parents must be \[2, 5\]"):
        link_tree(Linked(tokens, parents[:, :4]), lens, out=out)
    with pytest.raises(ValueError, match="parents must be dense in its last axis"):
        link_tree(Linked(tokens, poisoned(2, 10)[:, ::2]), lens, out=out)
    with pytest.raises(ValueError, match=r"out\.words must be"):
        link_tree(Linked(tokens, parents), lens, out=replace(out, words=poisoned(2, 5, 0)))
    link_tree(Linked(tokens[:0], parents[:0]), lens[:0], out=poisoned_tree(0, 5))
