"""What a library that knows one index list and one bit mask per request reads.

The host has decided where each list begins; everything in the lists is filled on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.checks import require_dense
from specattn.kernels.launch import programs_per_row

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fill_lists", "pack_masks"]


@triton.jit
def _fill_lists_kernel(
    req_to_token,  # [rows, max_len] int32
    req_pool_indices,  # [B] int64
    seq_lens,  # [B] int32
    positions,  # [B, q_len] int64
    tail_slots,  # [B, tail] int32
    kv_indptr,  # [B + 1] int32
    kv_indices,  # [kv_indptr[B]] int32, out
    q_len,
    tail,
    window_left,
    stride_table,
    stride_positions,
    stride_tail,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    begin = tl.load(kv_indptr + req).to(tl.int64)
    length = (tl.load(kv_indptr + req + 1) - begin).to(tl.int32)
    prefix = tl.load(seq_lens + req)
    row = req_to_token + tl.load(req_pool_indices + req) * stride_table
    tail_slots += req * stride_tail
    seen = 0
    if WINDOW:
        query = tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
        here = tl.load(positions + req * stride_positions + query, mask=query < q_len, other=2**62)
        seen = tl.minimum(tl.min(here, 0) - window_left, prefix)
        spare = tl.load(tail_slots + tail - 1)
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        column = first + tl.arange(0, BLOCK)  # [BLOCK]
        key = column + prefix + tail - length
        late = (key >= prefix) & (column < length)
        slots = tl.load(row + key, mask=(key >= 0) & (key < prefix), other=0)
        slots += tl.load(tail_slots + (key - prefix), mask=late, other=0)
        if WINDOW:
            slots = tl.where(key < seen, spare, slots)
        tl.store(kv_indices + begin + column, slots, mask=column < length)


@triton.jit
def _pack_masks_kernel(
    kv_indptr,  # [B + 1] int32
    mask_indptr,  # [B + 1] int32
    seq_lens,  # [B] int32
    positions,  # [B, q_len] int64
    tail_positions,  # [B, tail] int64
    tail_words,  # [B, q_len, W] int64
    mask,  # [mask_indptr[B]] uint8, out
    q_len,
    tail,
    window_left,
    stride_positions,
    stride_tail,
    stride_req,
    stride_words,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    length = tl.load(kv_indptr + req + 1) - tl.load(kv_indptr + req)
    prefix = tl.load(seq_lens + req)
    begin = tl.load(mask_indptr + req).to(tl.int64)
    count = (tl.load(mask_indptr + req + 1) - begin).to(tl.int32)
    positions += req * stride_positions
    tail_positions += req * stride_tail
    tail_words += req * stride_req
    bit = tl.arange(0, 8)[None, :]  # [1, 8]
    for first in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        byte = first + tl.arange(0, BLOCK)  # [BLOCK]
        cell = byte[:, None] * 8 + bit  # [BLOCK, 8]
        query = cell // length
        column = cell - query * length
        inside = query < q_len
        late = inside & (column >= length - tail)
        node = tl.where(late, column - (length - tail), 0)
        row = query.to(tl.int64) * stride_words
        word = tl.load(tail_words + row + node // 64, mask=late, other=0)
        seen = inside & ((column < length - tail) | (((word >> (node % 64)) & 1) != 0))
        if WINDOW:
            there = tl.load(tail_positions + node, mask=late, other=0)
            there = tl.where(late, there, column + prefix + tail - length)
            ago = tl.load(positions + query, mask=inside, other=0) - there
            seen = seen & (ago >= 0) & (ago <= window_left)
        packed = tl.sum(seen.to(tl.int32) << bit, 1)  # [BLOCK]
        tl.store(mask + begin + byte, packed.to(tl.uint8), mask=byte < count)


def fill_lists(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    tail_slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    window_left: int,
) -> None:
    """Write each request's list of slots: its prefix by the table, then its tail.

    A list shorter than both holds the last of them: a window lets the host leave keys out.

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows, max_len]`` int32; dense last axis.
    req_pool_indices, seq_lens : Tensor
        ``[B]`` int64 and int32: each request's row, and its prefix length.
    positions : Tensor
        ``[B, q_len]`` int64, read with a window only; may have a row stride.
    tail_slots : Tensor
        ``[B, tail]`` int32, tail at least 0 (1 with a window); may have a row stride.
    kv_indptr : Tensor
        ``[at least B + 1]`` int32, read: where each list begins.
    kv_indices : Tensor
        ``[at least kv_indptr[B]]`` int32, written up to there.
    window_left : int
        With a window, a listed prefix key that no query of the request sees is replaced by the
        tail's last: its slot may hold anything, and a weight of 0 times a NaN is NaN. -1 is none.
    """
    batch, tail = tail_slots.shape
    require_dense(kv_indptr=kv_indptr, kv_indices=kv_indices)
    block = 512
    blocks = triton.cdiv(req_to_token.shape[1] + tail, block)
    grid = (batch, programs_per_row(batch, blocks))
    _fill_lists_kernel[grid](
        req_to_token,
        req_pool_indices,
        seq_lens,
        positions,
        tail_slots,
        kv_indptr,
        kv_indices,
        positions.shape[1],
        tail,
        window_left,
        req_to_token.stride(0),
        positions.stride(0),
        tail_slots.stride(0),
        WINDOW=window_left >= 0,
        BLOCK=block,
        BLOCK_Q=triton.next_power_of_2(max(positions.shape[1], 1)),
        num_warps=4,
    )


def pack_masks(
    kv_indptr: Tensor,
    mask_indptr: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    tail_positions: Tensor,
    tail_words: Tensor,
    mask: Tensor,
    window_left: int,
) -> None:
    """Write each request's mask, a row of listed keys per query, as bits, lowest first.

    This is the packed mask of FlashInfer: rows follow one another without padding, and each
    request begins at a whole byte. It comes straight from the ancestor words; no bool mask exists.

    Parameters
    ----------
    kv_indptr : Tensor
        ``[at least B + 1]`` int32, as in `fill_lists`.
    mask_indptr : Tensor
        ``[at least B + 1]`` int32, offset of each request's bytes, ``ceil(q_len * keys / 8)`` each.
    seq_lens : Tensor
        ``[B]`` int32, prefix lengths.
    positions, tail_positions : Tensor
        ``[B, q_len]`` and ``[B, tail]`` int64; read with a window only. A prefix key's position
        is its place in the prefix.
    tail_words : Tensor
        ``[B, q_len, ceil(tail / 64)]`` int64; the three may have row strides.
    mask : Tensor
        ``[at least mask_indptr[B]]`` uint8, written up to there.
    window_left : int
        A key is visible iff ``0 <= pos_q - pos_k <= window_left`` as well; -1 is no window.
    """
    batch, q_len, _ = tail_words.shape
    require_dense(kv_indptr=kv_indptr, mask_indptr=mask_indptr, mask=mask)
    block = 256
    grid = (batch, programs_per_row(batch, triton.cdiv(len(mask), block * batch)))
    _pack_masks_kernel[grid](
        kv_indptr,
        mask_indptr,
        seq_lens,
        positions,
        tail_positions,
        tail_words,
        mask,
        q_len,
        tail_positions.shape[1],
        window_left,
        positions.stride(0),
        tail_positions.stride(0),
        tail_words.stride(0),
        tail_words.stride(1),
        WINDOW=window_left >= 0,
        BLOCK=block,
        num_warps=4,
    )
