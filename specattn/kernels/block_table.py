"""Block tables of whole KV pages: those that kernels read page by page, and those of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.launch import programs_per_row

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _fill_block_table_kernel(
    req_to_token,  # [rows, max_len] int32
    req_pool_indices,  # [B] int64
    seq_lens,  # [B] int32
    tail_slots,  # [B, tail] int32
    table,  # [B * lists, width] int32, out
    lens,  # [B * lists] int32, out
    max_len,
    tail,
    lists,
    width,
    stride_req,
    stride_tail,
    stride_table,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    req = entry // lists
    prefix = tl.minimum(tl.maximum(tl.load(seq_lens + req), 0), max_len)
    # the last list has every key, each one before it a key less
    length = prefix + tail - (lists - 1) + (entry % lists).to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(lens + entry, length)
    row = req_to_token + tl.load(req_pool_indices + req) * stride_req
    for first in range(tl.program_id(1) * BLOCK, width, tl.num_programs(1) * BLOCK):
        column = first + tl.arange(0, BLOCK)  # [BLOCK]
        place = column * PAGE
        cached = (column < width) & (place < prefix)
        own = (column < width) & (place >= prefix) & (place < length)
        slots = tl.load(row + place, mask=cached, other=0)
        slots += tl.load(tail_slots + req * stride_tail + place - prefix, mask=own, other=0)
        tl.store(table + entry * stride_table + column, slots // PAGE, mask=column < width)


def fill_block_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    page_size: int,
    lists: int = 1,
) -> None:
    """List every request's pages: those of its prefix, then those of its tail.

    The slot of key ``p`` must be ``page * page_size + p % page_size``: whole, aligned pages, in
    the order of the keys. Only the first slot of a page is read.

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows, max_len]`` int32, slot of every prefix token; dense last axis.
    req_pool_indices, seq_lens : Tensor
        ``[B]`` int64 and int32: each request's row, and its prefix length.
    tail_slots : Tensor
        ``[B, tail]`` int32, tail at least ``lists``; may have a row stride.
    table : Tensor
        ``[B * lists, width]`` int32, written whole: columns past a list's pages hold page 0.
        ``ceil((max_len + tail) / page_size)`` columns hold any list.
    lens : Tensor
        ``[B * lists]`` int32, written: the keys of every list.
    page_size : int
        Slots of a page.
    lists : int
        Lists per request. One has all its keys. With more, they are of its last query tokens:
        each ends at its token, for kernels that know neither masks nor several queries.
    """
    width = table.shape[1]
    block = min(256, triton.next_power_of_2(width))
    grid = (len(table), programs_per_row(len(table), triton.cdiv(width, block)))
    _fill_block_table_kernel[grid](
        req_to_token,
        req_pool_indices,
        seq_lens,
        tail_slots,
        table,
        lens,
        req_to_token.shape[1],
        tail_slots.shape[1],
        lists,
        width,
        req_to_token.stride(0),
        tail_slots.stride(0),
        table.stride(0),
        PAGE=page_size,
        BLOCK=block,
    )


@triton.jit
def _fill_slots_kernel(
    rows,  # [B] int64
    block_table,  # [B, blocks] int32
    lens,  # [B] int32
    req_to_token,  # [R, context] int32, out
    reserved,  # [R] int32, out
    room,
    stride_block,
    stride_req,
    PAGE: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        slots = block * APART + place % PAGE
        tl.store(req_to_token + row * stride_req + place, slots, mask=place < length)


def fill_slots(
    rows: Tensor,
    block_table: Tensor,
    lens: Tensor,
    req_to_token: Tensor,
    reserved: Tensor,
    *,
    page_size: int,
    block_stride: int,
) -> None:
    """Write the slots of every line's blocks into its row, and how many tokens have some.

    Allocates nothing and never waits for the device.

    Parameters
    ----------
    rows : Tensor
        ``[B]`` int64, rows of ``req_to_token``, all different; lines of row 0 are skipped.
    block_table : Tensor
        ``[B, blocks]`` int32; may have a row stride. Blocks past a line's length are not read.
    lens : Tensor
        ``[B]`` int32, tokens that get slots; cut to 0..the smaller of context and blocks.
    req_to_token : Tensor
        ``[R, context]`` int32, in place, up to each length; may have a row stride.
    reserved : Tensor
        ``[R]`` int32, in place: the lengths; 0 in row 0.
    page_size : int
        Slots of a block.
    block_stride : int
        Slots from the first of a block to the first of the next.
    """
    if not len(rows):
        return
    room = min(req_to_token.shape[1], block_table.shape[1] * page_size)
    block = min(1024, triton.next_power_of_2(max(room, 1)))
    grid = (len(rows), programs_per_row(len(rows), triton.cdiv(max(room, 1), block)))
    _fill_slots_kernel[grid](
        rows,
        block_table,
        lens,
        req_to_token,
        reserved,
        room,
        block_table.stride(0),
        req_to_token.stride(0),
        PAGE=page_size,
        APART=block_stride,
        BLOCK=block,
    )
