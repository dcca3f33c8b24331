"""Twins of `specattn.kernels.glue`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from specattn.kernels.reference.kv_store import store_kv


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def add_rms_norm(
    parts: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rows: Tensor | None = None,
    residual_out: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `specattn.kernels.glue.add_rms_norm`."""
    total = (parts.float().sum(0) + residual.float()).to(residual.dtype)
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
    ids: Tensor, table: Tensor, weight: Tensor, eps: float, *, embedded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `specattn.kernels.glue.embed_rms_norm`."""
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
    *,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `specattn.kernels.glue.embed_norm_pair`."""
    if rows is not None:
        hidden = hidden[rows]
    dtype = hidden_weight.dtype
    pair = (
        _norm(table[ids].to(dtype), embed_weight, eps),
        _norm(hidden.to(dtype), hidden_weight, eps),
    )
    return torch.cat(pair, dim=-1).to(dtype), hidden


def silu_mul(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """See `specattn.kernels.glue.silu_mul`."""
    gate, up = parts.float().sum(0).chunk(2, dim=-1)
    return (silu(gate) * up).to(dtype)


def rotate_store(
    parts: Tensor,
    positions: Tensor,
    table: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor | None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    following: bool = False,
) -> None:
    """See `specattn.kernels.glue.rotate_store`; ``following`` changes nothing here."""
    count, q_heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    heads = parts.float().sum(0).unflatten(-1, (-1, dim))
    new_q, new_k, new_v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        new_q, new_k = _norm(new_q, norms[0], eps), _norm(new_k, norms[1], eps)
    cosine, sine = table[positions.clamp(max=len(table) - 1)][:, None].chunk(2, dim=-1)
    q.copy_(_rotate(new_q, cosine, sine))
    if slots is None:
        slots = torch.arange(count, dtype=torch.int32, device=q.device)[:, None]
    new_k, new_v = _rotate(new_k, cosine, sine).to(q.dtype), new_v.to(q.dtype)
    store_kv(new_k, new_v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)
