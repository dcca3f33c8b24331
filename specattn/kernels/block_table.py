"""Block tables of whole KV pages, for attention kernels that read KV page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.spread import programs_per_row

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _fill_block_table_kernel(
    req_to_token,      # [rows, max_len] int32
    req_pool_indices,  # [B] int64
    seq_lens,          # [B] int32
    tail_slots,        # [B, tail] int32
    table,             # [B * lists, width] int32, out
    lens,              # [B * lists] int32, out
    max_len, tail, lists, width, stride_req, stride_tail, stride_table,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
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
        column = first + tl.arange(0, BLOCK)                                 # [BLOCK]
        place = column * PAGE
        cached = (column < width) & (place < prefix)
        own = (column < width) & (place >= prefix) & (place < length)
        slots = tl.load(row + place, mask=cached, other=0)
        slots += tl.load(tail_slots + req * stride_tail + place - prefix, mask=own, other=0)
        tl.store(table + entry * stride_table + column, slots // PAGE, mask=column < width)


def fill_block_table(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, tail_slots: Tensor,
    table: Tensor, lens: Tensor, *, page_size: int, lists: int = 1,
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
        req_to_token, req_pool_indices, seq_lens, tail_slots, table, lens,
        req_to_token.shape[1], tail_slots.shape[1], lists, width,
        req_to_token.stride(0), tail_slots.stride(0), table.stride(0),
        PAGE=page_size, BLOCK=block,
    )
