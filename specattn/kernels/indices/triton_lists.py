"""Index lists and packed masks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fill_lists_kernel(
    keys,  # see `KeySlots.arguments`
    positions,  # [B, q_len] int64
    kv_indptr,  # [B + 1] int32
    kv_indices,  # [kv_indptr[B]] int32, out
    q_len,
    tail,
    window_left,
    stride_positions,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Fill a share of one request's list."""
    req_to_token, rows, seq_lens, tail_slots, stride_table, stride_tail = keys
    req = tl.program_id(0).to(tl.int64)
    begin = tl.load(kv_indptr + req).to(tl.int64)
    length = (tl.load(kv_indptr + req + 1) - begin).to(tl.int32)
    prefix = tl.load(seq_lens + req)
    row = req_to_token + tl.load(rows + req) * stride_table
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
def _store_tail(
    branch_slots,
    words,
    kv_indices,
    at,
    step,
    width,
    TOPK: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write step + 1 slots of a branch's set bits, ascending."""
    node = tl.arange(0, BLOCK_J)  # [BLOCK_J]
    drafted = node < (step + 1) * TOPK
    word = tl.load(words + node // 64, mask=drafted, other=0)
    seen = ((word >> (node % 64)) & 1) != 0
    rank = tl.cumsum(seen.to(tl.int32), 0) - 1
    fits = seen & (rank <= step) & (at + rank < width)
    tl.store(kv_indices + at + rank, tl.load(branch_slots + node, mask=fits, other=0), mask=fits)
    # A branch whose words name fewer ancestors, such as padding, reads slot 0 instead.
    rank = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    short = (rank >= tl.sum(seen.to(tl.int32), 0)) & (rank <= step) & (at + rank < width)
    tl.store(kv_indices + at + rank, tl.zeros([BLOCK_S], tl.int32), mask=short)


@triton.jit
def fill_draft_kv_kernel(
    keys,  # see `KeySlots.arguments`, with a tail [B, steps, TOPK]
    words,  # [B, steps, TOPK, W] int64
    kv_indptr,  # [steps, B * TOPK + 1] int32, out
    kv_indices,  # [steps, width] int32, out
    num_steps,
    max_len,
    width,
    stride_indptr,
    stride_indices,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Fill a share of one branch's list at one step."""
    req_to_token, rows, seq_lens, branch_slots, stride_table, stride_slots = keys
    branch = tl.program_id(0).to(tl.int64)
    step = tl.program_id(2).to(tl.int64)
    req = branch // TOPK

    before = tl.full([], 0, tl.int64)
    for first in range(0, req, BLOCK_B):
        other = first + tl.arange(0, BLOCK_B)  # [BLOCK_B]
        lens = tl.load(seq_lens + other, mask=other < req, other=0)
        before += tl.sum(tl.minimum(tl.maximum(lens, 0), max_len).to(tl.int64), 0)
    length = tl.minimum(tl.maximum(tl.load(seq_lens + req), 0), max_len).to(tl.int64)
    begin = TOPK * before + branch % TOPK * length + branch * (step + 1)

    row = req_to_token + tl.load(rows + req) * stride_table
    kv_indices += step * stride_indices
    end = tl.minimum(length, width - begin).to(tl.int32)
    for first in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        column = first + tl.arange(0, BLOCK)  # [BLOCK]
        slots = tl.load(row + column, mask=column < end, other=0)
        tl.store(kv_indices + begin + column, slots, mask=column < end)

    if tl.program_id(1) == 0:
        kv_indptr += step * stride_indptr
        tl.store(kv_indptr, 0, mask=branch == 0)
        tl.store(kv_indptr + branch + 1, (begin + length + step + 1).to(tl.int32))
        node = (req * num_steps + step) * TOPK + branch % TOPK
        _store_tail(
            branch_slots + req * stride_slots,
            words + node * W,
            kv_indices,
            begin + length,
            step,
            width,
            TOPK,
            BLOCK_J,
            BLOCK_S,
        )


@triton.jit
def fill_draft_tails_kernel(
    seq_lens,  # [B] int32
    branch_slots,  # [B, steps, TOPK] int32
    words,  # [B, TOPK, W] int64, of this step
    kv_indptr,  # [B * TOPK + 1] int32, of this step
    kv_indices,  # [width] int32, of this step, out
    step,
    width,
    stride_slots,
    stride_words,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write one branch's ancestors at one step."""
    branch = tl.program_id(0).to(tl.int64)
    req = branch // TOPK
    begin = tl.load(kv_indptr + branch).to(tl.int64)
    room = tl.load(kv_indptr + branch + 1) - begin - (step + 1)
    length = tl.minimum(tl.maximum(tl.load(seq_lens + req), 0), room)
    _store_tail(
        branch_slots + req * stride_slots,
        words + req * stride_words + branch % TOPK * W,
        kv_indices,
        begin + length,
        step,
        width,
        TOPK,
        BLOCK_J,
        BLOCK_S,
    )
