"""Kernels that begin and end a step."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter


@triton.jit
def _copy_narrow(tables, source_row, target_row, live, SIZE: tl.constexpr):
    """Copy a row of every narrow table; all loads precede the stores."""
    column = tl.arange(0, SIZE)  # [SIZE]
    values = ()
    for i in tl.static_range(len(tables)):
        source, _, stride, _, width = tables[i]
        value = tl.load(source + source_row * stride + column, mask=live & (column < width))
        # Triton knows tuple addition, not unpacking; mypy knows empty tuples by length
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(len(tables)):
        _, target, _, stride, width = tables[i]
        tl.store(target + target_row * stride + column, values[i], mask=live & (column < width))


@triton.jit
def _copy_part(source, target, block, width, live, BYTES: tl.constexpr):
    # blocks of equal bytes differ in length by dtype, so that no dtype is given another's layout
    SIZE: tl.constexpr = BYTES * 8 // source.dtype.element_ty.primitive_bitwidth
    column = block * SIZE + tl.arange(0, SIZE)  # [SIZE]
    ok = live & (column < width)
    tl.store(target + column, tl.load(source + column, mask=ok), mask=ok)


@triton.jit
def _copy_block(tables, source_row, target_row, live, block, BYTES: tl.constexpr):
    """Copy block ``block`` of a row of all wide tables in turn."""
    for i in tl.static_range(len(tables)):
        source, target, source_stride, target_stride, width = tables[i]
        blocks = tl.cdiv(width, BYTES * 8 // source.dtype.element_ty.primitive_bitwidth)
        if (block >= 0) & (block < blocks):
            source += source_row * source_stride
            target += target_row * target_stride
            _copy_part(source, target, block, width, live, BYTES)
        block -= blocks


@triton.jit
def begin_step_kernel(
    rows,  # [S, B] int64, in the host's memory
    entry,  # [1] int64
    seq_lens,  # [R] int32
    reserved,  # [R] int32
    req_to_token,  # [R, context] int32
    rows_out,  # [B] int64, out
    seq_lens_out,  # [B] int32, out
    window_out,  # [B, reserve_len] int32, out
    positions_out,  # [B, depth] int64, out
    draft_positions_out,  # [B, steps, topk] int64, out
    draft_lens_out,  # [B] int32, out; or None
    narrow,  # of each table: itself, what it is copied to, their row strides, columns
    wide,  # the same
    context,
    reserve_len,
    depth,
    drafts,
    topk,
    stride_rows,
    stride_table,
    stride_window,
    stride_positions,
    stride_draft,
    stride_step,
    READ_AHEAD: tl.constexpr,
    NARROW: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Gather a request's state; its first program derives what all phases read."""
    req = tl.program_id(0).to(tl.int64)
    # no cache modifier: all warps of a multiprocessor share what comes over PCIe
    row = tl.load(rows + tl.load(entry) * stride_rows + req)
    length = tl.load(seq_lens + row).to(tl.int64)
    room = tl.minimum(tl.load(reserved + row), context)
    fits = (row != 0) & (length + reserve_len <= room)
    row = tl.where(fits, row, 0)
    length = tl.where(fits, length, 0)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_W)  # [BLOCK_W]
        inside = column < reserve_len
        slots = req_to_token + row * stride_table + length + column
        slot = tl.load(slots, mask=inside & fits, other=0)
        _copy_narrow(narrow, row, req, True, NARROW)
        tl.store(window_out + req * stride_window + column, slot, mask=inside)
        tl.store(rows_out + req, row)
        tl.store(seq_lens_out + req, length.to(tl.int32))
        ahead = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        tl.store(positions_out + req * stride_positions + ahead, length + ahead, mask=ahead < depth)
        if READ_AHEAD:
            length += tl.where(fits, READ_AHEAD, 0)
        if draft_lens_out is not None:
            tl.store(draft_lens_out + req, length.to(tl.int32))
        draft = tl.arange(0, BLOCK_S)  # [BLOCK_S]
        step = draft // topk
        ptr = draft_positions_out + req * stride_draft + step * stride_step + draft % topk
        tl.store(ptr, length + step, mask=draft < drafts)
    else:
        _copy_block(wide, row, req, True, tl.program_id(1) - 1, BYTES)


