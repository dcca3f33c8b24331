"""Launches of the kernels between a decoder's matrix products."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specattn.kernels.fused.triton_norm import (
    add_norm_kernel,
    embed_norm_kernel,
    norm_pair_kernel,
    silu_mul_kernel,
    split_k_reduce_kernel,
)
from specattn.kernels.fused.triton_rope import qk_norm_rope_store_kernel
from specattn.kernels.launch import launch_options

# columns per program of the activation and of the sum
SPAN = 512


def add_rms_norm(
    partials: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    rows: Tensor | None,
    residual_out: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    count = residual.shape[0] if rows is None else rows.shape[0]
    size = residual.shape[1]
    if residual_out is None:
        residual_out = residual.new_empty(count, size)
    if out is None:
        out = residual.new_empty(count, size)
    if count:
        add_norm_kernel[(count,)](
            partials,
            residual,
            weight,
            rows,
            residual_out,
            out,
            eps,
            partials.stride(0),
            partials.stride(1),
            residual.stride(0),
            residual_out.stride(0),
            out.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            SPLIT=partials.shape[0],
            num_warps=_warps(size),
            **launch_options(residual.device),
        )
    return out, residual_out


def embed_rms_norm(
    ids: Tensor, table: Tensor, weight: Tensor, eps: float, embedded: Tensor | None
) -> tuple[Tensor, Tensor]:
    size = table.shape[1]
    if embedded is None:
        embedded = weight.new_empty(len(ids), size)
    out = weight.new_empty(len(ids), size)
    if len(ids):
        embed_norm_kernel[(len(ids),)](
            ids,
            table,
            weight,
            embedded,
            out,
            eps,
            table.stride(0),
            embedded.stride(0),
            out.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=_warps(size),
            **launch_options(weight.device),
        )
    return out, embedded


def embed_norm_pair(
    ids: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    count, size = len(ids), hidden.shape[1]
    out = hidden_weight.new_empty(count, 2 * size)
    chosen = None if rows is None else hidden.new_empty(count, size)
    if count:
        norm_pair_kernel[(count, 2)](
            ids,
            table,
            hidden,
            rows,
            embed_weight,
            hidden_weight,
            chosen,
            out,
            eps,
            table.stride(0),
            hidden.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=_warps(size),
            **launch_options(hidden.device),
        )
    return out, hidden if chosen is None else chosen


def silu_mul(partials: Tensor, dtype: torch.dtype) -> Tensor:
    _, count, both = partials.shape
    return _by_columns(silu_mul_kernel, partials, partials.new_empty(count, both // 2, dtype=dtype))


def split_k_reduce(partials: Tensor, dtype: torch.dtype) -> Tensor:
    out = partials.new_empty(partials.shape[1:], dtype=dtype)
    return _by_columns(split_k_reduce_kernel, partials, out)


def _by_columns(kernel: Any, partials: Tensor, out: Tensor) -> Tensor:
    """Launch a kernel that fills ``out`` row by row, `SPAN` columns per program."""
    count, size = out.shape
    if count:
        kernel[(count, triton.cdiv(size, SPAN))](
            partials,
            out,
            partials.stride(0),
            partials.stride(1),
            SIZE=size,
            BLOCK=SPAN,
            SPLIT=len(partials),
            num_warps=2,
            **launch_options(partials.device),
        )
    return out


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
    # a program's heads are all queries, all keys or all values
    heads = next(n for n in (4, 2, 1) if q_heads % n == 0 and kv_heads % n == 0)
    q_weight, k_weight = norms or (None, None)
    qk_norm_rope_store_kernel[(count, (q_heads + 2 * kv_heads) // heads)](
        partials,
        positions,
        table,
        q_weight,
        k_weight,
        q,
        k_cache,
        v_cache,
        slots,
        eps,
        1 / k_scale,
        1 / v_scale,
        len(table) - 1,
        partials.stride(0),
        partials.stride(1),
        0 if slots is None else slots.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        Q_LEN=1 if slots is None else slots.shape[1],
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF_BLOCK=triton.next_power_of_2(dim // 2),
        HEADS=heads,
        SPLIT=partials.shape[0],
        PREFETCH=prefetch,
        num_warps=2,
        **launch_options(q.device),
    )


def _warps(size: int) -> int:
    """Return as many warps as a whole row takes: they await memory."""
    return max(1, min(32, int(triton.next_power_of_2(size)) // 128))
