"""Trees of parents, and defects of trees by name."""

from __future__ import annotations

import random
import re

import pytest
import torch

from specattn.errors import TreeError
from specattn.trees import links_from_parents, validate_tree, words_from_parents
from tests.kernels.tree_oracle import DEVICE, random_tree
from tests.test_masks import GOLDEN, words_of


@pytest.mark.parametrize("n", [1, 6, 65])
def test_trees_from_parents(n):
    rng = random.Random(n)
    trees = [random_tree(rng, n, n) for _ in range(3)]
    parents = torch.tensor([t.parent for t in trees], device=DEVICE)
    next_token, next_sibling = links_from_parents(parents)
    assert next_token.tolist() == [t.next_token() for t in trees]
    assert next_sibling.tolist() == [t.next_sibling() for t in trees]
    words = words_from_parents(parents)
    assert torch.equal(words, words_of(trees))
    assert torch.equal(words_from_parents(parents[0]), words[0])
    assert links_from_parents(parents[1])[0].tolist() == trees[1].next_token()
    validate_tree(next_token, next_sibling, words, num_steps=n)


def test_parents_may_come_after_their_children():
    parents = torch.tensor([-1, 2, 0, 1])
    assert words_from_parents(parents)[:, 0].tolist() == [0b1, 0b111, 0b101, 0b1111]


@pytest.mark.parametrize(
    ("parents", "match"),
    [
        ([[-1, 0], [0, 0]], "request 1, node 0 is the root, its parent must be -1, got 0"),
        ([-1, 0, -1, 0], "node 2 has no parent, and only node 0 is a root"),
        ([-1, 0, 3], r"node 2: parent 3 is outside its row \(n 3\)"),
        ([-1, -2, 0], r"node 1: parent -2 is outside"),
        ([-1, 2, 1, 0], r"node 1 is in or below a cycle: \[1, 2, 1\]"),
        ([-1, 3, 3, 2], r"node 1 is in or below a cycle: \[1, 3, 2, 3\]"),
        ([-1, 1], r"cycle: \[1, 1\]"),
    ],
)
def test_bad_parents_are_named(parents, match):
    for build in (links_from_parents, words_from_parents):
        with pytest.raises(TreeError, match=match):
            build(torch.tensor(parents))


@pytest.mark.parametrize(
    ("next_token", "next_sibling", "match"),
    [
        ([1, -1, -1], [-1, 3, -1], r"node 1: next_sibling 3 is outside its row \(n 3\)"),
        ([-2, -1, -1], [-1, -1, -1], "node 0: next_token -2 is outside"),
        ([1, 0, -1], [-1, 2, -1], "node 0 is reached a second time, below node 1"),
        ([1, -1, -1], [-1, 2, 1], "node 1 is reached a second time, below node 0"),
        ([1, 2, -1], [-1, 2, -1], "node 2 is reached a second time"),
        ([1, -1, -1], [-1, -1, -1], r"nodes \[2\]: missing parent"),
        ([1, -1, -1], [2, -1, -1], "node 0 is the root and has no sibling"),
    ],
)
def test_bad_links_are_named(next_token, next_sibling, match):
    good = torch.tensor([[1, 2, -1], [-1, -1, -1]])
    bad = torch.tensor([next_token, next_sibling])
    with pytest.raises(TreeError, match=f"request 1, {match}"):
        validate_tree(*torch.stack([good, bad], dim=1))


def test_a_node_that_sees_itself_alone_is_padding():
    links = torch.tensor([[1, -1, -1, -1]]), torch.full((1, 4), -1)
    words = torch.tensor([[[0b1], [0b11], [0b100], [0b1000]]])
    validate_tree(*links, words, num_steps=1)
    words[0, 3] = 0b1001
    with pytest.raises(TreeError, match=r"nodes \[3\]: missing parent"):
        validate_tree(*links, words)


def test_words_and_depth_must_agree_with_links():
    words = words_of(GOLDEN)
    links = [
        torch.tensor([getattr(t, name)() for t in GOLDEN], device=DEVICE)
        for name in ("next_token", "next_sibling")
    ]
    validate_tree(*links, words, num_steps=3)
    with pytest.raises(TreeError, match="request 0, node 5: depth 3 exceeds num_steps 2"):
        validate_tree(*links, num_steps=2)
    words[1, 4] |= 2
    match = r"request 1, node 4: words name nodes \[0, 1, 2, 4\], its path is \[0, 2, 4\]"
    with pytest.raises(TreeError, match=match):
        validate_tree(*links, words)
    with pytest.raises(TreeError, match=r"words must be \[2, 6, 1\], got \[2, 5, 1\]"):
        validate_tree(*links, words[:, :5])


@pytest.mark.parametrize(
    ("next_token", "next_sibling"),
    [
        ([[1, 2, -1]], [[-1, -1]]),
        ([[1, 2, -1]], [[-1, -1, -1], [-1, -1, -1]]),
        ([1, -1], [-1, -1]),
        ([[]], [[]]),
    ],
)
def test_links_of_other_shapes_are_refused(next_token, next_sibling):
    links = [torch.tensor(link, dtype=torch.int64) for link in (next_token, next_sibling)]
    shapes = " and ".join(str(list(link.shape)) for link in links)
    match = re.escape(f"must be [B, n] with n at least 1, got {shapes}")
    with pytest.raises(TreeError, match=match):
        validate_tree(*links)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 1, 1)])
def test_parents_of_other_shapes_are_refused(shape):
    for build in (links_from_parents, words_from_parents):
        with pytest.raises(TreeError, match=r"parents must be \[n\] or \[B, n\] .* got"):
            build(torch.full(shape, -1))


def test_a_batch_without_trees_is_one():
    parents = torch.zeros(0, 65, dtype=torch.int64)
    links, words = links_from_parents(parents), words_from_parents(parents)
    assert words.shape == (0, 65, 2)
    validate_tree(*links, words, num_steps=3)


def test_words_that_name_no_node_are_told_from_the_path():
    words = words_of(GOLDEN)
    words[1, 2] |= 1 << 40
    links = [
        torch.tensor([getattr(t, name)() for t in GOLDEN], device=DEVICE)
        for name in ("next_token", "next_sibling")
    ]
    match = r"request 1, node 2: words name nodes \[0, 2, 40\], its path is \[0, 2\]"
    with pytest.raises(TreeError, match=match):
        validate_tree(*links, words)
