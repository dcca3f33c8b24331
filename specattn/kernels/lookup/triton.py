"""Prompt lookup: search and merge.

Programs share a text, a slice of blocks each, and find their own best matches. A match is one
number, ``length << 24 | place``: the larger is the better. One program per request then takes the
best of all slices, and merges what follows them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter

# a key's bits below the match's length
PLACE_BITS = tl.constexpr(24)
PLACES = tl.constexpr(0xFFFFFF)
LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _match_keys(text, last, place, shortest, longest):
    """Return ``length << 24 | place`` of each place's match, or 0."""
    alive = place < last
    length = tl.zeros_like(place)
    back = 0
    # hardly any block has a match of one token, fewer have one of two
    while (back < longest) & (tl.max(alive.to(tl.int32), 0) > 0):
        want = tl.load(text + last - back)
        alive = alive & (place >= back)
        got = tl.load(text + place - back, mask=alive, other=0)
        alive = alive & (got == want)
        length += alive.to(tl.int32)
        back += 1
    return tl.where(length >= shortest, (length << PLACE_BITS) | place, 0)


@triton.jit
def search_kernel(
    text,  # [R, context] int32
    rows,  # [B] int64
    seq_lens,  # [B] int32
    keys_out,  # [B, slices, M] int32, out
    matches,
    shortest,
    longest,
    stride,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the best matches in one slice of a request's text."""
    share, slices = tl.program_id(0), tl.num_programs(0)
    req = tl.program_id(1).to(tl.int64)
    enter(PDL)
    text += tl.load(rows + req) * stride
    last = tl.load(seq_lens + req)
    rank = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    # a place of its own for each match that counts
    kept = tl.where(rank < matches, 0, LARGEST)
    worst = tl.full([], 0, tl.int32)
    blocks = tl.cdiv(last, BLOCK)
    # the latest block first: an earlier match of the same length is none better
    for number in range(share, blocks, slices):
        place = (blocks - 1 - number) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        key = _match_keys(text, last, place, shortest, longest)
        best = tl.max(key, 0)
        while best > worst:
            slot = tl.min(tl.where(kept == worst, rank, BLOCK_M), 0)
            kept = tl.where(rank == slot, best, kept)
            worst = tl.min(kept, 0)
            key = tl.where(key == best, 0, key)
            best = tl.max(key, 0)
    ptr = keys_out + (req * slices + share) * matches + rank
    tl.store(ptr, kept, mask=rank < matches)


@triton.jit
def merge_kernel(
    text,  # [R, context] int32
    rows,  # [B] int64
    seq_lens,  # [B] int32
    keys,  # [B, K] int32
    tokens_out,  # [B, N] int64, out
    parents_out,  # [B, N] int64, out
    ngrams_out,  # [B] int32, out
    num_keys,
    matches,
    steps,
    nodes,
    stride,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take a request's best matches; merge what follows them."""
    req = tl.program_id(0).to(tl.int64)
    enter(PDL)
    text += tl.load(rows + req) * stride
    last = tl.load(seq_lens + req)
    tokens_out += req * nodes
    parents_out += req * nodes

    at = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    key = tl.load(keys + req * num_keys + at, mask=at < num_keys, other=0)
    rank = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    found = tl.zeros([BLOCK_M], tl.int32)
    for i in range(matches):
        best = tl.max(key, 0)
        key = tl.where(key == best, 0, key)
        found = tl.where(rank == i, best, found)
    count = tl.sum((found > 0).to(tl.int32), 0)
    tl.store(ngrams_out + req, tl.max(found, 0) >> PLACE_BITS)

    ahead = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    drafted = (ahead < steps)[None, :] & (found > 0)[:, None]
    after = tl.where(found > 0, (found & PLACES) + 1, last)
    place = after[:, None] + ahead[None, :] % (last - after + 1)[:, None]
    proposed = tl.load(text + place, mask=drafted, other=-1)  # [BLOCK_M, BLOCK_S]

    number = tl.zeros([BLOCK_M, BLOCK_S], tl.int32)
    size = tl.full([], 1, tl.int32)
    for i in range(count):
        row = (rank == i)[:, None]
        own = tl.sum(tl.where(row, proposed, 0), 0)  # [BLOCK_S]
        # tokens that each earlier proposal has in common with it
        other = (proposed != own[None, :]) | (ahead >= steps)[None, :]
        shared = tl.min(tl.where(other, ahead[None, :], BLOCK_S), 1)
        shared = tl.minimum(tl.where(rank < i, shared, 0), steps)
        common = tl.max(shared, 0)
        nearest = tl.min(tl.where(shared == common, rank, BLOCK_M), 0)
        near = tl.sum(tl.where((rank == nearest)[:, None], number, 0), 0)
        new = ahead >= common
        mine = tl.where(new, size + ahead - common, near)
        number = tl.where(row, mine[None, :], number)
        # a proposal's new nodes are a chain below the last one it shares
        fork = tl.sum(tl.where(ahead == common - 1, near, 0), 0)
        parent = tl.where(ahead == common, fork, mine - 1)
        fits = new & (ahead < steps) & (mine < nodes)
        tl.store(tokens_out + mine, own.to(tl.int64), mask=fits)
        tl.store(parents_out + mine, parent.to(tl.int64), mask=fits)
        size += steps - common

    node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    root = node == 0
    newest = tl.load(text + last)
    rest = root | ((node >= size) & (node < nodes))
    tl.store(tokens_out + node, tl.where(root, newest, 0).to(tl.int64), mask=rest)
    tl.store(parents_out + node, tl.full([BLOCK_N], -1, tl.int64), mask=rest)


@triton.jit
def append_kernel(
    text,  # [R, context] int32, out
    rows,  # [B] int64
    seq_lens,  # [B] int32
    tokens,  # [B, D] int64
    lens,  # [B] int32
    context,
    width,
    stride_text,
    stride_tokens,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write what one request gained."""
    req = tl.program_id(0).to(tl.int64)
    enter(PDL)
    row = tl.load(rows + req)
    count = tl.minimum(tl.load(lens + req), width)
    at = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    place = tl.load(seq_lens + req) + 1 + at
    new = (row != 0) & (at < count) & (place < context)
    token = tl.load(tokens + req * stride_tokens + at, mask=new, other=0)
    tl.store(text + row * stride_text + place, token.to(tl.int32), mask=new)
