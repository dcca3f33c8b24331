"""Masks in foreign spellings against cell-by-cell loops."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from specattn.masks import (
    full_mask,
    mask_indptr,
    mask_words,
    packed_indptr,
    packed_mask,
    qlen_from_full,
    qlen_mask,
    words_from_mask,
)
from tests.kernels.tree_oracle import DEVICE, Tree, random_tree

GOLDEN = [Tree([], [-1, 0, 0, 1, 1, 3]), Tree([], [-1, 0, 0, 1, 2, 4])]


def words_of(trees):
    n = len(trees[0].parent)
    return torch.tensor([t.words(mask_words(n)) for t in trees], device=DEVICE)


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
    assert mask_indptr(lens, 6).tolist() == [0, 54, 120]
    mask = full_mask(words, lens)
    assert len(mask) == 120
    rows = ["".join("01"[x] for x in row) for row in qlen_mask(words)[0].int().tolist()]
    assert rows == ["100000", "110000", "101000", "110100", "110010", "110101"]


# R54: word and byte edges
@pytest.mark.parametrize("n", [1, 2, 7, 31, 32, 33, 63, 64, 65, 129])
def test_spellings_agree(n, implementation):
    rng = random.Random(n)
    lens = [0, 5, 64, 3]
    trees = [random_tree(rng, n, 9) for _ in lens]
    words, device_lens = words_of(trees), lens_of(lens)
    expect = cells(trees, lens)
    assert full_mask(words, device_lens).tolist() == [x for row in expect for x in row]

    packed = [np.packbits(row, bitorder="little").tolist() for row in expect]
    flat = [x for row in packed for x in row]
    assert packed_mask(words, device_lens).tolist() == flat
    assert packed_indptr(device_lens, n).tolist() == np.cumsum([0, *map(len, packed)]).tolist()
    out = torch.full((len(flat) + 5,), 0xAB, dtype=torch.uint8, device=DEVICE)
    assert packed_mask(words, device_lens, out=out).tolist() == flat + [0] * 5

    square = qlen_mask(words)
    assert torch.equal(words_from_mask(square), words)
    assert square.tolist() == [
        [[j in t.ancestors(q) for j in range(n)] for q in range(n)] for t in trees
    ]


def test_masks_may_be_wider_than_their_rows():
    mask = torch.rand(2, 3, 70, device=DEVICE) < 0.5
    words = words_from_mask(mask)
    assert words.shape == (2, 3, 2)
    assert torch.equal(qlen_mask(words, keys=70), mask)


@pytest.mark.parametrize("n", [1, 7, 65])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("length", [torch.int32, torch.int64])
def test_the_tree_of_a_full_mask(n, dtype, length):
    seen = torch.rand(3, n, n, device=DEVICE) < 0.5
    lens = torch.tensor([4, 0, 9], dtype=length, device=DEVICE)
    full = full_mask(words_from_mask(seen), lens).to(dtype)
    out = torch.zeros(4 * n * n, dtype=torch.bool, device=DEVICE)
    have = qlen_from_full(full, lens, n, out=out)
    assert torch.equal(have.view(3, n, n), seen)
    assert torch.equal(have, out[: 3 * n * n])
    assert not out[3 * n * n :].any()
    with pytest.raises(ValueError, match=f"out must be .at least {3 * n * n}"):
        qlen_from_full(full, lens, n, out=out[: 3 * n * n - 1])


def test_a_mask_of_trees_alone_is_taken_as_it_is():
    seen = torch.rand(2, 5, 5, device=DEVICE) < 0.5
    out = torch.zeros(50, dtype=torch.bool, device=DEVICE)
    qlen_from_full(seen.flatten(), lens_of([3, 4]), 5, out=out)
    assert torch.equal(out.view(2, 5, 5), seen)


@pytest.mark.parametrize("shape", [(15,), (), (16, 1), (16, 2)])
def test_packed_masks_that_do_not_fit_are_refused(shape):
    """6 rows of 9 and of 11 cells are 7 and 9 bytes; without prefixes, they are 5 and 5."""
    words, lens = words_of(GOLDEN).cpu(), torch.tensor([3, 5], dtype=torch.int32)
    out = torch.full(shape, 0xAB, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"out must be \[at least 16\] torch.uint8, got \["):
        packed_mask(words, lens, out=out)
    assert (out == 0xAB).all()
    with pytest.raises(ValueError, match=r"out must be .* torch.uint8, got \[16\] torch.int8"):
        packed_mask(words, lens, out=torch.empty(16, dtype=torch.int8))
    short = torch.empty(9, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"out must be \[at least .* got \[9\]"):
        packed_mask(words.to(DEVICE), lens.to(DEVICE), out=short)


def test_no_request_has_an_empty_mask(implementation):
    words = torch.zeros(0, 65, 2, dtype=torch.int64, device=DEVICE)
    assert full_mask(words, lens_of([])).shape == packed_mask(words, lens_of([])).shape == (0,)
    out = torch.full((3,), 0xAB, dtype=torch.uint8, device=DEVICE)
    assert packed_mask(words, lens_of([]), out=out) is out
    assert out.tolist() == [0, 0, 0]
