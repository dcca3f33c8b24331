"""Pick the beams of the next draft step: one launch between two draft forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.checks import require_dense
from specattn.kernels.launch import enter, launch_options
from specattn.kernels.reference.beam import candidate_offset, check_beams

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def score_key(score):
    """Map float32 to int32 keys of the same order, NaN below everything, -0 equal to 0."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(score == score, key, -0x80000000)


@triton.jit
def _record_children(
    req,
    offset,
    child_probs,
    child_tokens,
    path_scores,
    candidate_scores,
    candidate_tokens,
    candidate_parents,
    stride_candidates,
    stride_parents,
    BEAMS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the children of all beams to this step's candidate columns; return them."""
    flat = tl.arange(0, BLOCK)  # [BLOCK]
    live = flat < BEAMS * TOPK
    child = req * BEAMS * TOPK + flat
    score = tl.load(child_probs + child, mask=live, other=0)
    if path_scores is not None:
        score *= tl.load(path_scores + req * BEAMS + flat // TOPK, mask=live, other=0)
    token = tl.load(child_tokens + child, mask=live, other=0)
    column = req * stride_candidates + offset + flat
    tl.store(candidate_scores + column, score, mask=live)
    tl.store(candidate_tokens + column, token, mask=live)
    if offset == 0:
        tl.store(candidate_parents + req * stride_parents, -1)
    return score, token


@triton.jit
def _append_kernel(
    child_probs,  # [B, BEAMS, TOPK] float32
    child_tokens,  # [B, BEAMS, TOPK] int64
    path_scores,  # [B, BEAMS] float32, or None: the root's
    candidate_scores,  # [B, C] float32, out
    candidate_tokens,  # [B, C] int64, out
    candidate_parents,  # [B, G] int64, out
    offset,
    stride_candidates,
    stride_parents,
    BEAMS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    _record_children(
        tl.program_id(0).to(tl.int64),
        offset,
        child_probs,
        child_tokens,
        path_scores,
        candidate_scores,
        candidate_tokens,
        candidate_parents,
        stride_candidates,
        stride_parents,
        BEAMS,
        TOPK,
        BLOCK,
    )


@triton.jit
def _rank_all(key, BLOCK: tl.constexpr):
    """Count the keys that come before each one: larger ones, and equal ones of a lower index."""
    flat = tl.arange(0, BLOCK)
    # columns are ranked, so that the sums stay within threads
    larger = key[:, None] > key[None, :]  # [BLOCK, BLOCK]
    tie = (key[:, None] == key[None, :]) & (flat[:, None] < flat[None, :])
    return tl.sum((larger | tie).to(tl.int32), 0)


@triton.jit
def _rank_best(key, keep, BLOCK: tl.constexpr):
    """Rank the ``keep`` first keys, one after the other; the rest get ``keep``."""
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
def _select_kernel(
    child_probs,  # [B, BEAMS, TOPK] float32
    child_tokens,  # [B, BEAMS, TOPK] int64
    path_scores,  # [B, BEAMS] float32, or None: the root's
    path_words,  # [B, BEAMS, W] int64, or None: the root's
    candidate_scores,  # [B, C] float32, out
    candidate_tokens,  # [B, C] int64, out
    candidate_parents,  # [B, G] int64, out
    scores_out,  # [B, TOPK] float32, out
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
    req = tl.program_id(0).to(tl.int64)
    enter(PDL)
    flat = tl.arange(0, BLOCK)  # [BLOCK]
    beam = flat // TOPK
    word = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    bits = tl.zeros([BLOCK, BLOCK_W], tl.int64)
    if path_words is not None:
        # every child's words to come, loaded with the scores and not after them
        above = path_words + req * stride_path_words + beam[:, None] * W + word[None, :]
        live = (flat < BEAMS * TOPK)[:, None] & (word < W)[None, :]
        bits = tl.load(above, mask=live, other=0)  # [BLOCK, BLOCK_W]
    score, token = _record_children(
        req,
        offset,
        child_probs,
        child_tokens,
        path_scores,
        candidate_scores,
        candidate_tokens,
        candidate_parents,
        stride_candidates,
        stride_parents,
        BEAMS,
        TOPK,
        BLOCK,
    )
    # those past the last child come last: NaN ranks there, too, at a lower index
    key = tl.where(flat < BEAMS * TOPK, score_key(score), -0x80000000)
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


def append_candidates(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor | None,
    *,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
) -> None:
    """Record the children the last draft step proposes, without picking beams among them.

    Parameters are those of `select_beams`, of which this is the first half.
    """
    batch, beams, topk = child_probs.shape
    start = candidate_offset(step, child_probs, candidate_scores, candidate_parents)
    require_dense(child_probs=child_probs, child_tokens=child_tokens, path_scores=path_scores)
    if not batch:
        return
    _append_kernel[(batch,)](
        child_probs,
        child_tokens,
        path_scores,
        candidate_scores,
        candidate_tokens,
        candidate_parents,
        start,
        candidate_scores.stride(0),
        candidate_parents.stride(0),
        BEAMS=beams,
        TOPK=topk,
        BLOCK=triton.next_power_of_2(beams * topk),
        num_warps=1,
        **launch_options(child_probs.device),
    )


def select_beams(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor | None,
    path_words: Tensor | None,
    *,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    scores_out: Tensor,
    tokens_out: Tensor,
    rows_out: Tensor,
    words_out: Tensor,
) -> None:
    """Score the children of the beams, record them as candidates, keep the best ``topk``.

    The rule of EAGLE-2 (arXiv:2406.16858): a path scores the product of its probabilities. Ties
    go to the lower flat index ``beam * topk + child``, NaN ranks last. The outputs may not overlap
    the inputs.

    Parameters
    ----------
    step : int
        Draft step, from 0. Step 0 has one beam, the root.
    child_probs, child_tokens : Tensor
        ``[B, beams, topk]`` float32 and int64: what the draft model proposes after each beam.
        ``beams`` is 1 at step 0 and ``topk`` later.
    path_scores : Tensor or None
        ``[B, beams]`` float32, probability of the path down to each beam; 1 if None.
    path_words : Tensor or None
        ``[B, beams, W]`` int64, its ancestors and itself: bit ``step * topk + branch``; no bits if
        None, as of the root, which is no draft node. May have a row stride.
    candidate_scores, candidate_tokens, candidate_parents : Tensor
        The `specattn.batch.Candidates` of all steps; the columns of this step are written.
    scores_out, tokens_out, rows_out : Tensor
        ``[B, topk]`` float32, int64, int64, best first: path score, token, and the row of
        ``[B * beams]`` that it extends.
    words_out : Tensor
        ``[B, topk, W]`` int64, the words of the new beams. May have a row stride.

    Raises
    ------
    ValueError
        If the candidates have no room for this step, or a tensor is not laid out as above.
    """
    start = candidate_offset(step, child_probs, candidate_scores, candidate_parents)
    check_beams(step, child_probs, candidate_parents, words_out)
    require_dense(
        child_probs=child_probs,
        child_tokens=child_tokens,
        path_scores=path_scores,
        path_words=None if path_words is None else path_words[:1],
        scores_out=scores_out,
        tokens_out=tokens_out,
        rows_out=rows_out,
        words_out=words_out[:1],
    )
    batch, beams, topk = child_probs.shape
    if not batch:
        return
    num_words = words_out.shape[-1]
    block = triton.next_power_of_2(beams * topk)
    _select_kernel[(batch,)](
        child_probs,
        child_tokens,
        path_scores,
        path_words,
        candidate_scores,
        candidate_tokens,
        candidate_parents,
        scores_out,
        tokens_out,
        rows_out,
        words_out,
        step,
        start,
        candidate_scores.stride(0),
        candidate_parents.stride(0),
        0 if path_words is None else path_words.stride(0),
        words_out.stride(0),
        W=num_words,
        BEAMS=beams,
        TOPK=topk,
        BLOCK=block,
        BLOCK_W=triton.next_power_of_2(num_words),
        num_warps=1 if block <= 16 else 4 if block <= 128 else 8,
        **launch_options(child_probs.device),
    )