@triton.jit
def end_step_kernel(
    rows,  # [B] int64
    seq_lens,  # [B] int32
    accept_lens,  # [B] int32
    accept_tokens,  # [B, depth] int64
    bonus_tokens,  # [B] int64, -1 for none
    seq_lens_table,  # [R] int32, out
    bonus_table,  # [R] int64, out
    packed_out,  # [B, 1 + depth] int64, out
    narrow,  # of each table: what is copied to it, itself, their row strides, columns
    wide,  # the same
    depth,
    stride_tokens,
    stride_packed,
    NARROW: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a request's state back; its first program packs the output."""
    enter(PDL)
    req = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + req)
    live = row != 0
    if tl.program_id(1) == 0:
        count = tl.load(accept_lens + req)
        length = tl.load(seq_lens + req) + count
        rank = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        token = tl.load(accept_tokens + req * stride_tokens + rank, mask=rank < depth, other=0)
        bonus = tl.load(bonus_tokens + req)
        _copy_narrow(narrow, req, row, live, NARROW)
        tl.store(seq_lens_table + row, length, mask=live)
        # a root that the target did not choose is embedded, too
        tl.store(bonus_table + row, tl.maximum(bonus, 0), mask=live)
        token = tl.where((bonus < 0) & (rank == count - 1), -1, token)
        packed = packed_out + req * stride_packed
        tl.store(packed, tl.where(live, count, 0).to(tl.int64))
        tl.store(packed + 1 + rank, tl.where(live, token, 0), mask=rank < depth)
    else:
        _copy_block(wide, req, row, live, tl.program_id(1) - 1, BYTES)


@triton.jit
def gather_path_kernel(
    features,  # [B, n, width]
    accept_index,  # [B, depth] int32
    accept_lens,  # [B] int32
    seq_lens,  # [B] int32
    features_out,  # [B, depth, width], out
    last_rows_out,  # [B] int64, out
    after_out,  # [B] int64, out
    depth,
    width,
    stride_req,
    stride_node,
    stride_index,
    stride_out_req,
    stride_out,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the features of one node of an accepted path."""
    enter(PDL)
    req = (tl.program_id(0) // depth).to(tl.int64)
    rank = tl.program_id(0) % depth
    node = tl.maximum(tl.load(accept_index + req * stride_index + rank), 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < width
    value = tl.load(features + req * stride_req + node * stride_node + column, mask=ok)
    ptr = features_out + req * stride_out_req + rank.to(tl.int64) * stride_out + column
    tl.store(ptr, value.to(features_out.dtype.element_ty), mask=ok)
    if (rank == 0) & (tl.program_id(1) == 0):
        count = tl.load(accept_lens + req)
        after = tl.load(seq_lens + req).to(tl.int64) + count
        tl.store(last_rows_out + req, req * depth + tl.maximum(count, 1) - 1)
        tl.store(after_out + req, after)


@triton.jit(do_not_specialize=["numbers"])
def write_output_kernel(
    packed,  # [B, width] int64
    buffer,  # [S, B', width] int64, out, in the host's memory
    entry,  # [1] int64, in place
    numbers,
    width,
    slots,
    stride_packed,
    stride_buffer,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the packed tokens to their entry, and count the entry."""
    enter(PDL)
    at = tl.load(entry)
    for start in tl.range(0, numbers, BLOCK):
        number = start + tl.arange(0, BLOCK)  # [BLOCK]
        ok = number < numbers
        value = tl.load(packed + number // width * stride_packed + number % width, mask=ok)
        tl.store(buffer + at * stride_buffer + number, value, mask=ok)
    # every thread has read it
    tl.debug_barrier()
    tl.store(entry, (at + 1) % slots)
