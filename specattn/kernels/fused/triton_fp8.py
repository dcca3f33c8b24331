"""Kernels quantise rows to float8 (e4m3), and multiply float8 by float8."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.fused.triton import add_and_norm, gate, load_norms, norm_of_pair
from specattn.kernels.fused.triton_gates import gate_columns
from specattn.kernels.pdl import enter


@triton.jit
def _e4m3(x):
    # a NaN stays one
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def scale_of(tiles):
    """Return the scale of each of ``tiles [N, WIDTH]``, and its inverse."""
    # as in torch, to the last bit
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(tiles), 1), 1e-10), 448.0)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def store_terms(
    scaled, scale, at, scale_at, ok, scale_ok, padded, SIZE: tl.constexpr, TERMS: tl.constexpr
):
    """Store scaled numbers and their scales, at pointers to the first term's."""
    first = _e4m3(scaled)
    tl.store(at, first, mask=ok)
    tl.store(scale_at, scale, mask=scale_ok)
    if TERMS == 2:
        left = tl.clamp(scaled, -448.0, 448.0) - first.to(tl.float32)
        tl.store(at + padded.to(tl.int64) * SIZE, _e4m3(left * 16.0), mask=ok)
        tl.store(scale_at + padded, scale / 16, mask=scale_ok)


@triton.jit
def store_heads(x, to, row, head, ok, SIZE: tl.constexpr, DIM: tl.constexpr, TERMS: tl.constexpr):
    """Quantise heads of rows, ``x [N, DIM]``, each by a scale.

    ``row``, ``head`` and ``ok`` are ``[N]``; what it goes ``to`` is as in `_store_scaled`.
    """
    values, scales, padded = to
    scale, inverse = scale_of(x)
    at = values + (row * SIZE + head * DIM)[:, None] + tl.arange(0, DIM)[None, :]
    scale_at = scales + head * (TERMS * padded) + row
    store_terms(x * inverse[:, None], scale, at, scale_at, ok[:, None], ok, padded, SIZE, TERMS)


