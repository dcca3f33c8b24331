"""Write new keys and values into the paged pool: one launch for both, one program per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


# the largest number of e4m3
FLOAT8_MAX = tl.constexpr(448.0)


@triton.jit
def _as_stored(values, factor, cache):
    """Convert to the dtype of ``cache``; to float8 times ``factor``, cut at its largest number."""
    if cache.dtype.element_ty == tl.float8e4nv:
        values = values.to(tl.float32) * factor
        # a NaN stays one
        values = tl.clamp(values, -FLOAT8_MAX, FLOAT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return values.to(cache.dtype.element_ty)


@triton.jit
def _store_kernel(
    k,  # [T, heads, k_dim]
    v,  # [T, heads, v_dim]
    k_cache,  # [slots, heads, k_dim], out
    v_cache,  # [slots, heads, v_dim], out
    slots,  # [B, Q_LEN] int32
    k_factor,
    v_factor,
    stride_slot,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kc,
    stride_kch,
    stride_vc,
    stride_vch,
    Q_LEN: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token // Q_LEN * stride_slot + token % Q_LEN).to(tl.int64)

    flat = tl.arange(0, K_BLOCK)  # [K_BLOCK]
    head, dim = flat // K_DIM, flat % K_DIM
    values = tl.load(k + token * stride_kt + head * stride_kh + dim, mask=flat < K_SIZE, other=0)
    values = _as_stored(values, k_factor, k_cache)
    tl.store(k_cache + slot * stride_kc + head * stride_kch + dim, values, mask=flat < K_SIZE)

    flat = tl.arange(0, V_BLOCK)  # [V_BLOCK]
    head, dim = flat // V_DIM, flat % V_DIM
    values = tl.load(v + token * stride_vt + head * stride_vh + dim, mask=flat < V_SIZE, other=0)
    values = _as_stored(values, v_factor, v_cache)
    tl.store(v_cache + slot * stride_vc + head * stride_vch + dim, values, mask=flat < V_SIZE)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write ``k [T, Hkv, D]`` and ``v [T, Hkv, Dv]`` to the ``[B, q]`` int32 slots (B q = T).

    The slots may be a view with a row stride. Into float8 (e4m3) caches go ``k / k_scale`` and
    ``v / v_scale``, rounded to nearest and cut at +-448; into others the scales do not matter.
    """
    tokens, heads, k_dim = k.shape
    v_dim = v.shape[-1]
    if not tokens:
        return
    _store_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        1 / k_scale,
        1 / v_scale,
        slots.stride(0),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        Q_LEN=slots.shape[1],
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_SIZE=heads * k_dim,
        V_SIZE=heads * v_dim,
        K_BLOCK=triton.next_power_of_2(heads * k_dim),
        V_BLOCK=triton.next_power_of_2(heads * v_dim),
    )
