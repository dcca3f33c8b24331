"""Grow a request's best-first tree, a warp per request.

The nodes are found one after another, best first. Every node has a list of children, whose order
is that of their ranks; the *head* of a list is its first child that is no node yet. The next node
is the best of all heads. Then two heads change: that of its parent's list moves on, and its own
list begins. Lists lie across the lanes of one warp, and a number tells all of a head. So a node
takes two reductions, which are single instructions on recent GPUs, and two reads of cached numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter
from specattn.kernels.tree.triton_build import ancestors

# a cost that no sum of log-probabilities reaches, and the least of what counts as one
IMPOSSIBLE = tl.constexpr(float("inf"))
LEAST = tl.constexpr(-1.0e30)


@triton.jit
def _cost(log_probs, depth, rank, L: tl.constexpr, K: tl.constexpr):
    """Load a child's negative log-probability, by its parent's depth."""
    known = (depth < L) & (rank < K)
    log_prob = tl.load(log_probs + depth * K + rank, mask=known, other=0)
    # NaN compares false
    cost = tl.maximum(tl.where(log_prob > LEAST, -log_prob, -LEAST), 0)
    return tl.where(known, cost, IMPOSSIBLE)


@triton.jit
def _grow(log_probs, node, N: tl.constexpr, L: tl.constexpr, K: tl.constexpr):
    """Return each node's head, first child and next sibling.

    The head is that by which it was found: ``depth << 16 | parent << 8 | rank``, where depth is the
    parent's. Among equal costs the lowest head wins. The root has the head -1.

    Costs are no negative numbers, and so in the order of their bits.
    """
    cost = tl.zeros_like(node).to(tl.float32)
    # a sum is never -0
    first = cost + _cost(log_probs, 0, 0, L, K)
    key = tl.where(node == 0, first, IMPOSSIBLE).to(tl.int32, bitcast=True)
    head = tl.zeros_like(node)
    none = tl.full(node.shape, -1, tl.int32)
    found, first_child, sibling = none, none, none
    for new in range(1, N):
        best = tl.min(key, 0)
        taken = tl.min(tl.where(key == best, head, 0x7FFFFFFF), 0)
        own = best.to(tl.float32, bitcast=True)
        depth, parent, rank = taken >> 16, (taken >> 8) & 0xFF, taken & 0xFF
        after = (cost + _cost(log_probs, depth, rank + 1, L, K)).to(tl.int32, bitcast=True)
        below = (own + _cost(log_probs, depth + 1, 0, L, K)).to(tl.int32, bitcast=True)

        key = tl.where(node == parent, after, key)
        key = tl.where(node == new, below, key)
        head = tl.where(node == parent, taken + 1, head)
        head = tl.where(node == new, ((depth + 1) << 16) | (new << 8), head)
        cost = tl.where(node == new, own, cost)
        first_child = tl.where((node == parent) & (rank == 0), new, first_child)
        # the next older sibling has the rank before
        sibling = tl.where((found == taken - 1) & (rank > 0), new, sibling)
        found = tl.where(node == new, taken, found)
    return found, first_child, sibling


@triton.jit
def best_first_kernel(
    log_probs,  # [B, L, K] float32
    tokens,  # [B, L, K] int64
    bonus_tokens,  # [B] int64
    seq_lens,  # [B] int32
    out,  # see `build.written`
    node_rounds,
    stride_log_probs,
    stride_tokens,
    N: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find a request's best nodes; link and mask them."""
    tokens_out, positions_out, words_out, next_token_out, next_sibling_out = out
    req = tl.program_id(0).to(tl.int64)
    enter(PDL)
    node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    log_probs += req * stride_log_probs
    found, first_child, sibling = _grow(log_probs, node, N, L, K)

    inside = node < N
    drafted = found >= 0
    parent = tl.where(drafted, (found >> 8) & 0xFF, -1)
    place = (found >> 16) * K + (found & 0xFF)
    token = tl.load(tokens + req * stride_tokens + place, mask=drafted, other=0)
    token = tl.where(node == 0, tl.load(bonus_tokens + req), token)
    words, depth = ancestors(parent, node, node_rounds, BLOCK_N, BLOCK_W)

    at = req * N + node
    tl.store(tokens_out + at, token, mask=inside)
    tl.store(positions_out + at, tl.load(seq_lens + req) + depth, mask=inside)
    tl.store(next_token_out + at, first_child, mask=inside)
    tl.store(next_sibling_out + at, sibling, mask=inside)
    word = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    cell = at[:, None] * W + word[None, :]
    tl.store(words_out + cell, words, mask=inside[:, None] & (word < W)[None, :])
