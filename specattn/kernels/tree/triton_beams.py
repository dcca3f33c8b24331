"""Score and rank the children of beams: one program per request."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter
from specattn.kernels.sampling.keys import score_key


@triton.jit
def _rank_all(key, BLOCK: tl.constexpr):
    """Count the keys before each: larger, or equal of lower index."""
    flat = tl.arange(0, BLOCK)
    # columns are ranked, so that the sums stay within threads
    larger = key[:, None] > key[None, :]  # [BLOCK, BLOCK]
    tie = (key[:, None] == key[None, :]) & (flat[:, None] < flat[None, :])
    return tl.sum((larger | tie).to(tl.int32), 0)


@triton.jit
def _rank_best(key, keep, BLOCK: tl.constexpr):
    """Rank the ``keep`` first keys in turn; the rest get ``keep``."""
    flat = tl.arange(0, BLOCK)
    # the low half makes keys distinct and prefers the lower index
    key = key.to(tl.int64) * 4294967296 + (BLOCK - flat)
    rank = tl.full([BLOCK], keep, tl.int32)
    for nth in range(keep):
        best = tl.max(key, 0)
        rank = tl.where(key == best, nth, rank)
        key = tl.where(key == best, -0x8000000000000000, key)
    return rank


@triton.jit
def select_kernel(
    child_probs,  # [B, BEAMS, TOPK] float32
    child_tokens,  # [B, BEAMS, TOPK] int64
    path_scores,  # [B, BEAMS] float32, or None: the root's
    path_words,  # [B, BEAMS, W] int64, or None: the root's, or nobody's
    candidate_scores,  # [B, C] float32, out
    candidate_tokens,  # [B, C] int64, out
    candidate_parents,  # [B, G] int64, out
    scores_out,  # [B, TOPK] float32, out; None, as the next three, where no beams are kept
    tokens_out,  # [B, TOPK] int64, out
    rows_out,  # [B, TOPK] int64, out
    words_out,  # [B, TOPK, W] int64, out
    step,
    offset,
    stride_candidates,
    stride_parents,
    stride_path_words,
    stride_words,
    W: tl.constexpr,
    BEAMS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Record all beams' children, and keep the best; a request per program."""
    req = tl.program_id(0).to(tl.int64)
    enter(PDL)
    flat = tl.arange(0, BLOCK)  # [BLOCK]
    live = flat < BEAMS * TOPK
    beam = flat // TOPK
    word = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    bits = tl.zeros([BLOCK, BLOCK_W], tl.int64)
    if path_words is not None:
        # every child's words to come, loaded with the scores and not after them
        above = path_words + req * stride_path_words + beam[:, None] * W + word[None, :]
        bits = tl.load(above, mask=live[:, None] & (word < W)[None, :], other=0)
    child = req * BEAMS * TOPK + flat
    score = tl.load(child_probs + child, mask=live, other=0)
    if path_scores is not None:
        score *= tl.load(path_scores + req * BEAMS + beam, mask=live, other=0)
    token = tl.load(child_tokens + child, mask=live, other=0)
    column = req * stride_candidates + offset + flat
    tl.store(candidate_scores + column, score, mask=live)
    tl.store(candidate_tokens + column, token, mask=live)
    if offset == 0:
        tl.store(candidate_parents + req * stride_parents, -1)
    if rows_out is not None:
        # those past the last child come last: NaN ranks there, too, at a lower index
        key = tl.where(live, score_key(score), -0x80000000)
        rank = _rank_all(key, BLOCK) if BLOCK <= 256 else _rank_best(key, TOPK, BLOCK)
        chosen = rank < TOPK
        out = req * TOPK + rank
        tl.store(scores_out + out, score, mask=chosen)
        tl.store(tokens_out + out, token, mask=chosen)
        tl.store(rows_out + out, req * BEAMS + beam, mask=chosen)
        node = step * TOPK + rank
        parent = candidate_parents + req * stride_parents + 1 + node
        tl.store(parent, (offset + flat).to(tl.int64), mask=chosen)
        own = tl.full([BLOCK, BLOCK_W], 1, tl.int64) << (node % 64)[:, None]
        bits = tl.where(word[None, :] == (node // 64)[:, None], bits | own, bits)
        cell = words_out + req * stride_words + rank[:, None] * W + word[None, :]
        tl.store(cell, bits, mask=chosen[:, None] & (word < W)[None, :])


@triton.jit
def grow_words_kernel(
    words,  # [B, steps, TOPK, W] int64, in place
    parents,  # [B, TOPK], or None: the root's children
    step,
    stride_words,
    stride_parent,
    stride_parent_k,
    FLAT: tl.constexpr,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write one step's words of a request."""
    enter(PDL)
    req = tl.program_id(0).to(tl.int64)
    branch = tl.arange(0, BLOCK)  # [BLOCK]
    word = tl.arange(0, BLOCK_W)[None, :]  # [1, BLOCK_W]
    mine = (branch < TOPK)[:, None] & (word < W)
    node = step * TOPK + branch
    own = tl.full([BLOCK, BLOCK_W], 1, tl.int64) << (node % 64)[:, None]
    bits = tl.where(word == (node // 64)[:, None], own, 0)
    if parents is not None:
        at = parents + req * stride_parent + branch * stride_parent_k
        parent = tl.load(at, mask=branch < TOPK, other=0)
        if FLAT:
            first = TOPK + (step - 1) * TOPK * TOPK
            parent = tl.maximum(parent - first, 0) // TOPK
        parent = tl.minimum(tl.maximum(parent, 0), TOPK - 1)
        above = words + req * stride_words + ((step - 1) * TOPK + parent[:, None]) * W + word
        bits |= tl.load(above, mask=mine, other=0)
    tl.store(words + req * stride_words + node[:, None] * W + word, bits, mask=mine)
