"""Store and move keys and values, and write slots."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter

# the largest number of e4m3
FLOAT8_MAX = tl.constexpr(448.0)


@triton.jit
def as_stored(values, factor, cache):
    """Convert to the dtype of ``cache``.

    For float8, values are multiplied by ``factor`` and clamped to its largest number.
    """
    if cache.dtype.element_ty == tl.float8e4nv:
        values = values.to(tl.float32) * factor
        # a NaN stays one
        values = tl.clamp(values, -FLOAT8_MAX, FLOAT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return values.to(cache.dtype.element_ty)


@triton.jit
def store_kernel(
    k,  # [T, heads, k_dim]
    v,  # [T, heads, v_dim]
    k_cache,  # [slots, heads, k_dim], out
    v_cache,  # [slots, heads, v_dim], out
    slots,  # [B, Q_LEN]; those below 0 are skipped
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
    values = as_stored(values, k_factor, k_cache)
    stored = (flat < K_SIZE) & (slot >= 0)
    tl.store(k_cache + slot * stride_kc + head * stride_kch + dim, values, mask=stored)

    flat = tl.arange(0, V_BLOCK)  # [V_BLOCK]
    head, dim = flat // V_DIM, flat % V_DIM
    values = tl.load(v + token * stride_vt + head * stride_vh + dim, mask=flat < V_SIZE, other=0)
    values = as_stored(values, v_factor, v_cache)
    stored = (flat < V_SIZE) & (slot >= 0)
    tl.store(v_cache + slot * stride_vc + head * stride_vch + dim, values, mask=stored)


@triton.jit
def _move_block(
    pool,
    stride_slot,
    stride_head,
    source,
    target,
    moving,
    block,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    offset = column // DIM * stride_head + column % DIM
    mask = moving[:, None] & (column < SIZE)[None, :]  # [NODES, BLOCK]
    rows = tl.load(pool + source[:, None] * stride_slot + offset[None, :], mask=mask, other=0)
    # A slot may be the source of one row and the target of another.
    tl.debug_barrier()
    tl.store(pool + target[:, None] * stride_slot + offset[None, :], rows, mask=mask)


@triton.jit
def commit_kv_kernel(
    k_pool,  # [layers, slots, heads, K_DIM], in place
    v_pool,  # [layers, slots, heads, V_DIM], in place
    tail_slots,  # [B, n] int32
    accept_index,  # [B, width] int32
    offsets,  # [2, layers] int64, if UNIT
    n,
    width,
    stride_tail,
    stride_accept,
    stride_kl,
    stride_ks,
    stride_kh,
    stride_vl,
    stride_vs,
    stride_vh,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    req, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    rank = tl.arange(0, NODES)  # [NODES]
    node = tl.load(accept_index + req * stride_accept + rank, mask=rank < width, other=-1)
    known = (node >= 0) & (node < n) & (rank < n)
    tail = tail_slots + req * stride_tail
    source = tl.load(tail + node, mask=known, other=0).to(tl.int64)
    target = tl.load(tail + rank, mask=known, other=0).to(tl.int64)
    moving = known & (source != target) & (source >= 0) & (target >= 0)
    k_blocks = tl.cdiv(K_SIZE, BLOCK)
    if block < k_blocks:
        offset = tl.load(offsets + layer) * UNIT if UNIT else layer * stride_kl
        _move_block(
            k_pool + offset,
            stride_ks,
            stride_kh,
            source,
            target,
            moving,
            block,
            K_DIM,
            K_SIZE,
            BLOCK,
        )
    else:
        offsets += tl.num_programs(1)
        offset = tl.load(offsets + layer) * UNIT if UNIT else layer * stride_vl
        _move_block(
            v_pool + offset,
            stride_vs,
            stride_vh,
            source,
            target,
            moving,
            block - k_blocks,
            V_DIM,
            V_SIZE,
            BLOCK,
        )


# one compilation whatever the number of pieces: some step would wait for another one
@triton.jit(do_not_specialize=["pieces"])
def write_slots_kernel(
    packed,  # [5, pieces] int32, then the pages
    req_to_token,  # [rows, columns] int32, in place
    reserved,  # [rows] int32, in place
    pieces,
    stride_row,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0)
    row = tl.load(packed + piece).to(tl.int64)
    column = tl.load(packed + pieces + piece)
    count = tl.load(packed + 2 * pieces + piece)
    first = tl.load(packed + 3 * pieces + piece)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    page = tl.load(packed + first + at // PAGE, mask=at < count, other=0)  # [BLOCK]
    slots = page * PAGE + at % PAGE
    tl.store(req_to_token + row * stride_row + column + at, slots, mask=at < count)
    if tl.program_id(1) == 0:
        tl.store(reserved + row, tl.load(packed + 4 * pieces + piece))
