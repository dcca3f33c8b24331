"""Page tables of single-slot pages, for attention kernels that read KV through a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.launch import programs_per_row

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _fill_page_table_kernel(
    req_to_token,  # [rows, max_len] int32
    req_pool_indices,  # [B] int64
    seq_lens,  # [B] int32
    tail_slots,  # [B, tail] int32
    table,  # [B, width] int32, out
    lens,  # [B] int32, out
    max_len,
    tail,
    q_len,
    window_left,
    width,
    stride_req,
    stride_tail,
    stride_table,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    prefix = tl.minimum(tl.maximum(tl.load(seq_lens + req), 0), max_len)
    start = prefix * 0
    if WINDOW:
        start = tl.maximum(prefix + tail - q_len - window_left, 0)
    length = tl.minimum(prefix + tail - start, width)
    if tl.program_id(1) == 0:
        tl.store(lens + req, length)
    row = req_to_token + tl.load(req_pool_indices + req) * stride_req
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
def _fill_ancestor_table_kernel(
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


def fill_page_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    q_len: int,
    window_left: int = -1,
) -> None:
    """List every request's slots: its prefix, then its tail.

    Under a window, keys that the first query token (and so any other) does not see are left out;
    the rest keep their distance to the end of the list, so a causal kernel that counts its window
    from there still sees the right ones, and never loads a key nobody sees.

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows, max_len]`` int32, slot of every prefix token; dense last axis.
    req_pool_indices, seq_lens : Tensor
        ``[B]`` int64 and int32: each request's row, and its prefix length.
    tail_slots : Tensor
        ``[B, tail]`` int32, tail at least 1; may have a row stride.
    table : Tensor
        ``[B, width]`` int32, written up to each row's length. ``max_len + tail`` columns hold any
        list, under a window ``window_left + q_len`` do; longer lists are cut at the width.
    lens : Tensor
        ``[B]`` int32, written: the length of every list.
    q_len : int
        Query tokens per request, the last of the tail.
    window_left : int
        See `specattn.config.AttnConfig`.
    """
    width = table.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    grid = (len(table), programs_per_row(len(table), triton.cdiv(width, block)))
    _fill_page_table_kernel[grid](
        req_to_token,
        req_pool_indices,
        seq_lens,
        tail_slots,
        table,
        lens,
        req_to_token.shape[1],
        tail_slots.shape[1],
        q_len,
        window_left,
        width,
        req_to_token.stride(0),
        tail_slots.stride(0),
        table.stride(0),
        WINDOW=window_left >= 0,
        BLOCK=block,
    )


def fill_ancestor_table(
    tail_slots: Tensor, tail_words: Tensor, table: Tensor, lens: Tensor
) -> None:
    """List, for every query token, the slots of the tail keys it sees, in the order of their bits.

    Parameters
    ----------
    tail_slots : Tensor
        ``[B, tail]`` int32; may have a row stride.
    tail_words : Tensor
        ``[B, q_len, ceil(tail / 64)]`` int64, bit j set iff tail key j is seen; bits past the tail
        are ignored. Dense last axis.
    table : Tensor
        ``[B * q_len, tail]`` int32, contiguous, written up to each row's length.
    lens : Tensor
        ``[B * q_len]`` int32, written: how many keys each query token sees.
    """
    tail = tail_slots.shape[1]
    block = triton.next_power_of_2(tail)
    rows = max(1, 512 // block)
    _fill_ancestor_table_kernel[(triton.cdiv(len(table), rows),)](
        tail_slots,
        tail_words,
        table,
        lens,
        len(table),
        tail,
        tail_words.shape[1],
        tail_slots.stride(0),
        tail_words.stride(0),
        tail_words.stride(1),
        BLOCK=block,
        ROWS=rows,
        num_warps=4,
    )
