"""Kernels between a decoder's matrix products."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.cache.triton import as_stored
from specattn.kernels.pdl import enter


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
def gate(partials, at, ok, stride_partial, SIZE: tl.constexpr, SPLIT: tl.constexpr):
    """Gate values, which lie ``SIZE`` behind their gates at ``at``, by SiLU."""
    x = sum_partials(partials, at, ok, stride_partial, SPLIT)
    return x * tl.sigmoid(x) * sum_partials(partials, at + SIZE, ok, stride_partial, SPLIT)


@triton.jit
def _norm(x, weight, eps, SIZE: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight


@triton.jit
def load_norms(weight, added_weight, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the weights of a norm, and of the product's own."""
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    scale = tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    added_scale = scale
    if added_weight is not None:
        added_scale = tl.load(added_weight + column, mask=ok, other=0.0).to(tl.float32)
    return scale, added_scale


@triton.jit
def add_and_norm(
    to,
    partials,
    residual,
    norms,
    added_weight,
    rows,
    residual_out,
    eps,
    strides,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Add a product to a row of the stream; return the norm.

    Arguments are those of `add_norm_kernel`, but the row that is written, what `load_norms`
    returns, and a tuple of strides.
    """
    scale, added_scale = norms
    stride_partial, stride_row, stride_residual, stride_residual_out = strides
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    row = to
    if rows is not None:
        row = tl.load(rows + to)
    x = sum_partials(partials, row * stride_row + column, ok, stride_partial, SPLIT)
    if added_weight is not None:
        x = _norm(x, added_scale, eps, SIZE)
    if residual is not None:
        x += tl.load(residual + row * stride_residual + column, mask=ok, other=0.0).to(tl.float32)
    # the norm is of what the stream holds, as rounded
    x = x.to(residual_out.dtype.element_ty)
    tl.store(residual_out + to * stride_residual_out + column, x, mask=ok)
    return _norm(x.to(tl.float32), scale, eps, SIZE)


@triton.jit
def add_norm_kernel(
    partials,  # [SPLIT, T, SIZE]
    residual,  # [T, SIZE], or None: nothing
    weight,  # [SIZE]
    added_weight,  # [SIZE], or None: the product is added as it is
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
    column = tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(out + to * stride_out + column, x.to(out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def norm_of_pair(
    row,
    half,
    ids,
    table,
    hidden,
    rows,
    scale,
    hidden_out,
    like,
    eps,
    strides,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm one token's embedding, or its hidden state.

    Arguments are those of `norm_pair_kernel`, but a pointer of the dtype that both are rounded to
    before, the weight of the norm, and a tuple of strides.
    """
    stride_table, stride_hidden = strides
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    if half == 0:
        x = tl.load(table + tl.load(ids + row) * stride_table + column, mask=ok, other=0.0)
        x = x.to(like.dtype.element_ty)
    else:
        source = row
        if rows is not None:
            source = tl.load(rows + row)
        x = tl.load(hidden + source * stride_hidden + column, mask=ok, other=0.0)
        if rows is not None:
            tl.store(hidden_out + row * SIZE + column, x, mask=ok)
        x = x.to(like.dtype.element_ty)
    return _norm(x.to(tl.float32), scale.to(tl.float32), eps, SIZE)


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
    strides = stride_table, stride_hidden
    x = norm_of_pair(
        row, half, ids, table, hidden, rows, scale, hidden_out, out, eps, strides, SIZE, BLOCK
    )
    tl.store(out + (row * 2 + half) * SIZE + column, x.to(out.dtype.element_ty), mask=ok)


@triton.jit
def add_partials_kernel(
    partials,  # [SPLIT, T, SIZE]; with GATED [SPLIT, T, 2, SIZE], gates first
    out,  # [T, SIZE], out
    stride_partial,
    stride_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the partials of some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    enter(PDL)
    at = row * stride_row + column
    if GATED:
        x = gate(partials, at, ok, stride_partial, SIZE, SPLIT)
    else:
        x = sum_partials(partials, at, ok, stride_partial, SPLIT)
    tl.store(out + row * SIZE + column, x.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _place(given, token, dim, Q_LEN: tl.constexpr, DIM: tl.constexpr, CACHE: tl.constexpr):
    """A token's slot, and the cosines and sines of its position.

    Given are positions ``[T]`` int64; the table, ``[L, DIM]`` float32: cosines of DIM / 2 angles,
    then their sines; L - 1; slots ``[B, Q_LEN]``, below 0 skipped, or None: token i goes to row i;
    and their row stride.
    """
    positions, table, last_position, slots, stride_slot = given
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
    place,  # see `_place`
    q_weight,  # [DIM], or None
    k_weight,  # [DIM], or None
    bias,  # [(Q_HEADS + 2 * KV_HEADS) * DIM], or None
    q,  # [T, Q_HEADS, DIM], out
    k_cache,  # [slots, KV_HEADS, DIM], out
    v_cache,  # [slots, KV_HEADS, DIM], out
    eps,
    k_factor,
    v_factor,
    stride_partial,
    stride_row,
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
    """Add the bias, norm, rotate and store some of a token's heads."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    HALF: tl.constexpr = DIM // 2
    head = first + tl.arange(0, HEADS)  # [HEADS]
    dim = tl.arange(0, HALF_BLOCK)  # [HALF_BLOCK]
    ok = (dim < HALF)[None, :] & (head >= 0)[:, None]
    if PREFETCH:
        # by the L1 cache, which keeps nothing of other kernels' writes up to date
        slot, cosine, sine = _place(place, token, dim, Q_LEN, DIM, ".cg")
    if q_weight is not None:
        weight = (q_weight if first < Q_HEADS else k_weight) + dim
        low_weight = tl.load(weight, mask=dim < HALF, other=0.0)[None, :]
        high_weight = tl.load(weight + HALF, mask=dim < HALF, other=0.0)[None, :]
    if bias is not None:
        of_head = bias + head[:, None] * DIM + dim[None, :]
        low_bias = tl.load(of_head, mask=ok, other=0.0).to(tl.float32)
        high_bias = tl.load(of_head + HALF, mask=ok, other=0.0).to(tl.float32)
    enter(PDL)
    if not PREFETCH:
        slot, cosine, sine = _place(place, token, dim, Q_LEN, DIM, "")
    at = token * stride_row + head[:, None] * DIM + dim[None, :]
    low = sum_partials(partials, at, ok, stride_partial, SPLIT)
    high = sum_partials(partials, at + HALF, ok, stride_partial, SPLIT)
    if bias is not None:
        low += low_bias
        high += high_bias
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
