"""Kernels between a decoder's matrix products, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.cache.triton import as_stored
from specattn.kernels.launch import enter, launch_options

if TYPE_CHECKING:
    from specattn.kernels.fused import Rotation

# columns per program of the activation and of the sum
SPAN = 512


@triton.jit
def sum_partials(partials, at, ok, stride_partial, SPLIT: tl.constexpr):
    """Add up the partials at ``at``, in their order and in float32."""
    # all loads first
    loaded = ()
    for s in tl.static_range(SPLIT):
        values = tl.load(partials + s * stride_partial + at, mask=ok, other=0.0)
        # Triton knows tuple addition, not unpacking; mypy knows empty tuples by length
        loaded = loaded + (values,)  # type: ignore[assignment]  # noqa: RUF005
    total = loaded[0].to(tl.float32)  # type: ignore[misc]
    for s in tl.static_range(1, SPLIT):
        total += loaded[s].to(tl.float32)
    return total


@triton.jit
def _norm(x, weight, eps, SIZE: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight


@triton.jit
def add_norm_kernel(
    partials,  # [SPLIT, T, SIZE]
    residual,  # [T, SIZE]
    weight,  # [SIZE]
    rows,  # [R] int64, or None for all
    residual_out,  # [R, SIZE], out
    out,  # [R, SIZE], out
    eps,
    stride_partial,
    stride_row,
    stride_residual,
    stride_residual_out,
    stride_out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a product to a row of the stream; norm the sum."""
    to = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    scale = tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    enter(PDL)
    row = to
    if rows is not None:
        row = tl.load(rows + to)
    x = sum_partials(partials, row * stride_row + column, ok, stride_partial, SPLIT)
    x += tl.load(residual + row * stride_residual + column, mask=ok, other=0.0).to(tl.float32)
    # the norm is of what the stream holds, as rounded
    x = x.to(residual_out.dtype.element_ty)
    tl.store(residual_out + to * stride_residual_out + column, x, mask=ok)
    x = _norm(x.to(tl.float32), scale, eps, SIZE)
    tl.store(out + to * stride_out + column, x.to(out.dtype.element_ty), mask=ok)


