"""Sampling in torch, on any device and without a synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

# Draw indices of `uniform`: what a coin decides.
ACCEPT, FINAL, DRAFT = 0, 1, 2

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def target_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    rows_per_req: int,
) -> Tensor:
    """Return the distributions that sampling with these settings draws from.

    Temperature comes first, then top-k, then top-p on what top-k left, as in Hugging Face. Tokens
    tie if their logits are equally far below the largest, in float32. NaN counts as -inf, +inf is
    not allowed, and a row of -inf has all its mass on token 0.

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
        of them from 1 on. None switches it off for the batch; without top-k too, nothing is sorted.
    rows_per_req : int
        Consecutive rows that share a request's settings.

    Returns
    -------
    Tensor
        ``[R, V]`` float32; every row sums to 1.
    """
    logits = logits.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    warmth = temperature.repeat_interleave(rows_per_req)[:, None]  # [R, 1]
    peak = logits.amax(1, keepdim=True)
    one = (warmth == 0) | (peak == -torch.inf)
    below = torch.where(peak == -torch.inf, torch.inf, peak - logits)
    scaled = -below / torch.where(one, 1.0, warmth)
    if top_k is not None or top_p is not None:
        scaled = _truncate(below, scaled, top_k, top_p, rows_per_req)
    probs = scaled.softmax(1)
    best = torch.zeros_like(probs).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    return torch.where(one, best, probs)


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


def uniform(seeds: Tensor, positions: Tensor, draw: int) -> Tensor:
    """Return the coin of each (seed, position, draw): the same number in any batch, on any device.

    A counter-based generator: SplitMix64 (Steele, Lea, Flood 2014) chained over the three.

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
    """
    seeds = seeds.reshape(-1, *[1] * (positions.dim() - 1))
    state = _mix(_mix(_mix(seeds) + positions) + draw)
    return _shift(state, 40).float() * 2.0**-24


def path_coins(seeds: Tensor, seq_lens: Tensor, depths: int, draws: int) -> Tensor:
    """Return the coins of all depths of a step: `uniform` at ``seq_lens + depth``.

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
    """
    positions = seq_lens.long()[:, None] + torch.arange(depths, device=seq_lens.device)
    return torch.stack([uniform(seeds, positions, draw) for draw in range(draws)])


def _mix(state: Tensor) -> Tensor:
    """One SplitMix64 step; int64 arithmetic wraps, so this is the unsigned algorithm."""
    state = state + _GOLDEN
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (state >> bits) & ((1 << 64 - bits) - 1)


def draw_tokens(weights: Tensor, coins: Tensor, fallback: Tensor | None = None) -> Tensor:
    """Draw one token per row by inverting its distribution function.

    The token is the first of positive weight whose cumulative weight exceeds ``coin * total``:
    half-open, so no coin in [0, 1) can pick a token of weight 0.

    Parameters
    ----------
    weights : Tensor
        ``[B, V]`` float32, need not sum to 1; NaN and negative weights count as 0.
    coins : Tensor
        ``[B]`` float32 in [0, 1).
    fallback : Tensor, optional
        ``[B, V]`` weights for rows without any.

    Returns
    -------
    Tensor
        ``[B]`` int64; 0 for a row without any weight.
    """
    tokens = _invert(weights, coins)
    if fallback is not None:
        tokens = torch.where(tokens < 0, _invert(fallback, coins), tokens)
    return tokens.clamp(min=0)


def _invert(weights: Tensor, coins: Tensor) -> Tensor:
    possible = weights > 0
    reached = torch.where(possible, weights, 0.0).double().cumsum(1)
    hit = possible & (reached > coins[:, None].double() * reached[:, -1:])
    last = weights.shape[1] - 1 - possible.flip(1).int().argmax(1)
    token = torch.where(hit.any(1), hit.int().argmax(1), last)
    return token.masked_fill(~possible.any(1), -1)