@triton.jit
def _store_scaled(
    x,
    to,
    row,
    span,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Quantise a span of a row, ``x [SPAN]``, by GROUPS scales.

    What it goes ``to`` are values ``[TERMS, P, SIZE]``, scales ``[ALL_GROUPS, TERMS, P]``, and P.
    """
    values, scales, padded = to
    column = span * SPAN + tl.arange(0, SPAN)  # [SPAN]
    group = span * GROUPS + tl.arange(0, GROUPS)  # [GROUPS]
    ok = column < SIZE
    tiles = tl.reshape(x, [GROUPS, SPAN // GROUPS])
    scale, inverse = scale_of(tiles)
    scaled = tl.reshape(tiles * inverse[:, None], [SPAN])
    at = values + row * SIZE + column
    scale_at = scales + group * (TERMS * padded) + row
    store_terms(scaled, scale, at, scale_at, ok, group < ALL_GROUPS, padded, SIZE, TERMS)


@triton.jit
def scale_rows_kernel(
    x,  # [T, SIZE]
    values,  # [TERMS, P, SIZE], out
    scales,  # [ALL_GROUPS, TERMS, P] float32, out
    padded,  # P
    stride_x,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TERMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise SPAN columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    column = span * SPAN + tl.arange(0, SPAN)  # [SPAN]
    enter(PDL)
    loaded = tl.load(x + row * stride_x + column, mask=column < SIZE, other=0.0).to(tl.float32)
    to = values, scales, padded
    _store_scaled(loaded, to, row, span, SIZE, SPAN, GROUPS, ALL_GROUPS, TERMS)


@triton.jit
def gate_scale_kernel(
    partials,  # [SPLIT, T, 2, SIZE], gates first
    like,  # a pointer of the dtype to round to, never read
    values,  # [TERMS, P, SIZE], out
    scales,  # [ALL_GROUPS, TERMS, P] float32, out
    padded,  # P
    stride_partial,
    stride_row,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TERMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate SPAN columns of a row, and quantise them."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    column = span * SPAN + tl.arange(0, SPAN)  # [SPAN]
    enter(PDL)
    x = gate(partials, row * stride_row + column, column < SIZE, stride_partial, SIZE, SPLIT)
    # quantised is what a product of plain weights would read
    x = x.to(like.dtype.element_ty).to(tl.float32)
    to = values, scales, padded
    _store_scaled(x, to, row, span, SIZE, SPAN, GROUPS, ALL_GROUPS, TERMS)


@triton.jit
def gate_heads_scale_kernel(
    x,  # [T, SIZE]
    gates,  # [T, SIZE]
    values,  # [TERMS, P, SIZE], out
    scales,  # [ALL_GROUPS, TERMS, P] float32, out
    padded,  # P
    stride_row,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TERMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate SPAN columns of what heads give, and quantise them."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    column = span * SPAN + tl.arange(0, SPAN)  # [SPAN]
    enter(PDL)
    value = gate_columns(x, gates, row, column, column < SIZE, SIZE, stride_row)
    # quantised is what a product of plain weights would read
    value = value.to(x.dtype.element_ty).to(tl.float32)
    to = values, scales, padded
    _store_scaled(value, to, row, span, SIZE, SPAN, GROUPS, ALL_GROUPS, TERMS)


@triton.jit
def add_norm_scale_kernel(
    partials,  # [SPLIT, T, SIZE]
    residual,  # [T, SIZE], or None: nothing
    weight,  # [SIZE]
    added_weight,  # [SIZE], or None: the product is added as it is
    rows,  # [R] int64, or None for all
    residual_out,  # [R, SIZE], out
    values,  # [TERMS, P, SIZE], out
    scales,  # [ALL_GROUPS, TERMS, P] float32, out
    padded,  # P
    eps,
    stride_partial,
    stride_row,
    stride_residual,
    stride_residual_out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TERMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a product to a row of the stream; quantise the norm."""
    to = tl.program_id(0).to(tl.int64)
    norms = load_norms(weight, added_weight, SIZE, BLOCK)
    enter(PDL)
    strides = stride_partial, stride_row, stride_residual, stride_residual_out
    x = add_and_norm(
        to,
        partials,
        residual,
        norms,
        added_weight,
        rows,
        residual_out,
        eps,
        strides,
        SIZE,
        BLOCK,
        SPLIT,
    )
    # quantised is what a product of plain weights would read
    x = x.to(residual_out.dtype.element_ty).to(tl.float32)
    _store_scaled(x, (values, scales, padded), to, 0, SIZE, BLOCK, GROUPS, ALL_GROUPS, TERMS)


@triton.jit
def norm_pair_scale_kernel(
    ids,  # [T] int64
    table,  # [V, SIZE]
    hidden,  # [N, SIZE]
    rows,  # [T] int64, or None: token i's is row i
    embed_weight,  # [SIZE]
    hidden_weight,  # [SIZE]
    hidden_out,  # [T, SIZE], out; None without rows
    like,  # a pointer of the dtype to round to, never read
    values,  # [TERMS, P, 2, SIZE], out
    scales,  # [2, SIZE / 128, TERMS, P] float32, out
    padded,  # P
    eps,
    stride_table,
    stride_hidden,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TERMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm one token's embedding, or its hidden state; quantise it."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    group = tl.arange(0, BLOCK // 128)  # [BLOCK / 128]
    ok = column < SIZE
    weight = tl.load((embed_weight if half == 0 else hidden_weight) + column, mask=ok, other=0.0)
    enter(PDL)
    strides = stride_table, stride_hidden
    x = norm_of_pair(
        row, half, ids, table, hidden, rows, weight, hidden_out, like, eps, strides, SIZE, BLOCK
    )
    # quantised is what a product of plain weights would read
    tiles = tl.reshape(x.to(like.dtype.element_ty).to(tl.float32), [BLOCK // 128, 128])
    scale, inverse = scale_of(tiles)
    scaled = tl.reshape(tiles * inverse[:, None], [BLOCK])
    at = values + (row * 2 + half) * SIZE + column
    scale_at = scales + (half * (SIZE // 128) + group) * (TERMS * padded) + row
    store_terms(scaled, scale, at, scale_at, ok, group * 128 < SIZE, padded, 2 * SIZE, TERMS)


@triton.jit(do_not_specialize=["tokens"])
def scaled_linear_kernel(
    x,  # [TERMS, P, SIZE], e4m3
    weight,  # [width, SIZE], e4m3
    out,  # [SPLIT, tokens, width], out
    x_scale,  # [G, P], G of 128 columns each; [1, P] unless BLOCKS
    w_scale,  # [ceil(width / HEIGHT), G], or [.., 1]
    tokens,
    width,
    stride_term,
    stride_w,
    stride_part,
    stride_xs,
    stride_ws,
    SIZE: tl.constexpr,
    HEIGHT: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    TERMS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BN rows of weights by BT rows of x."""
    STEPS: tl.constexpr = (SIZE + 127) // 128
    part = tl.program_id(0) % SPLIT
    first = tl.program_id(0) // SPLIT * BN
    row = first + tl.arange(0, BN)  # [BN]
    token = tl.program_id(1) * BT + tl.arange(0, BT)  # [BT]
    column = tl.arange(0, 128)  # [128]
    w_ok, x_ok = row < width, token < tokens
    w_at = weight + row.to(tl.int64)[:, None] * stride_w + column[None, :]
    x_at = x + token.to(tl.int64)[:, None] * SIZE + column[None, :]
    if HEIGHT % BN == 0:
        ws_at = w_scale + first // HEIGHT * stride_ws
    else:
        ws_at = w_scale + row // HEIGHT * stride_ws
    xs_at = x_scale + token
    enter(PDL)
    total = tl.zeros([BN, BT], tl.float32)
    for step in tl.range(part * STEPS // SPLIT, (part + 1) * STEPS // SPLIT, num_stages=STAGES):
        at = step * 128
        w_here, x_here = w_ok[:, None], x_ok[:, None]
        if SIZE % 128 != 0:
            inside = (at + column < SIZE)[None, :]
            w_here &= inside
            x_here &= inside
        w_tile = tl.load(w_at + at, mask=w_here, other=0.0)
        x_tile = tl.load(x_at + at, mask=x_here, other=0.0)
        product = tl.dot(w_tile, x_tile.T)
        if TERMS == 2:
            x_tile = tl.load(x_at + stride_term + at, mask=x_here, other=0.0)
            product += tl.dot(w_tile, x_tile.T) * (1 / 16)
        if BLOCKS:
            of_x = tl.load(xs_at + step * stride_xs, mask=x_ok, other=0.0)[None, :]
            if HEIGHT % BN == 0:
                product *= of_x * tl.load(ws_at + step)
            else:
                product *= of_x * tl.load(ws_at + step, mask=w_ok, other=0.0)[:, None]
        total += product
    if not BLOCKS:
        of_x = tl.load(xs_at, mask=x_ok, other=0.0)[None, :]
        if HEIGHT % BN == 0:
            total *= of_x * tl.load(ws_at)
        else:
            total *= of_x * tl.load(ws_at, mask=w_ok, other=0.0)[:, None]
    to = out + part.to(tl.int64) * stride_part
    at = to + token.to(tl.int64)[None, :] * width + row[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=x_ok[None, :] & w_ok[:, None])
