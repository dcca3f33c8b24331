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
def _store_row(
    new, cache, factor, token, slot, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Store one token's heads; each side is a tensor and two strides."""
    source, stride_token, stride_head = new
    target, stride_slot, stride_target_head = cache
    flat = tl.arange(0, BLOCK)  # [BLOCK]
    head, dim = flat // DIM, flat % DIM
    at = source + token * stride_token + head * stride_head + dim
    values = as_stored(tl.load(at, mask=flat < SIZE, other=0), factor, target)
    to = target + slot * stride_slot + head * stride_target_head + dim
    tl.store(to, values, mask=(flat < SIZE) & (slot >= 0))


@triton.jit
def store_kernel(
    k,  # [T, heads, k_dim], and the strides of tokens and heads
    v,  # [T, heads, v_dim], the same
    k_cache,  # [slots, heads, k_dim], out, and the strides of slots and heads
    v_cache,  # [slots, heads, v_dim], out, the same
    slots,  # [B, Q_LEN]; those below 0 are skipped
    k_factor,
    v_factor,
    stride_slot,
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
    _store_row(k, k_cache, k_factor, token, slot, K_DIM, K_SIZE, K_BLOCK)
    _store_row(v, v_cache, v_factor, token, slot, V_DIM, V_SIZE, V_BLOCK)


@triton.jit
def _move_block(
    pool,
    layer,
    offsets,
    source,
    target,
    moving,
    block,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    first, stride_layer, stride_slot, stride_head = pool
    first += tl.load(offsets + layer) * UNIT if UNIT else layer * stride_layer
    column = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    offset = column // DIM * stride_head + column % DIM
    mask = moving[:, None] & (column < SIZE)[None, :]  # [NODES, BLOCK]
    rows = tl.load(first + source[:, None] * stride_slot + offset[None, :], mask=mask, other=0)
    # A slot may be the source of one row and the target of another.
    tl.debug_barrier()
    tl.store(first + target[:, None] * stride_slot + offset[None, :], rows, mask=mask)


@triton.jit
def commit_kv_kernel(
    k_pool,  # [layers, slots, heads, K_DIM], in place, and its first three strides
    v_pool,  # [layers, slots, heads, V_DIM], in place, the same
    tail_slots,  # [B, n] int32
    accept_index,  # [B, width] int32
    offsets,  # [2, layers] int64, if UNIT
    n,
    width,
    stride_tail,
    stride_accept,
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
        _move_block(
            k_pool, layer, offsets, source, target, moving, block, K_DIM, K_SIZE, BLOCK, UNIT
        )
    else:
        offsets += tl.num_programs(1)
        block -= k_blocks
        _move_block(
            v_pool, layer, offsets, source, target, moving, block, V_DIM, V_SIZE, BLOCK, UNIT
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
