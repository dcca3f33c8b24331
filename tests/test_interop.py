"""Masks in foreign spellings against cell-by-cell loops, and defects of trees by name."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from specattn import interop
from specattn.errors import TreeError
from tests.kernels.tree_oracle import DEVICE, Tree, random_tree

GOLDEN = [Tree([], [-1, 0, 0, 1, 1, 3]), Tree([], [-1, 0, 0, 1, 2, 4])]


def words_of(trees):
    n = len(trees[0].parent)
    return torch.tensor([t.words(interop.mask_words(n)) for t in trees], device=DEVICE)


def lens_of(lens):
    return torch.tensor(lens, dtype=torch.int32, device=DEVICE)


def cells(trees, lens):
    """FULL_MASK by the definition, per request."""
    return [
        [
            j < length or (j - length) in tree.ancestors(q)
            for q in range(len(tree.parent))
            for j in range(length + len(tree.parent))
        ]
        for tree, length in zip(trees, lens, strict=True)
    ]


def test_golden_masks():
    words, lens = words_of(GOLDEN), lens_of([3, 5])
    assert words.squeeze(2).tolist() == [[1, 3, 5, 11, 19, 43], [1, 3, 5, 11, 21, 53]]
    assert interop.mask_indptr(lens, 6).tolist() == [0, 54, 120]
    mask = interop.full_mask(words, lens)
    assert len(mask) == 120
    rows = ["".join("01"[x] for x in row) for row in interop.qlen_mask(words)[0].int().tolist()]
    assert rows == ["100000", "110000", "101000", "110100", "110010", "110101"]


# R54: word and byte edges
@pytest.mark.parametrize("n", [1, 2, 7, 31, 32, 33, 63, 64, 65, 129])
def test_spellings_agree(n):
    rng = random.Random(n)
    lens = [0, 5, 64, 3]
    trees = [random_tree(rng, n, 9) for _ in lens]
    words, device_lens = words_of(trees), lens_of(lens)
    expect = cells(trees, lens)
    assert interop.full_mask(words, device_lens).tolist() == [x for row in expect for x in row]

    packed = [np.packbits(row, bitorder="little").tolist() for row in expect]
    flat = [x for row in packed for x in row]
    assert interop.packed_mask(words, device_lens).tolist() == flat
    assert (
        interop.packed_indptr(device_lens, n).tolist() == np.cumsum([0, *map(len, packed)]).tolist()
    )
    out = torch.full((len(flat) + 5,), 0xAB, dtype=torch.uint8, device=DEVICE)
    assert interop.packed_mask(words, device_lens, out=out).tolist() == flat + [0] * 5

    square = interop.qlen_mask(words)
    assert torch.equal(interop.words_from_mask(square), words)
    assert square.tolist() == [
        [[j in t.ancestors(q) for j in range(n)] for q in range(n)] for t in trees
    ]


def test_masks_may_be_wider_than_their_rows():
    mask = torch.rand(2, 3, 70, device=DEVICE) < 0.5
    words = interop.words_from_mask(mask)
    assert words.shape == (2, 3, 2)
    assert torch.equal(interop.qlen_mask(words, keys=70), mask)


@pytest.mark.parametrize("n", [1, 7, 65])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("length", [torch.int32, torch.int64])
def test_the_tree_of_a_full_mask(n, dtype, length):
    seen = torch.rand(3, n, n, device=DEVICE) < 0.5
    lens = torch.tensor([4, 0, 9], dtype=length, device=DEVICE)
    full = interop.full_mask(interop.words_from_mask(seen), lens).to(dtype)
    out = torch.zeros(4 * n * n, dtype=torch.bool, device=DEVICE)
    have = interop.qlen_from_full(full, lens, n, out=out)
    assert torch.equal(have.view(3, n, n), seen)
    assert torch.equal(have, out[: 3 * n * n])
    assert not out[3 * n * n :].any()
    with pytest.raises(ValueError, match=f"out must be .at least {3 * n * n}"):
        interop.qlen_from_full(full, lens, n, out=out[: 3 * n * n - 1])


def test_a_mask_of_trees_alone_is_taken_as_it_is():
    seen = torch.rand(2, 5, 5, device=DEVICE) < 0.5
    out = torch.zeros(50, dtype=torch.bool, device=DEVICE)
    interop.qlen_from_full(seen.flatten(), lens_of([3, 4]), 5, out=out)
    assert torch.equal(out.view(2, 5, 5), seen)


@pytest.mark.parametrize("n", [1, 6, 65])
def test_trees_from_parents(n):
    rng = random.Random(n)
    trees = [random_tree(rng, n, n) for _ in range(3)]
    parents = torch.tensor([t.parent for t in trees], device=DEVICE)
    next_token, next_sibling = interop.links_from_parents(parents)
    assert next_token.tolist() == [t.next_token() for t in trees]
    assert next_sibling.tolist() == [t.next_sibling() for t in trees]
    words = interop.words_from_parents(parents)
    assert torch.equal(words, words_of(trees))
    assert torch.equal(interop.words_from_parents(parents[0]), words[0])
    assert interop.links_from_parents(parents[1])[0].tolist() == trees[1].next_token()
    interop.validate_tree(next_token, next_sibling, words, num_steps=n)


def test_parents_may_come_after_their_children():
    parents = torch.tensor([-1, 2, 0, 1])
    assert interop.words_from_parents(parents)[:, 0].tolist() == [0b1, 0b111, 0b101, 0b1111]


@pytest.mark.parametrize(
    ("parents", "match"),
    [
        ([[-1, 0], [0, 0]], "request 1, node 0 is the root"),
        ([-1, 0, -1], "node 2 has no parent"),
        ([-1, 0, 3], r"node 2: parent 3 is outside its row \(n 3\)"),
        ([-1, -2, 0], r"node 1: parent -2 is outside"),
        ([-1, 0, 3, 2], r"cycle: \[2, 3, 2\]"),
        ([-1, 1], r"cycle: \[1, 1\]"),
    ],
)
def test_bad_parents_are_named(parents, match):
    for build in (interop.links_from_parents, interop.words_from_parents):
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
        interop.validate_tree(*torch.stack([good, bad], dim=1))


def test_a_node_that_sees_itself_alone_is_padding():
    links = torch.tensor([[1, -1, -1, -1]]), torch.full((1, 4), -1)
    words = torch.tensor([[[0b1], [0b11], [0b100], [0b1000]]])
    interop.validate_tree(*links, words, num_steps=1)
    words[0, 3] = 0b1001
    with pytest.raises(TreeError, match=r"nodes \[3\]: missing parent"):
        interop.validate_tree(*links, words)


def test_words_and_depth_must_agree_with_links():
    words = words_of(GOLDEN)
    links = [
        torch.tensor([getattr(t, name)() for t in GOLDEN], device=DEVICE)
        for name in ("next_token", "next_sibling")
    ]
    interop.validate_tree(*links, words, num_steps=3)
    with pytest.raises(TreeError, match="request 0, node 5: depth 3 exceeds num_steps 2"):
        interop.validate_tree(*links, num_steps=2)
    words[1, 4] |= 2
    match = r"request 1, node 4: words name nodes \[0, 1, 2, 4\], its path is \[0, 2, 4\]"
    with pytest.raises(TreeError, match=match):
        interop.validate_tree(*links, words)
    with pytest.raises(TreeError, match=r"words must be \[2, 6, 1\], got \[2, 5, 1\]"):
        interop.validate_tree(*links, words[:, :5])


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
        interop.validate_tree(*links)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 1, 1)])
def test_parents_of_other_shapes_are_refused(shape):
    for build in (interop.links_from_parents, interop.words_from_parents):
        with pytest.raises(TreeError, match=r"parents must be \[n\] or \[B, n\] .* got"):
            build(torch.full(shape, -1))


def test_a_batch_without_trees_is_one():
    parents = torch.zeros(0, 65, dtype=torch.int64)
    links, words = interop.links_from_parents(parents), interop.words_from_parents(parents)
    assert words.shape == (0, 65, 2)
    interop.validate_tree(*links, words, num_steps=3)
    out = torch.full((3,), 0xAB, dtype=torch.uint8)
    assert interop.packed_mask(words, torch.zeros(0, dtype=torch.int32), out=out) is out
    assert out.tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(15,), (), (16, 1), (16, 2)])
def test_packed_masks_that_do_not_fit_are_refused(shape):
    """6 rows of 9 and of 11 cells are 7 and 9 bytes; without prefixes, they are 5 and 5."""
    words, lens = words_of(GOLDEN).cpu(), torch.tensor([3, 5], dtype=torch.int32)
    out = torch.full(shape, 0xAB, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"out must be \[at least 16\] torch.uint8, got \["):
        interop.packed_mask(words, lens, out=out)
    assert (out == 0xAB).all()
    with pytest.raises(ValueError, match=r"out must be .* torch.uint8, got \[16\] torch.int8"):
        interop.packed_mask(words, lens, out=torch.empty(16, dtype=torch.int8))
    short = torch.empty(9, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"out must be \[at least .* got \[9\]"):
        interop.packed_mask(words.to(DEVICE), lens.to(DEVICE), out=short)


def test_words_that_name_no_node_are_told_from_the_path():
    words = words_of(GOLDEN)
    words[1, 2] |= 1 << 40
    links = [
        torch.tensor([getattr(t, name)() for t in GOLDEN], device=DEVICE)
        for name in ("next_token", "next_sibling")
    ]
    match = r"request 1, node 2: words name nodes \[0, 2, 40\], its path is \[0, 2\]"
    with pytest.raises(TreeError, match=match):
        interop.validate_tree(*links, words)
