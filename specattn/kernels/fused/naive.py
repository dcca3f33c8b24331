"""Norms, rotation and KV store, activation, in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from specattn.kernels.cache import store_kv


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def add_rms_norm(
    partials: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    rows: Tensor | None,
    residual_out: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    total = (partials.float().sum(0) + residual.float()).to(residual.dtype)
    if rows is not None:
        total = total[rows]
    if residual_out is None:
        residual_out = torch.empty_like(total)
    residual_out.copy_(total)
    if out is None:
        out = torch.empty_like(total)
    out.copy_(_norm(total, weight, eps))
    return out, residual_out


def embed_rms_norm(
    ids: Tensor, table: Tensor, weight: Tensor, eps: float, embedded: Tensor | None
) -> tuple[Tensor, Tensor]:
    if embedded is None:
        embedded = weight.new_empty(len(ids), table.shape[1])
    embedded.copy_(table[ids])
    return _norm(embedded, weight, eps).to(weight.dtype), embedded


def embed_norm_pair(
    ids: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if rows is not None:
        hidden = hidden[rows]
    dtype = hidden_weight.dtype
    pair = (
        _norm(table[ids].to(dtype), embed_weight, eps),
        _norm(hidden.to(dtype), hidden_weight, eps),
    )
    return torch.cat(pair, dim=-1).to(dtype), hidden


def silu_mul(partials: Tensor, dtype: torch.dtype) -> Tensor:
    gate, up = partials.float().sum(0).chunk(2, dim=-1)
    return (silu(gate) * up).to(dtype)


def qk_norm_rope_store_kv(
    partials: Tensor,
    positions: Tensor,
    table: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor | None,
    k_scale: float,
    v_scale: float,
    prefetch: bool,
) -> None:
    count, q_heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    heads = partials.float().sum(0).unflatten(-1, (-1, dim))
    new_q, new_k, new_v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        new_q, new_k = _norm(new_q, norms[0], eps), _norm(new_k, norms[1], eps)
    cosine, sine = table[positions.clamp(max=len(table) - 1)][:, None].chunk(2, dim=-1)
    q.copy_(_rotate(new_q, cosine, sine))
    if slots is None:
        slots = torch.arange(count, dtype=torch.int32, device=q.device)[:, None]
    new_k, new_v = _rotate(new_k, cosine, sine).to(q.dtype), new_v.to(q.dtype)
    store_kv(new_k, new_v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


def split_k_reduce(partials: Tensor, dtype: torch.dtype) -> Tensor:
    return partials.float().sum(0).to(dtype)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)
