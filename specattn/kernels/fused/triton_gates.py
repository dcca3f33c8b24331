"""Kernels of gates, and of a product's columns in another order."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.fused.triton import sum_partials
from specattn.kernels.pdl import enter


@triton.jit
def gather_columns_kernel(
    partials,  # [SPLIT, T, N]
    columns,  # [size] int64
    out,  # [T, size], out
    size,
    stride_partial,
    stride_row,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up some columns of one row, wherever they are."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < size
    # no kernel writes them
    source = tl.load(columns + column, mask=ok, other=0)
    enter(PDL)
    x = sum_partials(partials, row * stride_row + source, ok, stride_partial, SPLIT)
    tl.store(out + row * size + column, x.to(out.dtype.element_ty), mask=ok)


@triton.jit
def gated_norm_kernel(
    x,  # [T, HEADS, SIZE]
    gates,  # [SPLIT, T, HEADS * SIZE]
    weight,  # [SIZE]
    out,  # [T, HEADS, SIZE], out
    eps,
    stride_partial,
    stride_row,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm a head of a token, and gate it."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    scale = tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    enter(PDL)
    at = (row * HEADS + head) * SIZE + column
    value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    where = row * stride_row + head * SIZE + column
    gate = sum_partials(gates, where, ok, stride_partial, SPLIT)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * scale
    value = value * gate * tl.sigmoid(gate)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=ok)


@triton.jit
def gate_columns(x, gates, row, column, ok, size, stride_row):
    """Gate some columns of one row by a sigmoid; see `gate_heads_kernel`."""
    value = tl.load(x + row * size + column, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * stride_row + column, mask=ok, other=0.0).to(tl.float32)
    return value * tl.sigmoid(gate)


@triton.jit
def gate_heads_kernel(
    x,  # [T, size]
    gates,  # [T, size]
    out,  # [T, size], out
    size,
    stride_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < size
    enter(PDL)
    value = gate_columns(x, gates, row, column, ok, size, stride_row)
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=ok)
