"""Norm and rotate heads, and store keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.cache.triton import as_stored
from specattn.kernels.fused.triton_norm import sum_partials
from specattn.kernels.launch import enter


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
