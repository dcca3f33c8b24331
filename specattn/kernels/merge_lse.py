"""Merge attention over a shared prefix with attention over each query token's own tail keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _merge_lse_kernel(
    prefix_out,  # [B, T, H, D]
    prefix_lse,  # [B, T, H] float32
    prefix_keys,  # [B] int32
    tail_out,  # [B, T, H, D]
    tail_lse,  # [B, T, H] float32
    tail_keys,  # [B, T] int32
    out,  # [B, T, H, D], out; may be prefix_out
    lse,  # [B, T, H] float32, out, or None
    q_len,
    heads,
    head_dim,
    prefix_b,
    prefix_t,
    prefix_h,
    tail_b,
    tail_t,
    tail_h,
    out_b,
    out_t,
    out_h,
    prefix_lse_b,
    prefix_lse_t,
    prefix_lse_h,
    tail_lse_b,
    tail_lse_t,
    tail_lse_h,
    lse_b,
    lse_t,
    lse_h,
    UNIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b, t = row // q_len, row % q_len
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    ok = h < heads
    # what a kernel writes for a row without keys is not relied upon
    in_prefix = ok & (tl.load(prefix_keys + b) > 0)
    in_tail = ok & (tl.load(tail_keys + row) > 0)

    empty = float("-inf")
    at = b * prefix_lse_b + t * prefix_lse_t + h * prefix_lse_h
    log_p = tl.load(prefix_lse + at, mask=in_prefix, other=empty) * UNIT
    at = b * tail_lse_b + t * tail_lse_t + h * tail_lse_h
    log_t = tl.load(tail_lse + at, mask=in_tail, other=empty) * UNIT
    top = tl.maximum(log_p, log_t)
    base = tl.where(top == empty, 0.0, top)
    weight_p, weight_t = tl.exp(log_p - base), tl.exp(log_t - base)
    total = weight_p + weight_t
    share = 1 / tl.where(total > 0, total, 1.0)

    column = (d < head_dim)[None, :]
    at = (b * prefix_b + t * prefix_t + h * prefix_h)[:, None] + d[None, :]
    acc = tl.load(prefix_out + at, mask=in_prefix[:, None] & column, other=0).to(tl.float32)
    acc *= (weight_p * share)[:, None]
    at = (b * tail_b + t * tail_t + h * tail_h)[:, None] + d[None, :]
    part = tl.load(tail_out + at, mask=in_tail[:, None] & column, other=0).to(tl.float32)
    acc += part * (weight_t * share)[:, None]
    at = (b * out_b + t * out_t + h * out_h)[:, None] + d[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=ok[:, None] & column)
    if lse is not None:
        value = tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), empty)
        tl.store(lse + b * lse_b + t * lse_t + h * lse_h, value, mask=ok)


def merge_lse(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    prefix_keys: Tensor,
    tail_out: Tensor,
    tail_lse: Tensor,
    tail_keys: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    base2: bool = False,
) -> None:
    """Weigh two attention results over disjoint keys by their log-sum-exp.

    The merge of partial softmaxes by log-sum-exp is that of FlashDecoding and of cascade
    inference (Ye et al., 2024).

    Parameters
    ----------
    prefix_out, tail_out : Tensor
        ``[B, T, H, D]``, T query tokens per request, any dtype; dense last axis.
    prefix_lse, tail_lse : Tensor
        ``[B, T, H]`` float32, natural log; any strides.
    prefix_keys : Tensor
        ``[B]`` int32, keys behind every row of the request's prefix result.
    tail_keys : Tensor
        ``[B, T]`` int32, contiguous, keys behind each tail result. A result of 0 keys is not read.
    out : Tensor
        ``[B, T, H, D]``, written in place; may be ``prefix_out`` itself. A row without any key
        gets 0.
    lse : Tensor or None
        ``[B, T, H]`` float32, natural log, written in place; -inf for a row without any key.
    base2 : bool
        ``prefix_lse`` and ``tail_lse`` are log2, as FlashInfer's are; ``lse`` is natural still.
    """
    batch, q_len, heads, head_dim = out.shape
    block_h = min(8, triton.next_power_of_2(heads))
    _merge_lse_kernel[(batch * q_len, triton.cdiv(heads, block_h))](
        prefix_out,
        prefix_lse,
        prefix_keys,
        tail_out,
        tail_lse,
        tail_keys,
        out,
        lse,
        q_len,
        heads,
        head_dim,
        *prefix_out.stride()[:3],
        *tail_out.stride()[:3],
        *out.stride()[:3],
        *prefix_lse.stride(),
        *tail_lse.stride(),
        *((0, 0, 0) if lse is None else lse.stride()),
        UNIT=math.log(2) if base2 else 1.0,
        BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
