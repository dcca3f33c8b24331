"""Shares of a batch's rows against brute force; packed rows and cut trees against plain Python."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from specattn.kernels.ragged import PackedRows, pack_rows, share_rows
from tests.kernels.tree_oracle import DEVICE, poisoned, random_tree


def shared(worth, rows, chunk, chunks) -> list[int]:
    lens = poisoned(len(rows)).int()
    rows = torch.tensor(rows, device=DEVICE)
    worth = torch.tensor(worth, dtype=torch.float32, device=DEVICE)
    share_rows(worth, rows, chunk=chunk, chunks=chunks, lens_out=lens)
    return lens.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_no_other_share_is_worth_more(implementation, seed):
    rng = random.Random(seed)
    chunk, parts, rows = rng.choice([1, 2, 3]), 4, [5, 0, 2, 7]
    chunks = rng.randint(4, 12)
    worth = [
        sorted((rng.randint(0, 40) / 8 for _ in range(chunk * parts)), reverse=True) for _ in rows
    ]
    lens = shared(worth, rows, chunk, chunks)
    live = [at for at, row in enumerate(rows) if row]
    assert all(lens[at] >= chunk for at in live)
    assert sum(lens) == chunks * chunk
    assert not lens[1], "padding gets what is left, and nothing is"

    def value(counts):
        return sum(sum(worth[at][: chunk * n]) for at, n in zip(live, counts, strict=True))

    counts = itertools.product(range(1, parts + 1), repeat=len(live))
    best = max(value(some) for some in counts if sum(some) <= chunks)
    assert value([lens[at] // chunk for at in live]) == best


def test_ties_and_what_is_no_number(implementation):
    nan, inf = float("nan"), float("inf")
    # equals: the lower chunk first, then the request that comes first
    assert shared([[1.0] * 6] * 3, [1, 2, 3], 2, 5) == [4, 4, 2]
    assert shared([[1.0] * 8] * 3, [1, 2, 3], 2, 8) == [6, 6, 4]
    # a chunk counts for no more than the one before it
    assert shared([[1, 0, 0, 9], [1, 1, 1, 0]], [1, 2], 1, 4) == [1, 3]
    assert shared([[1, nan, 5, 5], [1, -3, 0, 0], [1, inf, inf, 2]], [1, 2, 3], 1, 7) == [2, 1, 4]
    # padding has what nobody needs
    assert shared([[9.0] * 6, [1.0] * 6], [0, 9], 2, 4) == [2, 6]
    assert shared([[1.0] * 6, [1.0] * 6], [0, 0], 2, 4) == [4, 4]


@pytest.mark.parametrize(("batch", "nodes", "chunk"), [(1, 24, 8), (37, 40, 5), (64, 128, 16)])
def test_shares_of_many(batch, nodes, chunk):
    """Both implementations agree, and the sum is what there is."""
    from specattn.kernels.ragged import naive, triton

    generator = torch.Generator().manual_seed(batch)
    worth = torch.rand(batch, nodes, generator=generator).sort(1, descending=True).values
    rows = torch.randint(0, 4, (batch,), generator=generator)
    found = []
    for room in (naive, triton):
        lens = torch.full((batch,), -1, dtype=torch.int32, device=DEVICE)
        room.share_rows(worth.to(DEVICE), rows.to(DEVICE), chunk, 2 * batch, lens)
        found.append(lens.tolist())
    assert found[0] == found[1]
    assert sum(found[0]) == 2 * batch * chunk


@pytest.mark.parametrize(("nodes", "batch"), [(6, 4), (12, 1), (130, 5)])
def test_rows_are_the_first_nodes_of_each_tree(implementation, nodes, batch):
    rng = random.Random(nodes)
    wide = -(-nodes // 64)
    trees = [random_tree(rng, nodes, max_depth=5) for _ in range(batch)]
    seq = [rng.randint(0, 500) for _ in trees]
    lens = [rng.randint(1, nodes) for _ in trees]
    if batch > 2:
        lens[2] = lens[-1] = 0
    rows = sum(lens)

    def whole(values):
        return torch.tensor(values, device=DEVICE)

    tokens = torch.randint(1, 999, (batch, nodes), device=DEVICE)
    window = torch.randint(1, 9999, (batch, nodes + 3), device=DEVICE, dtype=torch.int32)
    positions = whole([[seq[b] + d for d in tree.depths()] for b, tree in enumerate(trees)])
    words = whole([tree.words(wide) for tree in trees])
    child, sibling = (
        whole([getattr(t, f"next_{x}")() for t in trees]) for x in ("token", "sibling")
    )
    before = [x.clone() for x in (positions, words, child, sibling)]
    out = PackedRows(
        poisoned(batch + 1).int(),
        poisoned(rows),
        poisoned(rows),
        poisoned(rows).int(),
        poisoned(rows),
        poisoned(batch, nodes).int(),
        poisoned(batch, nodes),
    )
    trees_ = tokens, positions, words, child, sibling
    pack_rows(whole(lens).int(), whole(seq).int(), window, *trees_, out=out)
    starts = [sum(lens[:b]) for b in range(batch + 1)]
    assert out.qo_indptr.tolist() == starts
    for b, length in enumerate(lens):
        mine = slice(starts[b], starts[b + 1])
        assert torch.equal(out.tokens[mine], tokens[b, :length])
        assert torch.equal(out.positions[mine], before[0][b, :length])
        assert torch.equal(out.slots[mine], window[b, :length])
        assert out.requests[mine].tolist() == [b] * length
        seen = [at if at < length else 0 for at in range(nodes)]
        assert torch.equal(out.tail_slots[b], window[b, seen])
        assert out.retrieve_index[b].tolist() == [min(starts[b] + at, rows - 1) for at in seen]
        for links, old in ((child, before[2]), (sibling, before[3])):
            wanted = [
                int(to) if at < length and to < length else -1 for at, to in enumerate(old[b])
            ]
            assert links[b].tolist() == wanted
        assert torch.equal(words[b, :length], before[1][b, :length])
        for at in range(length, nodes):  # padding, as link_tree makes it
            bits = [0] * wide
            bits[at // 64] = (1 << at % 64) - (1 << 64 if at % 64 == 63 else 0)
            assert words[b, at].tolist() == bits
            assert int(positions[b, at]) == seq[b]


def test_what_does_not_fit_is_refused():
    worth, rows = torch.zeros(3, 8), torch.ones(3, dtype=torch.int64)
    lens = torch.zeros(3, dtype=torch.int32)
    for chunk, chunks, problem in (
        (3, 9, "multiple of chunk 3 nodes above it, got 8"),
        (8, 9, "multiple of chunk 8 nodes above it, got 8"),
        (4, 2, r"chunks must be 3\.\.3 for 3 requests, got 2"),
        (2, 10, r"chunks must be 3\.\.9 for 3 requests, got 10"),
    ):
        with pytest.raises(ValueError, match=problem):
            share_rows(worth, rows, chunk=chunk, chunks=chunks, lens_out=lens)
    with pytest.raises(ValueError, match=r"worth must be \[B, n\] torch.float32"):
        share_rows(worth.double(), rows, chunk=4, chunks=3, lens_out=lens)
