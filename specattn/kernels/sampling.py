"""Sampling: what a request draws from, its coins, and draws; nothing is sorted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.checks import require_dense
from specattn.kernels.choose import finite, load_scores, ranked, require_rows
from specattn.kernels.cut import cut_kernel
from specattn.kernels.launch import programs_per_row
from specattn.kernels.narrow import count_kernel, gather_kernel
from specattn.kernels.reference.sampling import ACCEPT, DRAFT, FINAL
from specattn.kernels.residual import invert, vocab_tiles
from specattn.kernels.rules import merge_parts, sharpness_of

__all__ = ["ACCEPT", "DRAFT", "FINAL", "draw_tokens", "path_coins", "target_probs", "uniform"]

# tokens that a program reads at a time
BLOCK = 2048
CUT_BLOCK = 4096
# tokens that a cut is searched among in registers
KEPT = 4096
# classes of distances from the peak; twice as many for few rows, whose time is not their work's
BINS = 256
FEW_ROWS = 16


@triton.jit
def _peaks_kernel(
    logits,  # [R, V]
    temperature,  # [B] float32
    keys,  # [R, parts] int64, out: the most probable token of each part
    masses,  # [R, parts] float32, out: weights relative to it
    levels,  # [R, parts] float32, out if CUT: what its larger logits are about, -inf if none
    counts,  # [R, BINS] int32, out if CUT: zeros
    notes,  # [R, 8] int64, out if CUT: zeros
    vocab,
    stride,
    rows_per_req,
    CUT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    sharpness = sharpness_of(tl.load(temperature + row // rows_per_req))
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    tile = tl.zeros([BLOCK], tl.int32) + part
    mass = tl.zeros([BLOCK], tl.float32)
    peak = -3.0e38
    for i in range(part, tl.cdiv(vocab, BLOCK), parts):
        score = load_scores(logits + row * stride, i * BLOCK + lane, vocab)
        higher = tl.maximum(peak, tl.max(score, 0))
        mass *= tl.exp2((peak - higher) * sharpness)
        mass += tl.exp2((score - higher) * sharpness)
        peak = higher
        better = score > best
        best = tl.where(better, score, best)
        tile = tl.where(better, i, tile)
    tl.store(keys + row * parts + part, tl.max(ranked(best, tile * BLOCK + lane), 0))
    tl.store(masses + row * parts + part, tl.sum(mass, 0))
    if CUT:
        # of logits that were put out of reach, nothing is to be learnt
        usual = (best > -float("inf")) & (best > peak - 1e3)
        number = tl.sum(usual.to(tl.int32), 0)
        below = tl.sum(tl.where(usual, peak - best, 0.0), 0) / tl.maximum(number, 1)
        tl.store(levels + row * parts + part, tl.where(number > 0, peak - below, -float("inf")))
        bins = tl.arange(0, BINS)
        tl.store(counts + row * BINS + bins, 0, mask=bins % parts == part)
        tl.store(notes + row * 8 + tl.arange(0, 8), 0, mask=(tl.arange(0, 8) >= 0) & (part == 0))


@triton.jit
def _probs_kernel(
    logits,  # [R, V]
    temperature,  # [B] float32
    keys,  # [R, parts] int64
    masses,  # [R, parts] float32
    cuts,  # [R, 2] float32
    lasts,  # [R] int32
    probs,  # [R, V] float32, out
    vocab,
    stride,
    rows_per_req,
    CUT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    warmth = tl.load(temperature + row // rows_per_req)
    sharpness = sharpness_of(warmth)
    best, peak, total, _ = merge_parts(keys, masses, row, parts, sharpness, BLOCK_P)
    one = (warmth == 0) | (peak == -float("inf"))
    if CUT:
        cut = tl.load(cuts + row * 2)
        total = tl.load(cuts + row * 2 + 1)
        last = tl.load(lasts + row)
    scale = 1 / total
    for i in range(part, tl.cdiv(vocab, BLOCK), parts):
        token = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        # only its place matters to a row of one token
        score = load_scores(logits + row * stride, token, tl.where(one, 0, vocab))
        distance = finite(peak) - score
        prob = tl.exp2(-distance * sharpness) * scale
        if CUT:
            prob = tl.where((distance < cut) | ((distance == cut) & (token <= last)), prob, 0.0)
        prob = tl.where(one, (token == best).to(tl.float32), prob)
        tl.store(probs + row * vocab + token, prob, mask=token < vocab)


@triton.jit
def _mix(state):
    """One SplitMix64 step."""
    state += 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _coins_kernel(
    seeds,  # [B] int64
    positions,  # [B, M] or [B]
    coins,  # [draws, B, D] float32, out
    count,
    width,
    first_draw,
    stride_req,
    stride_depth,
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    draw = tl.program_id(1)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = flat < count
    req, depth = flat // width, flat % width
    seed = tl.load(seeds + req, mask=live, other=0).to(tl.uint64)
    place = positions + req.to(tl.int64) * stride_req
    if DEPTHS:
        position = tl.load(place, mask=live, other=0).to(tl.int64) + depth
    else:
        position = tl.load(place + depth * stride_depth, mask=live, other=0).to(tl.int64)
    state = _mix(_mix(_mix(seed) + position.to(tl.uint64)) + (first_draw + draw).to(tl.uint64))
    coin = (state >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    tl.store(coins + draw * count + flat, coin, mask=live)


@triton.jit
def _draw_kernel(
    weights,  # [B, V] float32
    coins,  # [B] float32
    fallback,  # [B, V] float32
    tokens,  # [B] int64, out
    vocab,
    stride,
    stride_fallback,
    HAS_FALLBACK: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILES: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    row = weights + req * stride
    coin = tl.load(coins + req)
    # it refuses no tokens: any pointer names the list of none
    token = invert(row, row, False, tokens, 0, coin, vocab, ROWS, SEGMENT, TILES, False)
    if HAS_FALLBACK:
        row = fallback + req * stride_fallback
        other = invert(row, row, False, tokens, 0, coin, vocab, ROWS, SEGMENT, TILES, False)
        token = tl.where(token < 0, other, token)
    tl.store(tokens + req, tl.maximum(token, 0).to(tl.int64))


def target_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    rows_per_req: int,
) -> Tensor:
    """Return the distributions that sampling with these settings draws from.

    See `specattn.kernels.reference.sampling.target_probs`, whose law it is, ties included. Where a
    cut lies is found by counting tokens by their distance from the peak, then among the few of the
    bins that hold it; a row of too many alike is counted again and again. Two launches, and three
    more with ``top_k`` or ``top_p``, in which rows that have both off do nothing.

    Raises
    ------
    ValueError
        If the last axis of ``logits`` is not dense.
    """
    require_rows(logits)
    rows, vocab = logits.shape
    probs = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if not rows:
        return probs
    parts = programs_per_row(rows, triton.cdiv(vocab, BLOCK))
    keys = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    masses = probs.new_empty(rows, parts)
    common = (vocab, logits.stride(0), rows_per_req)
    block_p = triton.next_power_of_2(parts)
    # of one token there is nothing to cut, and Triton 3.6 does not compile the kernel for it
    cut = vocab > 1 and (top_k is not None or top_p is not None)
    cuts, lasts = masses, keys
    levels, counts, notes = masses, keys, keys
    bins = BINS * 2 if rows <= FEW_ROWS else BINS
    if cut:
        cuts, lasts = probs.new_empty(rows, 2), keys.new_empty(rows, dtype=torch.int32)
        levels, notes = torch.empty_like(masses), keys.new_empty(rows, 8)
        counts = lasts.new_empty(rows, bins)
    _peaks_kernel[(rows, parts)](
        logits,
        temperature,
        keys,
        masses,
        levels,
        counts,
        notes,
        *common,
        CUT=cut,
        BINS=bins,
        BLOCK=BLOCK,
    )
    if cut:
        shared = (
            logits,
            temperature,
            temperature if top_k is None else top_k,
            temperature if top_p is None else top_p,
            keys,
            masses,
        )
        rules = {"HAS_K": top_k is not None, "HAS_P": top_p is not None, "BLOCK_P": block_p}
        lists = lasts.new_empty(rows, sum(by is not None for by in (top_k, top_p)), KEPT)
        count_kernel[(rows, parts)](
            *shared,
            levels,
            cuts,
            counts,
            *common,
            **rules,
            BINS=bins,
            BLOCK=BLOCK,
            num_warps=4 if bins == BINS else 8,
        )
        gather_kernel[(rows, parts)](
            *shared,
            cuts,
            counts,
            lists,
            notes,
            *common,
            **rules,
            BINS=bins,
            KEPT=KEPT,
            BLOCK=BLOCK // 2,
            num_warps=8,
        )
        cut_kernel[(rows,)](
            *shared,
            cuts,
            lasts,
            lists,
            notes,
            *common,
            parts,
            **rules,
            KEPT=KEPT,
            BLOCK=CUT_BLOCK,
            num_warps=16,
        )
    _probs_kernel[(rows, parts)](
        logits,
        temperature,
        keys,
        masses,
        cuts,
        lasts,
        probs,
        *common,
        CUT=cut,
        BLOCK_P=block_p,
        BLOCK=BLOCK,
    )
    return probs


def uniform(seeds: Tensor, positions: Tensor, draw: int) -> Tensor:
    """Return coins in one launch; see `specattn.kernels.reference.sampling.uniform`."""
    require_dense(seeds=seeds)
    width = positions[0].numel() if len(positions) else 0
    flat = positions.reshape(len(positions), width) if positions.dim() != 1 else positions[:, None]
    coins = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    if coins.numel():
        _coins_kernel[(triton.cdiv(coins.numel(), 256), 1)](
            seeds,
            flat,
            coins,
            coins.numel(),
            width,
            draw,
            flat.stride(0),
            flat.stride(1),
            DEPTHS=False,
            BLOCK=256,
        )
    return coins


def path_coins(seeds: Tensor, seq_lens: Tensor, depths: int, draws: int) -> Tensor:
    """Return a step's coins in one launch.

    See `specattn.kernels.reference.sampling.path_coins`.
    """
    require_dense(seeds=seeds, seq_lens=seq_lens)
    coins = torch.empty(draws, len(seeds), depths, dtype=torch.float32, device=seeds.device)
    count = len(seeds) * depths
    if count:
        _coins_kernel[(triton.cdiv(count, 256), draws)](
            seeds,
            seq_lens,
            coins,
            count,
            depths,
            0,
            1,
            0,
            DEPTHS=True,
            BLOCK=256,
        )
    return coins


def draw_tokens(weights: Tensor, coins: Tensor, fallback: Tensor | None = None) -> Tensor:
    """Draw one token per row in one launch; see `specattn.kernels.reference.sampling.draw_tokens`.

    Raises
    ------
    ValueError
        If a last axis is not dense.
    """
    require_dense(coins=coins)
    other = weights if fallback is None else fallback
    require_rows(weights)
    require_rows(other)
    tokens = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    if len(weights):
        _draw_kernel[(len(weights),)](
            weights,
            coins,
            other,
            tokens,
            weights.shape[1],
            weights.stride(0),
            other.stride(0),
            HAS_FALLBACK=fallback is not None,
            **vocab_tiles(weights.shape[1], 64),
        )
    return tokens
