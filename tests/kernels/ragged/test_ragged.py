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
    chunks = rng.randint(4, 10)
    worth = [
        sorted((rng.randint(0, 40) / 8 for _ in range(chunk * parts)), reverse=True) for _ in rows
    ]
    lens = shared(worth, rows, chunk, chunks)
    live = [at for at, row in enumerate(rows) if row]
    assert lens[1] == 0
    assert all(lens[at] >= chunk for at in live)
    assert sum(lens) == min(chunks, len(live) * parts) * chunk

    def value(counts):
        return sum(sum(worth[at][: chunk * n]) for at, n in zip(live, counts, strict=True))

    counts = itertools.product(range(1, parts + 1), repeat=len(live))
    best = max(value(some) for some in counts if sum(some) <= chunks)
    assert value([lens[at] // chunk for at in live]) == best


def test_ties_and_what_is_no_number(implementation):
    nan, inf = float("nan"), float("inf")
    # equals: the lower chunk first, then the request that comes first
    assert shared([[1.0] * 6] * 3, [1, 2, 3], 2, 5) == [4, 4, 2]
    assert shared([[1.0] * 6] * 3, [1, 2, 3], 2, 7) == [6, 4, 4]
    # a chunk counts for no more than the one before it
    assert shared([[1, 0, 0, 9], [1, 1, 1, 0]], [1, 2], 1, 4) == [1, 3]
    assert shared([[1, nan, 5, 5], [1, -3, 0, 0], [1, inf, inf, 2]], [1, 2, 3], 1, 7) == [2, 1, 4]
    # nobody needs what is left
    assert shared([[1.0] * 4, [1.0] * 4], [0, 9], 2, 4) == [0, 4]
    assert shared([[1.0] * 4, [1.0] * 4], [0, 0], 2, 4) == [0, 0]


@pytest.mark.parametrize(("batch", "nodes", "chunk"), [(1, 16, 8), (37, 40, 5), (64, 128, 16)])
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
    most = int((rows > 0).sum()) * nodes
    assert sum(found[0]) == min(2 * batch * chunk, most)


@pytest.mark.parametrize(("nodes", "chunk", "batch"), [(6, 2, 4), (12, 4, 1), (130, 13, 5)])
def test_rows_are_the_first_nodes_of_each_tree(implementation, nodes, chunk, batch):
    rng = random.Random(nodes)
    parts, wide = nodes // chunk, -(-nodes // 64)
    trees = [random_tree(rng, nodes, max_depth=5) for _ in range(batch)]
    table = [rng.randint(1, 99) if batch == 1 or at != 2 else 0 for at in range(batch)]
    seq = [rng.randint(1, 500) if row else 0 for row in table]
    lens = [rng.randint(1, parts) * chunk if row else 0 for row in table]
    chunks = sum(lens) // chunk + 2

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
    index = poisoned(batch, nodes)
    out = PackedRows(
        poisoned(chunks),
        poisoned(chunks).int(),
        poisoned(chunks, chunk),
        poisoned(chunks, chunk),
        poisoned(chunks, chunk, wide),
        poisoned(chunks, chunk).int(),
        poisoned(chunks, nodes).int(),
        poisoned(chunks, nodes),
        poisoned(chunks),
    )
    pack_rows(
        whole(lens).int(),
        whole(table),
        whole(seq).int(),
        window,
        tokens,
        positions,
        words,
        child,
        sibling,
        index_out=index,
        out=out,
    )
    nth = 0
    for b in range(batch):
        for j in range(lens[b] // chunk):
            mine = slice(j * chunk, (j + 1) * chunk)
            assert (int(out.rows[nth]), int(out.seq_lens[nth])) == (table[b], seq[b])
            assert int(out.requests[nth]) == b
            assert torch.equal(out.tokens[nth], tokens[b, mine])
            assert torch.equal(out.positions[nth], before[0][b, mine])
            assert torch.equal(out.words[nth], before[1][b, mine])
            assert torch.equal(out.slots[nth], window[b, mine])
            seen = [at if at < lens[b] else 0 for at in range(nodes)]
            assert torch.equal(out.tail_slots[nth], window[b, seen])
            assert torch.equal(out.tail_positions[nth], before[0][b, seen])
            assert index[b, mine].tolist() == [nth * chunk + at for at in range(chunk)]
            nth += 1
        for links, old in ((child, before[2]), (sibling, before[3])):
            wanted = [
                int(to) if at < lens[b] and to < lens[b] else -1 for at, to in enumerate(old[b])
            ]
            assert links[b].tolist() == wanted
        for at in range(lens[b], nodes):  # padding, as link_tree makes it
            bits = [0] * wide
            bits[at // 64] = (1 << at % 64) - (1 << 64 if at % 64 == 63 else 0)
            assert words[b, at].tolist() == bits
            assert int(positions[b, at]) == seq[b]
            assert int(index[b, at]) == (int(index[b, 0]) if lens[b] else 0)
    for n in range(nth, chunks):  # padding sees slot 0
        for tensor in (out.rows, out.seq_lens, out.tokens, out.positions, out.slots):
            assert not tensor[n].any()
        assert not out.tail_slots[n].any()
        assert out.words[n, :, 0].tolist() == [1] * chunk
        assert not out.words[n, :, 1:].any()


def test_what_does_not_fit_is_refused():
    worth, rows = torch.zeros(3, 8), torch.ones(3, dtype=torch.int64)
    lens = torch.zeros(3, dtype=torch.int32)
    for chunk, chunks, problem in (
        (3, 9, "multiple of chunk 3 nodes above it, got 8"),
        (8, 9, "multiple of chunk 8 nodes above it, got 8"),
        (4, 2, "chunks must be at least 3, one per request, got 2"),
    ):
        with pytest.raises(ValueError, match=problem):
            share_rows(worth, rows, chunk=chunk, chunks=chunks, lens_out=lens)
    with pytest.raises(ValueError, match=r"worth must be \[B, n\] torch.float32"):
        share_rows(worth.double(), rows, chunk=4, chunks=4, lens_out=lens)
