"""Find the best tokens of rows: of splits by programs, then merged."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.launch import launch_options
from specattn.kernels.pdl import enter
from specattn.kernels.sampling.keys import (
    best_keys,
    finite,
    is_sound,
    load_flagged,
    load_scores,
    ranked,
    score_key,
    score_of,
    token_of,
)

# tokens of a split: it hands on its best, and with more than 16 of them it is larger
TOP_BLOCKS = (1024, 4096)


@triton.jit
def top_splits_kernel(
    logits,  # [R, V]
    keys,  # [R, splits, TOPK] int64, out
    masses,  # [R, splits] float32, out: sums of exp(logit - the split's largest)
    vocab,
    stride,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the best tokens and the mass of a row's split."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    enter(PDL)
    cell = row * tl.num_programs(1) + split
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    score = load_scores(logits + row * stride, split * BLOCK + lane, vocab)
    mass = tl.sum(tl.exp(score - finite(tl.max(score, 0))), 0)
    tl.store(masses + cell, mass)
    live = split * BLOCK + lane < vocab
    if BF16:
        # 16 bits of a bfloat16, and the lane in the 16 that it leaves free: half the work
        key = (score_key(score) & -0x10000) | (0xFFFF - lane)
        key = tl.where(live, key, -0x80000000)
        best = best_keys(key, -0x80000000, TOPK, BLOCK_K)  # [BLOCK_K]
        token = split * BLOCK + 0xFFFF - (best & 0xFFFF)
        bits = tl.where(best >= 0, best & -0x10000, best | 0xFFFF)
        none = best < -0x7FFF0000
        best = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
        best = tl.where(none, -0x8000000000000000, best)
    else:
        key = ranked(score, split * BLOCK + lane)
        key = tl.where(live, key, -0x8000000000000000)
        best = best_keys(key, -0x8000000000000000, TOPK, BLOCK_K)
    rank = tl.arange(0, BLOCK_K)
    tl.store(keys + cell * TOPK + rank, best, mask=rank < TOPK)


@triton.jit
def top_merge_kernel(
    keys,  # [R, splits, TOPK] int64, each split's in falling order
    masses,  # [R, splits] float32
    target_ids,  # [V] int64, or None
    probs_out,  # [R, TOPK] float32, out
    ids_out,  # [R, TOPK] int64, out
    splits,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the best tokens of a row's splits."""
    row = tl.program_id(0).to(tl.int64)
    enter(PDL)
    split = tl.arange(0, BLOCK_P)  # [BLOCK_P]
    live = split < splits
    peak = score_of(tl.load(keys + (row * splits + split) * TOPK, mask=live, other=0))
    peak = tl.where(live, peak, -float("inf"))
    top = finite(tl.max(peak, 0))
    mass = tl.load(masses + row * splits + split, mask=live, other=0)
    total = tl.sum(mass * tl.exp(finite(peak) - top), 0)
    flat = tl.arange(0, BLOCK)  # [BLOCK]
    key = tl.load(
        keys + row * splits * TOPK + flat, mask=flat < splits * TOPK, other=-0x8000000000000000
    )
    best = best_keys(key, -0x8000000000000000, TOPK, BLOCK_K)  # [BLOCK_K]
    prob = tl.exp(score_of(best) - top) / tl.maximum(total, 1e-30)
    rank = tl.arange(0, BLOCK_K)
    tl.store(probs_out + row * TOPK + rank, prob, mask=rank < TOPK)
    token = token_of(best)
    if target_ids is not None:
        token = tl.load(target_ids + token, mask=rank < TOPK, other=0)
    tl.store(ids_out + row * TOPK + rank, token, mask=rank < TOPK)


@triton.jit
def _sound_token(key):
    """Return a best key's token; -1 if its row allows none."""
    return tl.where(is_sound(score_of(key)), token_of(key), -1)


@triton.jit
def argmax_kernel(
    logits,  # [R, V]
    out,  # [R, splits] int64, out: the best key of each split; the token if there is one split
    vocab,
    tiles,
    stride,
    MERGED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the best token of one split of a row."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    enter(PDL)
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    tile = tl.zeros([BLOCK], tl.int32) + split
    for i in range(split, tiles, tl.num_programs(1)):
        score = load_flagged(logits + row * stride, i * BLOCK + lane, vocab)
        better = score > best
        best = tl.where(better, score, best)
        tile = tl.where(better, i, tile)
    key = tl.max(ranked(best, tile * BLOCK + lane), 0)
    tl.store(out + row * tl.num_programs(1) + split, _sound_token(key) if MERGED else key)


@triton.jit(do_not_specialize=["splits"])
def argmax_merge_kernel(
    keys,  # [R, splits] int64
    out,  # [R] int64, out
    splits,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the best tokens of a row's splits."""
    row = tl.program_id(0).to(tl.int64)
    enter(PDL)
    split = tl.arange(0, BLOCK)  # [BLOCK]
    key = tl.load(keys + row * splits + split, mask=split < splits, other=-0x8000000000000000)
    tl.store(out + row, _sound_token(tl.max(key, 0)))


def top_tokens(
    *, logits: Tensor, topk: int, probs_out: Tensor, ids_out: Tensor, target_ids: Tensor | None
) -> None:
    rows, vocab = logits.shape
    block = TOP_BLOCKS[topk > 16]
    block_k = triton.next_power_of_2(topk)
    splits = triton.cdiv(vocab, block)
    keys = torch.empty(rows, splits, topk, dtype=torch.int64, device=logits.device)
    masses = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
    options = launch_options(logits.device)
    # what a last split smaller than topk lacks ranks below all tokens
    top_splits_kernel[(rows, splits)](
        logits,
        keys,
        masses,
        vocab,
        logits.stride(0),
        TOPK=topk,
        BLOCK_K=block_k,
        BLOCK=block,
        BF16=logits.dtype == torch.bfloat16,
        num_warps=max(1, block // 1024),
        **options,
    )
    width = triton.next_power_of_2(splits * topk)
    top_merge_kernel[(rows,)](
        keys,
        masses,
        target_ids,
        probs_out,
        ids_out,
        splits,
        TOPK=topk,
        BLOCK_K=block_k,
        BLOCK=width,
        BLOCK_P=triton.next_power_of_2(splits),
        num_warps=max(1, min(8, width // 512)),
        **options,
    )
