"""Choose among the tokens of a vocabulary: rows are cut into parts, and the parts merged."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.beam import score_key
from specattn.kernels.checks import require_dense
from specattn.kernels.launch import enter, launch_options, programs_per_row
from specattn.kernels.reference.choose import check_topk

# tokens that a program compares at a time
ARGMAX_BLOCK = 2048


@triton.jit
def load_scores(row, token, vocab):
    """Load logits as float32; NaN and what lies past the vocabulary are -inf."""
    score = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(score == score, score, -float("inf"))


@triton.jit
def ranked(score, token):
    """Pack scores and tokens into int64 keys: the larger score first, then the lower token."""
    return (score_key(score).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(key):
    """Return the token of a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """Return the score of a key."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def finite(peak):
    """Return ``peak``, or a number below all others in its place if it is -inf."""
    return tl.maximum(peak, -3.0e38)


@triton.jit
def _best(key, LEAST: tl.constexpr, TOPK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the ``TOPK`` largest of distinct keys, falling; ``LEAST`` where there are no more."""
    rank = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    best = tl.full([BLOCK_K], LEAST, key.dtype)
    for nth in range(TOPK):
        top = tl.max(key, 0)
        best = tl.where(rank == nth, top, best)
        key = tl.where(key == top, LEAST, key)
    return best