@triton.jit
def embed_norm_kernel(
    ids,  # [T] int64
    table,  # [V, SIZE]
    weight,  # [SIZE]
    embedded,  # [T, SIZE], out
    out,  # [T, SIZE], out
    eps,
    stride_table,
    stride_embedded,
    stride_out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Look up one token's embedding, and norm it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    scale = tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    enter(PDL)
    x = tl.load(table + tl.load(ids + row) * stride_table + column, mask=ok, other=0.0)
    x = x.to(embedded.dtype.element_ty)
    tl.store(embedded + row * stride_embedded + column, x, mask=ok)
    x = _norm(x.to(tl.float32), scale, eps, SIZE)
    tl.store(out + row * stride_out + column, x.to(out.dtype.element_ty), mask=ok)


@triton.jit
def norm_pair_kernel(
    ids,  # [T] int64
    table,  # [V, SIZE]
    hidden,  # [N, SIZE]
    rows,  # [T] int64, or None: token i's is row i
    embed_weight,  # [SIZE]
    hidden_weight,  # [SIZE]
    hidden_out,  # [T, SIZE], out; None without rows
    out,  # [T, 2, SIZE], out
    eps,
    stride_table,
    stride_hidden,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm one token's embedding, or its hidden state."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    scale = tl.load((embed_weight if half == 0 else hidden_weight) + column, mask=ok, other=0.0)
    enter(PDL)
    if half == 0:
        x = tl.load(table + tl.load(ids + row) * stride_table + column, mask=ok, other=0.0)
        x = x.to(out.dtype.element_ty)
    else:
        source = row
        if rows is not None:
            source = tl.load(rows + row)
        x = tl.load(hidden + source * stride_hidden + column, mask=ok, other=0.0)
        if rows is not None:
            tl.store(hidden_out + row * SIZE + column, x, mask=ok)
        x = x.to(out.dtype.element_ty)
    x = _norm(x.to(tl.float32), scale.to(tl.float32), eps, SIZE)
    tl.store(out + (row * 2 + half) * SIZE + column, x.to(out.dtype.element_ty), mask=ok)


@triton.jit
def silu_mul_kernel(
    partials,  # [SPLIT, T, 2, SIZE]
    out,  # [T, SIZE], out
    stride_partial,
    stride_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    enter(PDL)
    at = row * stride_row + column
    gate = sum_partials(partials, at, ok, stride_partial, SPLIT)
    up = sum_partials(partials, at + SIZE, ok, stride_partial, SPLIT)
    x = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + column, x.to(out.dtype.element_ty), mask=ok)


@triton.jit
def split_k_reduce_kernel(
    partials,  # [SPLIT, T, SIZE]
    out,  # [T, SIZE], out
    stride_partial,
    stride_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the partials of some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    enter(PDL)
    x = sum_partials(partials, row * stride_row + column, ok, stride_partial, SPLIT)
    tl.store(out + row * SIZE + column, x.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _place(
    positions,
    table,
    slots,
    token,
    dim,
    last_position,
    stride_slot,
    Q_LEN: tl.constexpr,
    DIM: tl.constexpr,
    CACHE: tl.constexpr,
):
    """A token's slot, and the cosines and sines of its position."""
    HALF: tl.constexpr = DIM // 2
    slot = token
    if slots is not None:
        at = slots + token // Q_LEN * stride_slot + token % Q_LEN
        slot = tl.load(at, cache_modifier=CACHE).to(tl.int64)
    # positions past the table's end would be read from elsewhere
    position = tl.minimum(tl.load(positions + token, cache_modifier=CACHE), last_position)
    cosine = tl.load(table + position * DIM + dim, mask=dim < HALF, other=0.0)[None, :]
    sine = tl.load(table + position * DIM + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    return slot, cosine, sine


@triton.jit
def qk_norm_rope_store_kernel(
    partials,  # [SPLIT, T, Q_HEADS + 2 * KV_HEADS, DIM]
    positions,  # [T] int64
    table,  # [L, DIM] float32: cosines of DIM / 2 angles, then their sines
    q_weight,  # [DIM], or None
    k_weight,  # [DIM], or None
    q,  # [T, Q_HEADS, DIM], out
    k_cache,  # [slots, KV_HEADS, DIM], out
    v_cache,  # [slots, KV_HEADS, DIM], out
    slots,  # [B, Q_LEN], below 0 skipped; or None: token i goes to row i
    eps,
    k_factor,
    v_factor,
    last_position,
    stride_partial,
    stride_row,
    stride_slot,
    stride_kc,
    stride_kch,
    stride_vc,
    stride_vch,
    Q_LEN: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm, rotate and store some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    HALF: tl.constexpr = DIM // 2
    head = first + tl.arange(0, HEADS)  # [HEADS]
    dim = tl.arange(0, HALF_BLOCK)  # [HALF_BLOCK]
    ok = (dim < HALF)[None, :] & (head >= 0)[:, None]
    if PREFETCH:
        # by the L1 cache, which keeps nothing of other kernels' writes up to date
        slot, cosine, sine = _place(
            positions, table, slots, token, dim, last_position, stride_slot, Q_LEN, DIM, ".cg"
        )
    if q_weight is not None:
        weight = (q_weight if first < Q_HEADS else k_weight) + dim
        low_weight = tl.load(weight, mask=dim < HALF, other=0.0)[None, :]
        high_weight = tl.load(weight + HALF, mask=dim < HALF, other=0.0)[None, :]
    enter(PDL)
    if not PREFETCH:
        slot, cosine, sine = _place(
            positions, table, slots, token, dim, last_position, stride_slot, Q_LEN, DIM, ""
        )
    at = token * stride_row + head[:, None] * DIM + dim[None, :]
    low = sum_partials(partials, at, ok, stride_partial, SPLIT)
    high = sum_partials(partials, at + HALF, ok, stride_partial, SPLIT)
    if first < Q_HEADS + KV_HEADS:
        if q_weight is not None:
            mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM
            factor = tl.rsqrt(mean + eps)[:, None]
            low *= factor * low_weight
            high *= factor * high_weight
        low, high = low * cosine - high * sine, high * cosine + low * sine
    if first < Q_HEADS:
        q_to = q + (token * Q_HEADS + head[:, None]) * DIM + dim[None, :]
        tl.store(q_to, low.to(q.dtype.element_ty), mask=ok)
        tl.store(q_to + HALF, high.to(q.dtype.element_ty), mask=ok)
    elif first < Q_HEADS + KV_HEADS:
        k_head = (head - Q_HEADS)[:, None] * stride_kch
        # a float8 pool stores what the model's dtype holds, as `store_kv` does
        k_to = k_cache + slot * stride_kc + k_head + dim[None, :]
        ok &= slot >= 0
        tl.store(k_to, as_stored(low.to(q.dtype.element_ty), k_factor, k_cache), mask=ok)
        tl.store(k_to + HALF, as_stored(high.to(q.dtype.element_ty), k_factor, k_cache), mask=ok)
    else:
        v_head = (head - (Q_HEADS + KV_HEADS))[:, None] * stride_vch
        v_to = v_cache + slot * stride_vc + v_head + dim[None, :]
        ok &= slot >= 0
        tl.store(v_to, as_stored(low.to(q.dtype.element_ty), v_factor, v_cache), mask=ok)
        tl.store(v_to + HALF, as_stored(high.to(q.dtype.element_ty), v_factor, v_cache), mask=ok)


def add_rms_norm(
    *,
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
    *, ids: Tensor, table: Tensor, weight: Tensor, eps: float, embedded: Tensor | None
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
    *,
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


def silu_mul(*, partials: Tensor, dtype: torch.dtype) -> Tensor:
    _, count, both = partials.shape
    return _by_columns(silu_mul_kernel, partials, partials.new_empty(count, both // 2, dtype=dtype))


def split_k_reduce(*, partials: Tensor, dtype: torch.dtype) -> Tensor:
    out = partials.new_empty(partials.shape[1:], dtype=dtype)
    return _by_columns(split_k_reduce_kernel, partials, out)


def _by_columns(kernel: Any, partials: Tensor, out: Tensor) -> Tensor:
    """Launch a kernel over rows of ``out``, `SPAN` columns per program."""
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
    *,
    partials: Tensor,
    positions: Tensor,
    rotation: Rotation,
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
    q_weight, k_weight = rotation.norms or (None, None)
    qk_norm_rope_store_kernel[(count, (q_heads + 2 * kv_heads) // heads)](
        partials,
        positions,
        rotation.table,
        q_weight,
        k_weight,
        q,
        k_cache,
        v_cache,
        slots,
        rotation.eps,
        1 / k_scale,
        1 / v_scale,
        len(rotation.table) - 1,
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
