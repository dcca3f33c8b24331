"""Distributions of rows of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.launch import programs_per_row, split_lanes
from specattn.kernels.sampling.histogram import count_kernel, gather_kernel
from specattn.kernels.sampling.keys import finite, is_sound, load_flagged, load_scores, ranked
from specattn.kernels.sampling.thresholds import inv_temperature_of, merge_splits
from specattn.kernels.sampling.topk_topp_threshold import threshold_kernel

# tokens that a program reads at a time
BLOCK = 2048

THRESHOLD_BLOCK = 4096

# tokens that a threshold is searched among in registers
KEPT = 4096

# classes of distances from the peak; twice as many for few rows, whose time is not their work's
BINS = 256

FEW_ROWS = 16


@triton.jit
def peaks_kernel(
    logits,  # [R, V]
    temperature,  # [B] float32
    keys,  # [R, splits] int64, out: the most probable token of each split
    masses,  # [R, splits] float32, out: weights relative to it
    levels,  # [R, splits] float32, out: what its larger logits are about, -inf if none; or None
    counts,  # [R, BINS] int32, out: zeros; or None
    notes,  # [R, 8] int64, out: zeros; or None
    vocab,
    stride,
    rows_per_req,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best token and the mass of a row's split."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    inv_temperature = inv_temperature_of(tl.load(temperature + row // rows_per_req))
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    tile = tl.zeros([BLOCK], tl.int32) + split
    mass = tl.zeros([BLOCK], tl.float32)
    peak = -3.0e38
    for i in range(split, tl.cdiv(vocab, BLOCK), splits):
        score = load_flagged(logits + row * stride, i * BLOCK + lane, vocab)
        higher = tl.maximum(peak, tl.max(score, 0))
        mass *= tl.exp2((peak - higher) * inv_temperature)
        mass += tl.exp2((score - higher) * inv_temperature)
        peak = higher
        better = score > best
        best = tl.where(better, score, best)
        tile = tl.where(better, i, tile)
    tl.store(keys + row * splits + split, tl.max(ranked(best, tile * BLOCK + lane), 0))
    tl.store(masses + row * splits + split, tl.sum(mass, 0))
    if levels is not None:
        # of logits that were put out of reach, nothing is to be learnt
        usual = (best > -float("inf")) & (best > peak - 1e3)
        number = tl.sum(usual.to(tl.int32), 0)
        below = tl.sum(tl.where(usual, peak - best, 0.0), 0) / tl.maximum(number, 1)
        tl.store(levels + row * splits + split, tl.where(number > 0, peak - below, -float("inf")))
        bins = tl.arange(0, BINS)
        tl.store(counts + row * BINS + bins, 0, mask=bins % splits == split)
        tl.store(notes + row * 8 + tl.arange(0, 8), 0, mask=(tl.arange(0, 8) >= 0) & (split == 0))


@triton.jit
def _is_kept(distance, token, threshold, last):
    """Return which tokens top-k and top-p keep."""
    return (distance < threshold) | ((distance == threshold) & (token <= last))


@triton.jit
def min_p_kernel(
    logits,  # [R, V]
    temperature,  # [B] float32
    keys,  # [R, splits] int64
    masses,  # [R, splits] float32
    thresholds,  # [R, 2] float32, or None: all are kept
    lasts,  # [R] int32, or None
    min_p,  # [B] float32
    left,  # [R, splits] float32, out: weights that min-p leaves, relative to the row's best token
    vocab,
    stride,
    rows_per_req,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the weights that min-p leaves to one split of a row."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    least = tl.load(min_p + row // rows_per_req)
    temp = tl.load(temperature + row // rows_per_req)
    inv_temperature = inv_temperature_of(temp)
    _, peak, _, _ = merge_splits(keys, masses, row, splits, inv_temperature, BLOCK_P)
    if thresholds is not None:
        threshold = tl.load(thresholds + row * 2)
        last = tl.load(lasts + row)
    mass = tl.zeros([BLOCK], tl.float32)
    end = tl.where((least > 0) & (temp > 0), tl.cdiv(vocab, BLOCK), 0)
    for i in range(split, end, splits):
        token = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        distance = finite(peak) - load_scores(logits + row * stride, token, vocab)
        weight = tl.exp2(-distance * inv_temperature)
        kept = (token < vocab) & (weight >= least)
        if thresholds is not None:
            kept = kept & _is_kept(distance, token, threshold, last)
        mass += tl.where(kept, weight, 0.0)
    tl.store(left + row * splits + split, tl.sum(mass, 0))


@triton.jit
def probs_kernel(
    logits,  # [R, V]
    temperature,  # [B] float32
    keys,  # [R, splits] int64
    masses,  # [R, splits] float32
    thresholds,  # [R, 2] float32, or None: all are kept
    lasts,  # [R] int32, or None
    min_p,  # [B] float32, or None
    left,  # [R, splits] float32, see `min_p_kernel`; or None
    probs,  # [R, V] float32, out
    vocab,
    stride,
    rows_per_req,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the probabilities of one split of a row."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    temp = tl.load(temperature + row // rows_per_req)
    inv_temperature = inv_temperature_of(temp)
    best, peak, total, _ = merge_splits(keys, masses, row, splits, inv_temperature, BLOCK_P)
    sound = is_sound(peak)
    one = (temp == 0) | (sound == 0)
    if thresholds is not None:
        threshold = tl.load(thresholds + row * 2)
        total = tl.load(thresholds + row * 2 + 1)
        last = tl.load(lasts + row)
    if min_p is not None:
        least = tl.load(min_p + row // rows_per_req)
        part = tl.arange(0, BLOCK_P)
        rest = tl.sum(tl.load(left + row * splits + part, mask=part < splits, other=0), 0)
        total = tl.where((least > 0) & (temp > 0), rest, total)
    scale = 1 / total
    for i in range(split, tl.cdiv(vocab, BLOCK), splits):
        token = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        # only its place matters to a row of one token
        score = load_scores(logits + row * stride, token, tl.where(one, 0, vocab))
        distance = finite(peak) - score
        weight = tl.exp2(-distance * inv_temperature)
        prob = weight * scale
        if thresholds is not None:
            prob = tl.where(_is_kept(distance, token, threshold, last), prob, 0.0)
        if min_p is not None:
            prob = tl.where(weight >= least, prob, 0.0)
        prob = tl.where(one, (token == best).to(tl.float32), prob)
        prob = tl.where(sound, prob, float("nan"))
        tl.store(probs + row * vocab + token, prob, mask=token < vocab)


def target_probs(
    *,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    rows_per_req: int,
    min_p: Tensor | None,
) -> Tensor:
    rows, vocab = logits.shape
    probs = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if not rows:
        return probs
    splits = programs_per_row(rows, triton.cdiv(vocab, BLOCK))
    keys = torch.empty(rows, splits, dtype=torch.int64, device=logits.device)
    masses = probs.new_empty(rows, splits)
    common = (vocab, logits.stride(0), rows_per_req)
    block_p = split_lanes(splits)
    bins = BINS * 2 if rows <= FEW_ROWS else BINS
    thresholds = lasts = levels = counts = notes = left = None
    # of one token there is nothing to cut, and Triton 3.6 does not compile the kernel for it
    truncate = vocab > 1 and (top_k is not None or top_p is not None)
    if truncate:
        thresholds, lasts = probs.new_empty(rows, 2), keys.new_empty(rows, dtype=torch.int32)
        levels, notes = torch.empty_like(masses), keys.new_empty(rows, 8)
        counts = lasts.new_empty(rows, bins)
    peaks_kernel[(rows, splits)](
        logits, temperature, keys, masses, levels, counts, notes, *common, BINS=bins, BLOCK=BLOCK
    )
    if truncate:
        given = temperature, top_k, top_p, keys, masses
        lists = keys.new_empty(
            rows, sum(by is not None for by in (top_k, top_p)), KEPT, dtype=torch.int32
        )
        count_kernel[(rows, splits)](
            logits,
            given,
            levels,
            thresholds,
            counts,
            *common,
            BLOCK_P=block_p,
            BINS=bins,
            BLOCK=BLOCK,
            num_warps=4 if bins == BINS else 8,
        )
        gather_kernel[(rows, splits)](
            logits,
            given,
            thresholds,
            counts,
            lists,
            notes,
            *common,
            BLOCK_P=block_p,
            BINS=bins,
            KEPT=KEPT,
            BLOCK=BLOCK // 2,
            num_warps=8,
        )
        threshold_kernel[(rows,)](
            logits,
            given,
            thresholds,
            lasts,
            lists,
            notes,
            *common,
            splits,
            BLOCK_P=block_p,
            KEPT=KEPT,
            BLOCK=THRESHOLD_BLOCK,
            num_warps=16,
        )
    kept = logits, temperature, keys, masses, thresholds, lasts
    if min_p is not None:
        left = torch.empty_like(masses)
        min_p_kernel[(rows, splits)](*kept, min_p, left, *common, BLOCK_P=block_p, BLOCK=BLOCK)
    probs_kernel[(rows, splits)](*kept, min_p, left, probs, *common, BLOCK_P=block_p, BLOCK=BLOCK)
    return probs
