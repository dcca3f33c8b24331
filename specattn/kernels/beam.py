"""Pick the beams of the next draft step: one launch between two draft forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.dense import require_dense
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
    req, offset, child_probs, child_tokens, path_scores,
    candidate_scores, candidate_tokens, candidate_parents, stride_candidates, stride_parents,
    BEAMS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write the children of all beams to this step's candidate columns; return their scores."""
    flat = tl.arange(0, BLOCK)                                               # [BLOCK]
    live = flat < BEAMS * TOPK
    child = req * BEAMS * TOPK + flat
    prob = tl.load(child_probs + child, mask=live, other=0)
    score = prob * tl.load(path_scores + req * BEAMS + flat // TOPK, mask=live, other=0)
    token = tl.load(child_tokens + child, mask=live, other=0)
    column = req * stride_candidates + offset + flat
    tl.store(candidate_scores + column, score, mask=live)
    tl.store(candidate_tokens + column, token, mask=live)
    if offset == 0:
        tl.store(candidate_parents + req * stride_parents, -1)
    return score


@triton.jit
def _append_kernel(
    child_probs,        # [B, BEAMS, TOPK] float32
    child_tokens,       # [B, BEAMS, TOPK] int64
    path_scores,        # [B, BEAMS] float32
    candidate_scores,   # [B, C] float32, out
    candidate_tokens,   # [B, C] int64, out
    candidate_parents,  # [B, G] int64, out
    offset, stride_candidates, stride_parents,
    BEAMS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):
    _record_children(
        tl.program_id(0).to(tl.int64), offset, child_probs, child_tokens, path_scores,
        candidate_scores, candidate_tokens, candidate_parents, stride_candidates, stride_parents,
        BEAMS, TOPK, BLOCK,
    )


@triton.jit
def _select_kernel(
    child_probs,        # [B, BEAMS, TOPK] float32
    child_tokens,       # [B, BEAMS, TOPK] int64
    path_scores,        # [B, BEAMS] float32
    path_words,         # [B, BEAMS, W] int64
    candidate_scores,   # [B, C] float32, out
    candidate_tokens,   # [B, C] int64, out
    candidate_parents,  # [B, G] int64, out
    scores_out,         # [B, TOPK] float32, out
    tokens_out,         # [B, TOPK] int64, out
    beams_out,          # [B, TOPK] int64, out
    words_out,          # [B, TOPK, W] int64, out
    step, offset, stride_candidates, stride_parents, stride_path_words, stride_words,
    W: tl.constexpr, BEAMS: tl.constexpr, TOPK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    score = _record_children(
        req, offset, child_probs, child_tokens, path_scores,
        candidate_scores, candidate_tokens, candidate_parents, stride_candidates, stride_parents,
        BEAMS, TOPK, BLOCK,
    )
    flat = tl.arange(0, BLOCK)                                               # [BLOCK]
    # The low half makes keys distinct and prefers the lower flat index.
    key = score_key(score).to(tl.int64) * 4294967296 + (BLOCK - flat)        # [BLOCK]
    key = tl.where(flat < BEAMS * TOPK, key, -0x8000000000000000)
    word = tl.arange(0, BLOCK_W)                                             # [BLOCK_W]
    for branch in range(TOPK):
        best = tl.max(key, 0)
        pick = BLOCK - (best & 0xFFFFFFFF)
        key = tl.where(flat == pick, -0x8000000000000000, key)
        beam = pick // TOPK
        child = req * BEAMS * TOPK + pick
        path = tl.load(child_probs + child) * tl.load(path_scores + req * BEAMS + beam)
        out = req * TOPK + branch
        tl.store(scores_out + out, path)
        tl.store(tokens_out + out, tl.load(child_tokens + child))
        tl.store(beams_out + out, beam)
        node = step * TOPK + branch
        tl.store(candidate_parents + req * stride_parents + 1 + node, offset + pick)

        above = path_words + req * stride_path_words + beam * W + word
        bits = tl.load(above, mask=word < W, other=0)
        own = tl.full([BLOCK_W], 1, tl.int64) << (node % 64)
        bits = tl.where(word == node // 64, bits | own, bits)
        tl.store(words_out + req * stride_words + branch * W + word, bits, mask=word < W)


def append_candidates(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor,
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
        child_probs, child_tokens, path_scores,
        candidate_scores, candidate_tokens, candidate_parents,
        start, candidate_scores.stride(0), candidate_parents.stride(0),
        BEAMS=beams, TOPK=topk, BLOCK=triton.next_power_of_2(beams * topk),
    )


def select_beams(
    step: int,
    child_probs: Tensor,
    child_tokens: Tensor,
    path_scores: Tensor,
    path_words: Tensor,
    *,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    scores_out: Tensor,
    tokens_out: Tensor,
    beams_out: Tensor,
    words_out: Tensor,
) -> None:
    """Score the children of the beams, record them as candidates, keep the best ``topk``.

    The rule of EAGLE-2 (arXiv:2406.16858): a path scores the product of its probabilities. Ties
    go to the lower flat index ``beam * topk + child``, NaN ranks last. The outputs may not overlap
    the inputs.

    Parameters
    ----------
    step : int
        Draft step, from 0. Step 0 has one beam, the root, of score 1 and no words set.
    child_probs, child_tokens : Tensor
        ``[B, beams, topk]`` float32 and int64: what the draft model proposes after each beam.
        ``beams`` is 1 at step 0 and ``topk`` later.
    path_scores : Tensor
        ``[B, beams]`` float32, probability of the path down to each beam.
    path_words : Tensor
        ``[B, beams, W]`` int64, its ancestors and itself: bit ``step * topk + branch``. May have a
        row stride.
    candidate_scores, candidate_tokens, candidate_parents : Tensor
        The `specattn.batch.Candidates` of all steps; the columns of this step are written.
    scores_out, tokens_out, beams_out : Tensor
        ``[B, topk]`` float32, int64, int64, best first: path score, token, and the beam it extends.
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
        child_probs=child_probs, child_tokens=child_tokens, path_scores=path_scores,
        path_words=path_words[:1], scores_out=scores_out, tokens_out=tokens_out,
        beams_out=beams_out, words_out=words_out[:1],
    )
    batch, beams, topk = child_probs.shape
    if not batch:
        return
    num_words = words_out.shape[-1]
    _select_kernel[(batch,)](
        child_probs, child_tokens, path_scores, path_words,
        candidate_scores, candidate_tokens, candidate_parents,
        scores_out, tokens_out, beams_out, words_out,
        step, start, candidate_scores.stride(0), candidate_parents.stride(0),
        path_words.stride(0), words_out.stride(0),
        W=num_words, BEAMS=beams, TOPK=topk, BLOCK=triton.next_power_of_2(beams * topk),
        BLOCK_W=triton.next_power_of_2(num_words),
    )
