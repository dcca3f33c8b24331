"""Sampling in torch, without a synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def top_tokens(
    logits: Tensor, topk: int, probs_out: Tensor, ids_out: Tensor, target_ids: Tensor | None
) -> None:
    scores = _numbers(logits)
    # distinct keys: no tie is left to the library
    falling = torch.arange(logits.shape[1], 0, -1, device=logits.device)
    ids_out.copy_((score_key(scores).long() * 2**32 + falling).topk(topk).indices)
    empty = scores.amax(1, keepdim=True) == -torch.inf
    probs_out.copy_(scores.softmax(1).masked_fill(empty, 0).gather(1, ids_out))
    if target_ids is not None:
        ids_out.copy_(target_ids[ids_out])


def score_key(scores: Tensor) -> Tensor:
    """Map float32 to ordered int32 keys; NaN is lowest, -0 is 0."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return keys.masked_fill(scores.isnan(), -(2**31))


def argmax_tokens(logits: Tensor) -> Tensor:
    return _numbers(logits).argmax(1).masked_fill(~_is_sound(logits), -1)


def _is_sound(logits: Tensor) -> Tensor:
    """Return which rows have a finite largest logit, and so no NaN."""
    return logits.amax(1).isfinite()


def _numbers(logits: Tensor) -> Tensor:
    """Return float32 logits with -inf for NaN, and one zero."""
    return logits.float().nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0


def target_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    rows_per_req: int,
    min_p: Tensor | None,
) -> Tensor:
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
    seeds = seeds.reshape(-1, *[1] * (positions.dim() - 1))
    state = _mix(_mix(_mix(seeds) + positions) + draw)
    return _shift(state, 40).float() * 2.0**-24


def path_coins(seeds: Tensor, seq_lens: Tensor, depths: int, draws: int) -> Tensor:
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


def draw_tokens(weights: Tensor, coins: Tensor) -> Tensor:
    return sample_weights(weights, coins).clamp(min=0)


def sample_weights(weights: Tensor, coins: Tensor) -> Tensor:
    """Draw a token per row; -1 unless its weight is positive, finite."""
    possible = weights > 0
    reached = weights.clamp(min=0).double().cumsum(1)
    sound = possible.any(1) & reached[:, -1].isfinite()
    hit = possible & (reached > coins[:, None].double() * reached[:, -1:])
    last = weights.shape[1] - 1 - possible.flip(1).int().argmax(1)
    token = torch.where(hit.any(1), hit.int().argmax(1), last)
    return token.masked_fill(~sound, -1)
