"""Sampling: distributions, coins, draws, and the best tokens; nothing is sorted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_dense, require_rows, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import cdiv, launch_options, power_of_2, programs_per_row, split_lanes

if TYPE_CHECKING:
    from specattn.kernels.sampling import triton_choose as choose_kernels
    from specattn.kernels.sampling import triton_probs as probs_kernels
else:
    choose_kernels = TritonModule("specattn.kernels.sampling.triton_choose")
    probs_kernels = TritonModule("specattn.kernels.sampling.triton_probs")
draw_kernels = TritonModule("specattn.kernels.sampling.triton_residual")

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

# tokens whose weights are summed before they are chosen among
_SEGMENT = 512
# tokens that a program compares at a time
_ARGMAX_BLOCK = 2048
# coins of a program
_COINS = 256

# what a coin decides: the draw index of `uniform`
ACCEPT, FINAL, DRAFT = 0, 1, 2


def top_tokens(
    logits: Tensor,
    topk: int,
    *,
    probs_out: Tensor,
    ids_out: Tensor,
    target_ids: Tensor | None = None,
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

    Raises
    ------
    ValueError
        If V is smaller than ``topk``, or a shape, dtype or layout is another.
    """
    vocab = logits.shape[1]
    if not 1 <= topk <= vocab:
        raise ValueError(f"topk must be 1..{vocab}, got {topk}")
    require_rows(logits=logits)
    require_dense(probs_out=probs_out, ids_out=ids_out, target_ids=target_ids)
    if target_ids is not None:
        require_shape((vocab,), torch.int64, target_ids=target_ids)
    if not len(logits):
        return
    if on_triton(logits):
        return choose_kernels.top_tokens(
            logits=logits, topk=topk, probs_out=probs_out, ids_out=ids_out, target_ids=target_ids
        )
    scores = _numbers(logits)
    # distinct keys: no tie is left to the library
    falling = torch.arange(logits.shape[1], 0, -1, device=logits.device)
    ids_out.copy_((score_key(scores).long() * 2**32 + falling).topk(topk).indices)
    empty = scores.amax(1, keepdim=True) == -torch.inf
    probs_out.copy_(scores.softmax(1).masked_fill(empty, 0).gather(1, ids_out))
    if target_ids is not None:
        ids_out.copy_(target_ids[ids_out])


def argmax_tokens(logits: Tensor) -> Tensor:
    """Return each row's most probable token, the lowest among equals.

    A row with NaN or +inf, or of -inf alone, gives -1. One launch for many rows, two for few,
    which are split among programs.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``, any float dtype; dense last axis.

    Returns
    -------
    Tensor
        ``[R]`` int64.

    Raises
    ------
    ValueError
        If the last axis of ``logits`` is not dense.
    """
    require_rows(logits=logits)
    if on_triton(logits):
        rows, vocab = logits.shape
        tiles = cdiv(vocab, _ARGMAX_BLOCK)
        splits = programs_per_row(rows, tiles)
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if not rows:
            return out
        keys = out if splits == 1 else out.new_empty(rows, splits)
        options = launch_options(logits.device)
        choose_kernels.argmax_kernel[rows, splits](
            logits,
            keys,
            vocab,
            tiles,
            logits.stride(0),
            MERGED=splits == 1,
            BLOCK=_ARGMAX_BLOCK,
            **options,
        )
        if splits > 1:
            choose_kernels.argmax_merge_kernel[(rows,)](
                keys, out, splits, BLOCK=split_lanes(splits), num_warps=1, **options
            )
        return out
    return _numbers(logits).argmax(1).masked_fill(~_is_sound(logits), -1)


