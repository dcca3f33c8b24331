"""Select, number, link and mask a tree's nodes, a request per program."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter
from specattn.kernels.sampling.keys import score_key


@triton.jit
def _gather_pair(first, second, index):
    """Gather from two int32 rows in one pass."""
    pair = (first.to(tl.int64) << 32) | (second.to(tl.int64) & 0xFFFFFFFF)
    pair = tl.gather(pair, index, 0)
    return (pair >> 32).to(tl.int32), pair.to(tl.int32)


@triton.jit
def _group_floors(scores, parents, num_groups, rounds, TOPK: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return groups' parent candidates, -1 for none, and lowest keys above.

    Every round of pointer doubling looks twice as far up.
    """
    group = tl.arange(0, BLOCK_G)  # [BLOCK_G]
    parent = tl.load(parents + group, mask=(group > 0) & (group < num_groups), other=-1)
    # A parent lies in a shallower step than its children: no cycle, no read outside the row.
    known = (parent >= 0) & (parent < TOPK + (group - 1) // TOPK * TOPK * TOPK)
    parent = tl.where(known, parent, -1).to(tl.int32)
    floor = score_key(tl.load(scores + parent, mask=known, other=float("inf")))
    # orphans rank last
    floor = tl.where(known | (group == 0), floor, -0x80000000)
    jump = tl.maximum(parent, 0) // TOPK
    for _ in range(rounds):
        higher, jump = _gather_pair(floor, jump, jump)
        floor = tl.minimum(floor, higher)
    return parent, floor


@triton.jit
def _number_best(key, live, keep):
    """Number the ``keep`` largest keys from 1 in order, lower indices first.

    The threshold is sought by thirds between the extremes, and found once it parts the keys as
    wanted: distinct keys take about log3 of their number in steps, equal ones at most 21.
    """
    low = tl.min(tl.where(live, key, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(live, key, -0x80000000), 0)
    found = keep + 1
    while (low < high) & (found != keep):
        span = high.to(tl.int64) - low
        third = (span.to(tl.uint32) // 3).to(tl.int64)
        upper = (high - third).to(tl.int32)
        lower = (low + span - 2 * third).to(tl.int32)
        # both counts in one sum
        counts = (key >= lower).to(tl.int32) + ((key >= upper).to(tl.int32) << 16)
        counts = tl.sum(tl.where(live, counts, 0), 0)
        found = tl.where(counts >> 16 >= keep, counts >> 16, counts & 0xFFFF)
        high = tl.where(counts >> 16 >= keep, high, tl.where(found >= keep, upper, lower) - 1)
        low = tl.where(counts >> 16 >= keep, upper, tl.where(found >= keep, lower, low))
    above = live & (key > low)
    tie = live & (key == low)
    room = keep - tl.sum(above.to(tl.int32), 0)
    # both counts in one scan
    counts = tl.cumsum(above.to(tl.int32) + (tie.to(tl.int32) << 16), 0)
    ties = counts >> 16
    kept = above | (tie & (ties <= room))
    return kept, (counts & 0xFFFF) + tl.minimum(ties, room)


@triton.jit
def ancestors(parent, node, rounds, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return each node's ancestor words and depth by pointer doubling."""
    word = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    bit = tl.full([BLOCK_N, BLOCK_W], 1, tl.int64) << (node % 64)[:, None].to(tl.int64)
    words = tl.where((node // 64)[:, None] == word[None, :], bit, 0)  # [BLOCK_N, BLOCK_W]
    depth = (parent >= 0).to(tl.int32)
    jump = tl.maximum(parent, 0)
    for _ in range(rounds):
        words |= tl.gather(words, tl.broadcast_to(jump[:, None], [BLOCK_N, BLOCK_W]), 0)
        higher, jump = _gather_pair(depth, jump, jump)
        depth += higher
    return words, depth


@triton.jit
def _child_links(parent, node, N, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return each node's first child and next sibling, ascending; -1 for none."""
    first_child = tl.full([BLOCK_N], N, tl.int32)
    sibling = tl.full([BLOCK_N], N, tl.int32)
    for first in range(0, N, BLOCK_S):
        other = first + tl.arange(0, BLOCK_S)  # [BLOCK_S]
        other_parent = tl.gather(parent, other, 0)
        other, other_parent = other[:, None], other_parent[:, None]
        # nodes lie across lanes, so that a lane folds its own column
        child = other_parent == node[None, :]  # [BLOCK_S, BLOCK_N]
        first_child = tl.minimum(first_child, tl.min(tl.where(child, other, N), 0))
        later = (other_parent == parent[None, :]) & (other > node[None, :])
        sibling = tl.minimum(sibling, tl.min(tl.where(later, other, N), 0))
    return tl.where(first_child < N, first_child, -1), tl.where(sibling < N, sibling, -1)


@triton.jit
def build_tree_kernel(
    scores,  # [B, C] float32
    tokens,  # [B, C] int64
    parents,  # [B, G] int64
    bonus_tokens,  # [B] int64
    seq_lens,  # [B] int32
    out,  # see `build.written`; links to siblings hold the nodes' parents on the way
    num_candidates,
    num_groups,
    group_rounds,
    node_rounds,
    stride_scores,
    stride_tokens,
    stride_parents,
    N: tl.constexpr,
    W: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keep a request's best candidates; link and mask them."""
    tokens_out, positions_out, words_out, next_token_out, next_sibling_out = out
    req = tl.program_id(0).to(tl.int64)
    enter(PDL)
    scores += req * stride_scores
    tokens_out += req * N
    next_sibling_out += req * N

    # everything that does not depend on the selection is read at once
    flat = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    live = flat < num_candidates
    key = score_key(tl.load(scores + flat, mask=live, other=0))
    token = tl.load(tokens + req * stride_tokens + flat, mask=live, other=0)
    root_token = tl.load(bonus_tokens + req)
    root_position = tl.load(seq_lens + req)
    above, floor = _group_floors(
        scores, parents + req * stride_parents, num_groups, group_rounds, TOPK, BLOCK_G
    )
    group = tl.minimum(flat // TOPK, BLOCK_G - 1)
    above, floor = _gather_pair(above, floor, group)  # [BLOCK_C]
    key = tl.minimum(key, floor)

    kept, number = _number_best(key, live, N - 1)
    # no parent: the root, as for its own children
    parent = tl.where(above >= 0, tl.gather(number, tl.maximum(above, 0), 0), 0)
    tl.store(tokens_out + number, token, mask=kept)
    tl.store(next_sibling_out + number, parent.to(tl.int64), mask=kept)
    tl.store(tokens_out, root_token)
    tl.store(next_sibling_out, -1)
    tl.debug_barrier()

    node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = node < N
    parent = tl.load(next_sibling_out + node, mask=inside, other=-2).to(tl.int32)
    next_token, next_sibling = _child_links(parent, node, N, BLOCK_N, BLOCK_S)
    words, depth = ancestors(parent, node, node_rounds, BLOCK_N, BLOCK_W)
    tl.debug_barrier()

    tl.store(next_token_out + req * N + node, next_token, mask=inside)
    tl.store(next_sibling_out + node, next_sibling, mask=inside)
    tl.store(positions_out + req * N + node, root_position + depth, mask=inside)
    word = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    cell = (req * N + node)[:, None] * W + word[None, :]
    tl.store(words_out + cell, words, mask=inside[:, None] & (word < W)[None, :])


@triton.jit
def link_tree_kernel(
    tokens,  # [B, N] int64
    parents,  # [B, N] int64
    seq_lens,  # [B] int32
    chosen,  # [B] int32, or None
    out,  # see `build.written`
    node_rounds,
    stride_tokens,
    stride_parents,
    N: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Link and mask a request's nodes."""
    tokens_out, positions_out, words_out, next_token_out, next_sibling_out = out
    req = tl.program_id(0).to(tl.int64)
    enter(PDL)
    node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = node < N
    if chosen is not None:
        inside = inside & (tl.load(chosen + req) != 0)
    at = req * N + node
    parent = tl.load(parents + req * stride_parents + node, mask=inside, other=-1)
    known = (parent >= 0) & (parent < node)
    parent = tl.where(known, parent, -1).to(tl.int32)
    # no two nodes of padding are siblings
    next_token, next_sibling = _child_links(
        tl.where(known, parent, -1 - node), node, N, BLOCK_N, BLOCK_S
    )
    words, depth = ancestors(parent, node, node_rounds, BLOCK_N, BLOCK_W)
    word = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    # padding has no ancestor, nor has the root
    lone = (known == 0)[:, None] & (word == 0)[None, :] & (node > 0)[:, None]
    words = tl.where(lone, words & -2, words)

    token = tl.load(tokens + req * stride_tokens + node, mask=inside, other=0)
    tl.store(tokens_out + at, token, mask=inside)
    tl.store(positions_out + at, tl.load(seq_lens + req) + depth, mask=inside)
    tl.store(next_token_out + at, next_token, mask=inside)
    tl.store(next_sibling_out + at, next_sibling, mask=inside)
    cell = at[:, None] * W + word[None, :]
    tl.store(words_out + cell, words, mask=inside[:, None] & (word < W)[None, :])