@triton.jit
def _top_parts_kernel(
    logits,  # [R, V]
    keys,  # [R, parts, TOPK] int64, out
    masses,  # [R, parts] float32, out: sums of exp(logit - the part's largest)
    vocab,
    stride,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    PDL: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    enter(PDL)
    cell = row * tl.num_programs(1) + part
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    score = load_scores(logits + row * stride, part * BLOCK + lane, vocab)
    mass = tl.sum(tl.exp(score - finite(tl.max(score, 0))), 0)
    tl.store(masses + cell, mass)
    live = part * BLOCK + lane < vocab
    if NARROW:
        # 16 bits of a bfloat16, and the lane in the 16 that it leaves free: half the work
        key = (score_key(score) & -0x10000) | (0xFFFF - lane)
        key = tl.where(live, key, -0x80000000)
        best = _best(key, -0x80000000, TOPK, BLOCK_K)  # [BLOCK_K]
        token = part * BLOCK + 0xFFFF - (best & 0xFFFF)
        bits = tl.where(best >= 0, best & -0x10000, best | 0xFFFF)
        none = best < -0x7FFF0000
        best = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
        best = tl.where(none, -0x8000000000000000, best)
    else:
        key = ranked(score, part * BLOCK + lane)
        key = tl.where(live, key, -0x8000000000000000)
        best = _best(key, -0x8000000000000000, TOPK, BLOCK_K)
    rank = tl.arange(0, BLOCK_K)
    tl.store(keys + cell * TOPK + rank, best, mask=rank < TOPK)


@triton.jit
def _top_merge_kernel(
    keys,  # [R, parts, TOPK] int64, each part's in falling order
    masses,  # [R, parts] float32
    target_ids,  # [V] int64, or None
    probs_out,  # [R, TOPK] float32, out
    ids_out,  # [R, TOPK] int64, out
    parts,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    enter(PDL)
    part = tl.arange(0, BLOCK_P)  # [BLOCK_P]
    live = part < parts
    peak = score_of(tl.load(keys + (row * parts + part) * TOPK, mask=live, other=0))
    peak = tl.where(live, peak, -float("inf"))
    top = finite(tl.max(peak, 0))
    mass = tl.load(masses + row * parts + part, mask=live, other=0)
    total = tl.sum(mass * tl.exp(finite(peak) - top), 0)
    flat = tl.arange(0, BLOCK)  # [BLOCK]
    key = tl.load(
        keys + row * parts * TOPK + flat, mask=flat < parts * TOPK, other=-0x8000000000000000
    )
    best = _best(key, -0x8000000000000000, TOPK, BLOCK_K)  # [BLOCK_K]
    prob = tl.exp(score_of(best) - top) / tl.maximum(total, 1e-30)
    rank = tl.arange(0, BLOCK_K)
    tl.store(probs_out + row * TOPK + rank, prob, mask=rank < TOPK)
    token = token_of(best)
    if target_ids is not None:
        token = tl.load(target_ids + token, mask=rank < TOPK, other=0)
    tl.store(ids_out + row * TOPK + rank, token, mask=rank < TOPK)


@triton.jit
def _argmax_kernel(
    logits,  # [R, V]
    out,  # [R, parts] int64, out: the best key of each part; the token if there is one part
    vocab,
    tiles,
    stride,
    MERGED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    enter(PDL)
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    tile = tl.zeros([BLOCK], tl.int32) + part
    for i in range(part, tiles, tl.num_programs(1)):
        token = i * BLOCK + lane
        score = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf"))
        # no NaN is greater than anything
        better = score.to(tl.float32) > best
        best = tl.where(better, score.to(tl.float32), best)
        tile = tl.where(better, i, tile)
    key = tl.max(ranked(best, tile * BLOCK + lane), 0)
    tl.store(out + row * tl.num_programs(1) + part, token_of(key) if MERGED else key)


@triton.jit
def _argmax_merge_kernel(
    keys,  # [R, parts] int64
    out,  # [R] int64, out
    parts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    enter(PDL)
    part = tl.arange(0, BLOCK)  # [BLOCK]
    key = tl.load(keys + row * parts + part, mask=part < parts, other=-0x8000000000000000)
    tl.store(out + row, token_of(tl.max(key, 0)))


def top_tokens(
    logits: Tensor,
    topk: int,
    *,
    probs_out: Tensor,
    ids_out: Tensor,
    target_ids: Tensor | None = None,
    block: int | None = None,
) -> None:
    """Write each row's ``topk`` most probable tokens, the most probable first.

    Among equal logits the lower token comes first. NaN counts as -inf, +inf is not allowed; a row
    of -inf has the probabilities 0. Two launches.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``, any float dtype; dense last axis.
    topk : int
        Tokens per row, 1 to V.
    probs_out : Tensor
        ``[R, topk]`` float32, written in place: their probabilities in the whole vocabulary.
    ids_out : Tensor
        ``[R, topk]`` int64, written in place.
    target_ids : Tensor, optional
        ``[V]`` int64, contiguous: what each token is called in ``ids_out``; itself if None.
    block : int, optional
        Tokens per part, a power of two up to 65536; chosen by ``topk`` otherwise.

    Raises
    ------
    ValueError
        If V is smaller than ``topk``, or a layout does not fit.
    """
    check_topk(logits, topk, target_ids)
    require_rows(logits)
    require_dense(probs_out=probs_out, ids_out=ids_out)
    rows, vocab = logits.shape
    if not rows:
        return
    # a part hands on its best: with many of them, larger parts
    block = block or (1024 if topk <= 16 else 4096)
    block_k = triton.next_power_of_2(topk)
    parts = triton.cdiv(vocab, block)
    keys = torch.empty(rows, parts, topk, dtype=torch.int64, device=logits.device)
    masses = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    options = launch_options(logits.device)
    # what a last part smaller than topk lacks ranks below all tokens
    _top_parts_kernel[(rows, parts)](
        logits,
        keys,
        masses,
        vocab,
        logits.stride(0),
        TOPK=topk,
        BLOCK_K=block_k,
        BLOCK=block,
        NARROW=logits.dtype == torch.bfloat16,
        num_warps=max(1, block // 1024),
        **options,
    )
    width = triton.next_power_of_2(parts * topk)
    _top_merge_kernel[(rows,)](
        keys,
        masses,
        target_ids,
        probs_out,
        ids_out,
        parts,
        TOPK=topk,
        BLOCK_K=block_k,
        BLOCK=width,
        BLOCK_P=triton.next_power_of_2(parts),
        num_warps=max(1, min(8, width // 512)),
        **options,
    )


def argmax_tokens(logits: Tensor) -> Tensor:
    """Return each row's most probable token, the lowest among equals.

    NaN counts as -inf, unlike in `torch.argmax`; a row of -inf gives 0. One launch for many rows,
    two for few, which are cut into parts.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``, any float dtype; dense last axis.

    Returns
    -------
    Tensor
        ``[R]`` int64.
    """
    require_rows(logits)
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, ARGMAX_BLOCK)
    parts = programs_per_row(rows, tiles)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    keys = out if parts == 1 else out.new_empty(rows, parts)
    options = launch_options(logits.device)
    _argmax_kernel[(rows, parts)](
        logits,
        keys,
        vocab,
        tiles,
        logits.stride(0),
        MERGED=parts == 1,
        BLOCK=ARGMAX_BLOCK,
        **options,
    )
    if parts > 1:
        _argmax_merge_kernel[(rows,)](
            keys,
            out,
            parts,
            BLOCK=triton.next_power_of_2(parts),
            num_warps=1,
            **options,
        )
    return out


def require_rows(logits: Tensor) -> None:
    """Raise ValueError unless tokens of a row lie side by side."""
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits need a dense last axis, got strides {logits.stride()}")
