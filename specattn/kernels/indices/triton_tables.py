"""Windows of slots and tables of pages."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter


@triton.jit
def fill_window_kernel(
    keys,  # see `KeySlots.arguments`; the tail [B, width] is written
    positions_out,  # [B, steps, topk] int64, out; or None
    context,
    width,
    nodes,
    topk,
    stride_positions,
    stride_step,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fill one request's window."""
    req_to_token, rows, seq_lens, slots_out, stride_table, stride_slots = keys
    enter(PDL)
    req = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + req).to(tl.int64)
    at = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    column = length + at
    slots = req_to_token + tl.load(rows + req) * stride_table + column
    slot = tl.load(slots, mask=(at < width) & (column < context), other=0)
    tl.store(slots_out + req * stride_slots + at, slot, mask=at < width)
    if positions_out is not None:
        node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
        step = node // topk
        ptr = positions_out + req * stride_positions + step * stride_step + node % topk
        tl.store(ptr, length + step, mask=node < nodes)


@triton.jit
def fill_block_table_kernel(
    keys,  # see `KeySlots.arguments`
    table,  # [B * lists, width] int32, out
    lens,  # [B * lists] int32, out
    max_len,
    tail,
    lists,
    width,
    stride_table,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill a share of one list of pages."""
    req_to_token, rows, seq_lens, tail_slots, stride_req, stride_tail = keys
    entry = tl.program_id(0).to(tl.int64)
    req = entry // lists
    prefix = tl.minimum(tl.maximum(tl.load(seq_lens + req), 0), max_len)
    # the last list has every key, each one before it a key less
    length = prefix + tail - (lists - 1) + (entry % lists).to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(lens + entry, length)
    row = req_to_token + tl.load(rows + req) * stride_req
    for first in range(tl.program_id(1) * BLOCK, width, tl.num_programs(1) * BLOCK):
        column = first + tl.arange(0, BLOCK)  # [BLOCK]
        place = column * PAGE
        cached = (column < width) & (place < prefix)
        own = (column < width) & (place >= prefix) & (place < length)
        slots = tl.load(row + place, mask=cached, other=0)
        slots += tl.load(tail_slots + req * stride_tail + place - prefix, mask=own, other=0)
        tl.store(table + entry * stride_table + column, slots // PAGE, mask=column < width)


@triton.jit
def fill_slots_kernel(
    rows,  # [B] int64
    block_table,  # [B, blocks] int32
    lens,  # [B] int32
    req_to_token,  # [R, context] int32, out
    reserved,  # [R] int32, out
    room,
    num_blocks,
    stride_block,
    stride_req,
    PAGE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a share of one line's slots."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    length = tl.minimum(tl.maximum(tl.load(lens + entry), 0), room)
    # row 0 is padding's, and has no slots
    length = tl.where(row != 0, length, 0)
    if tl.program_id(1) == 0:
        tl.store(reserved + row, length)
    line = block_table + entry * stride_block
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        place = first + tl.arange(0, BLOCK)  # [BLOCK]
        block = tl.load(line + place // PAGE, mask=place < length, other=0)
        # what is no block of the pools is padding's
        block = tl.where((block >= 0) & (block < num_blocks), block, 0)
        slots = block * BLOCK_STRIDE + place % PAGE
        tl.store(req_to_token + row * stride_req + place, slots, mask=place < length)


@triton.jit
def fill_page_table_kernel(
    keys,  # see `KeySlots.arguments`
    table,  # [B, width] int32, out
    lens,  # [B] int32, out
    max_len,
    tail,
    q_len,
    window_left,
    width,
    stride_table,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill a share of one request's list of slots."""
    req_to_token, rows, seq_lens, tail_slots, stride_req, stride_tail = keys
    req = tl.program_id(0).to(tl.int64)
    prefix = tl.minimum(tl.maximum(tl.load(seq_lens + req), 0), max_len)
    start = prefix * 0
    if WINDOW:
        start = tl.maximum(prefix + tail - q_len - window_left, 0)
    length = tl.minimum(prefix + tail - start, width)
    if tl.program_id(1) == 0:
        tl.store(lens + req, length)
    row = req_to_token + tl.load(rows + req) * stride_req
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        column = first + tl.arange(0, BLOCK)  # [BLOCK]
        place = start + column
        inside = column < length
        cached = inside & (place < prefix)
        own = inside & (place >= prefix)
        slots = tl.load(row + place, mask=cached, other=0)
        slots += tl.load(tail_slots + req * stride_tail + place - prefix, mask=own, other=0)
        tl.store(table + req * stride_table + column, slots, mask=inside)


@triton.jit
def fill_ancestor_table_kernel(
    tail_slots,  # [B, tail] int32
    tail_words,  # [B, q_len, W] int64
    table,  # [B * q_len, tail] int32, out
    lens,  # [B * q_len] int32, out
    rows,
    tail,
    q_len,
    stride_tail,
    stride_words,
    stride_word_row,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """List the visible tail keys of some query tokens."""
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    live = query < rows
    req = (query // q_len).to(tl.int64)
    key = tl.arange(0, BLOCK)  # [BLOCK]
    words = tail_words + req * stride_words + query % q_len * stride_word_row
    inside = live[:, None] & (key < tail)[None, :]
    word = tl.load(words[:, None] + (key // 64)[None, :], mask=inside, other=0)
    seen = ((word >> (key % 64)[None, :]) & 1).to(tl.int32)  # [ROWS, BLOCK]
    rank = tl.cumsum(seen, 1) - 1
    place = tail_slots + (req * stride_tail)[:, None] + key[None, :]
    slots = tl.load(place, mask=seen != 0, other=0)
    tl.store(table + (query.to(tl.int64) * tail)[:, None] + rank, slots, mask=seen != 0)
    tl.store(lens + query, tl.sum(seen, 1), mask=live)