def target_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    rows_per_req: int,
    min_p: Tensor | None = None,
) -> Tensor:
    """Return the distributions that sampling with these settings draws from.

    Temperature comes first, then top-k, then top-p on what top-k left, then min-p, as in Hugging
    Face. Tokens tie if their logits are equally far below the largest, in float32. A row with NaN
    or +inf, or of -inf alone, has no distribution: all its probabilities are NaN.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``, any float dtype, R = B * rows_per_req.
    temperature : Tensor
        ``[B]`` float32. 0 is greedy: all mass on the largest logit, the lowest token among equals.
    top_k : Tensor, optional
        ``[B]`` int32: keep that many tokens, the lower token at a tie; all of them if 0 or at least
        V. None switches it off for the batch.
    top_p : Tensor, optional
        ``[B]`` float32: keep the fewest most likely tokens that reach this mass, at least one; all
        of them from 1 on. None switches it off for the batch; without top-k too, two launches do.
    rows_per_req : int
        Consecutive rows that share a request's settings.
    min_p : Tensor, optional
        ``[B]`` float32: of what the others left, keep tokens at least that many times as probable
        as the most probable one; all of them if 0. None switches it off for the batch; else one
        launch more reads the rows of requests that use it.

    Returns
    -------
    Tensor
        ``[R, V]`` float32; every other row sums to 1.

    Raises
    ------
    ValueError
        If the last axis of ``logits`` is not dense.
    """
    require_rows(logits=logits)
    if on_triton(logits):
        return probs_kernels.target_probs(
            logits=logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            rows_per_req=rows_per_req,
            min_p=min_p,
        )
    logits = logits.float()
    sound = _is_sound(logits)[:, None]  # [R, 1]
    logits = torch.where(sound, logits, 0.0)
    temp = temperature.repeat_interleave(rows_per_req)[:, None]
    below = logits.amax(1, keepdim=True) - logits
    scaled = -below / torch.where(temp == 0, 1.0, temp)
    if top_k is not None or top_p is not None:
        scaled = _truncate(below, scaled, top_k, top_p, rows_per_req)
    if min_p is not None:
        # the most probable token is never cut, and has the weight 1
        least = min_p.repeat_interleave(rows_per_req)[:, None]
        scaled = scaled.masked_fill(scaled.exp() < least, -torch.inf)
    probs = scaled.softmax(1)
    best = torch.zeros_like(probs).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    return torch.where(sound, torch.where(temp == 0, best, probs), torch.nan)


def uniform(seeds: Tensor, positions: Tensor, draw: int) -> Tensor:
    """Return the coin of each (seed, position, draw), in one launch.

    The coin does not depend on the batch or the device: the generator is counter-based, SplitMix64
    (Steele, Lea, Flood 2014) chained over the three numbers.

    Parameters
    ----------
    seeds : Tensor
        ``[B]`` int64, one per request.
    positions : Tensor
        ``[B, ...]`` int64.
    draw : int
        ``ACCEPT``, ``FINAL`` or ``DRAFT``; more are free to use.

    Returns
    -------
    Tensor
        Shape of ``positions``, float32 multiples of 2^-24 in [0, 1).

    Raises
    ------
    ValueError
        If ``seeds`` is not contiguous.
    """
    require_dense(seeds=seeds)
    if on_triton(seeds):
        coins = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
        if count := coins.numel():
            flat = positions.flatten(1) if positions.dim() > 1 else positions[:, None]
            draw_kernels.coins_kernel[cdiv(count, _COINS), 1](
                seeds,
                flat,
                coins,
                count,
                flat.shape[1],
                draw,
                *flat.stride(),
                DEPTHS=False,
                BLOCK=_COINS,
            )
        return coins
    seeds = seeds.reshape(-1, *[1] * (positions.dim() - 1))
    state = _mix(_mix(_mix(seeds) + positions) + draw)
    return _shift(state, 40).float() * 2.0**-24


def path_coins(seeds: Tensor, seq_lens: Tensor, depths: int, draws: int) -> Tensor:
    """Return a step's coins, `uniform` at ``seq_lens + depth``, in one launch.

    Parameters
    ----------
    seeds, seq_lens : Tensor
        ``[B]`` int64 and int32.
    depths : int
        Depths per request, from 0.
    draws : int
        Draws per depth, from ``ACCEPT``, which is 0.

    Returns
    -------
    Tensor
        ``[draws, B, depths]`` float32.

    Raises
    ------
    ValueError
        If a tensor is not contiguous.
    """
    require_dense(seeds=seeds, seq_lens=seq_lens)
    if on_triton(seeds):
        coins = torch.empty(draws, len(seeds), depths, dtype=torch.float32, device=seeds.device)
        if count := len(seeds) * depths:
            draw_kernels.coins_kernel[cdiv(count, _COINS), draws](
                seeds, seq_lens, coins, count, depths, 0, 1, 0, DEPTHS=True, BLOCK=_COINS
            )
        return coins
    positions = seq_lens.long()[:, None] + torch.arange(depths, device=seq_lens.device)
    return torch.stack([uniform(seeds, positions, draw) for draw in range(draws)])


def draw_tokens(weights: Tensor, coins: Tensor) -> Tensor:
    """Draw one token per row by inverting its distribution function.

    One launch draws all rows.
    The token is the first of positive weight whose cumulative weight exceeds ``coin * total``:
    half-open, so no coin in [0, 1) can pick a token of weight 0.

    Parameters
    ----------
    weights : Tensor
        ``[B, V]`` float32, need not sum to 1; negative weights count as 0.
    coins : Tensor
        ``[B]`` float32 in [0, 1).

    Returns
    -------
    Tensor
        ``[B]`` int64; 0, which may be embedded, for a row without weight or with one that is NaN
        or infinite.

    Raises
    ------
    ValueError
        If a last axis, or ``coins``, is not dense.
    """
    require_dense(coins=coins)
    require_rows(weights=weights)
    if on_triton(weights):
        rows, vocab = weights.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=weights.device)
        if rows:
            draw_kernels.draw_kernel[(rows,)](
                weights, coins, tokens, vocab, weights.stride(0), **vocab_tiles(vocab, 64)
            )
        return tokens
    return sample_weights(weights, coins).clamp(min=0)


def score_key(scores: Tensor) -> Tensor:
    """Map float32 to ordered int32 keys; NaN is lowest, -0 is 0."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return keys.masked_fill(scores.isnan(), -(2**31))


def _is_sound(logits: Tensor) -> Tensor:
    """Return which rows have a finite largest logit, and so no NaN."""
    return logits.amax(1).isfinite()


def _numbers(logits: Tensor) -> Tensor:
    """Return float32 logits with -inf for NaN, and one zero."""
    return logits.float().nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0


def _truncate(
    below: Tensor, scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None, rows_per_req: int
) -> Tensor:
    vocab = scaled.shape[1]
    order = below.sort(dim=1, stable=True).indices
    ordered = scaled.gather(1, order)
    if top_k is not None:
        limit = top_k.repeat_interleave(rows_per_req)[:, None]
        rank = torch.arange(vocab, device=scaled.device)
        ordered = ordered.masked_fill((rank >= limit) & (limit > 0), -torch.inf)
    if top_p is not None:
        share = top_p.repeat_interleave(rows_per_req)[:, None]
        reached = ordered.exp().double().cumsum(1)
        before = reached.roll(1, dims=1)
        before[:, 0] = -1
        enough = before >= share.double() * reached[:, -1:]
        ordered = ordered.masked_fill(enough & (share < 1), -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def _mix(state: Tensor) -> Tensor:
    """One SplitMix64 step; int64 arithmetic wraps, so this is the unsigned algorithm."""
    state = state + _GOLDEN
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (state >> bits) & ((1 << 64 - bits) - 1)


def sample_weights(weights: Tensor, coins: Tensor) -> Tensor:
    """Draw a token per row; -1 unless its weight is positive, finite."""
    possible = weights > 0
    reached = weights.clamp(min=0).double().cumsum(1)
    sound = possible.any(1) & reached[:, -1].isfinite()
    hit = possible & (reached > coins[:, None].double() * reached[:, -1:])
    last = weights.shape[1] - 1 - possible.flip(1).int().argmax(1)
    token = torch.where(hit.any(1), hit.int().argmax(1), last)
    return token.masked_fill(~sound, -1)


def vocab_tiles(vocab: int, most_rows: int) -> dict[str, int]:
    """Return launch options of vocabulary tiles, ``ROWS`` segments loaded together."""
    segments = cdiv(vocab, _SEGMENT)
    rows = min(most_rows, power_of_2(segments))
    tiles = power_of_2(cdiv(segments, rows))
    return {
        "ROWS": rows,
        "SEGMENT": _SEGMENT,
        "TILES": tiles,
        "num_warps": max(4, min(16, rows // 2)),
    }
