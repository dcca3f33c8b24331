"""Kernels of verify lengths per request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.launch import enter, launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.kernels.ragged.outputs import PackedRows


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def share_kernel(
    worth,  # [B, n] float32
    rows,  # [B] int64
    lens_out,  # [B] int32, out
    batch,
    nodes,
    chunks,
    M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Give every request its first chunk; find the best of all others."""
    enter(PDL)
    req = tl.arange(0, BLOCK_B)  # [BLOCK_B]
    live = tl.load(rows + req, mask=req < batch, other=0) != 0
    nth = 1 + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    first = nth[:, None] * M  # [BLOCK_C, 1]
    known = (first < nodes) & live[None, :]  # [BLOCK_C, BLOCK_B]
    at = worth + req[None, :] * nodes + first
    total = tl.zeros([BLOCK_C, BLOCK_B], tl.float32)
    for node in range(M):
        one = tl.load(at + node, mask=known, other=0)
        # NaN compares false
        total += tl.where(one > 0, tl.minimum(one, 1e30), 0.0)
    total = tl.associative_scan(total, 0, _least)
    # numbers that are not negative are in the order of their bits; 0 is padding's
    key = tl.where(known, total.to(tl.int32, bitcast=True) + 1, 0)
    there = (first < nodes) & (req < batch)[None, :]
    left = chunks - tl.sum(live.to(tl.int32), 0)
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x7F800001, tl.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = tl.sum(tl.sum((there & (key >= middle)).to(tl.int32), 0), 0) >= left
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = key > low
    left -= tl.sum(tl.sum(above.to(tl.int32), 0), 0)
    equal = there & (key == low)
    place = tl.cumsum(tl.reshape(equal.to(tl.int32), [BLOCK_C * BLOCK_B]), 0)
    more = above | (equal & (tl.reshape(place, [BLOCK_C, BLOCK_B]) <= left))
    count = live.to(tl.int32) + tl.sum(more.to(tl.int32), 0)
    tl.store(lens_out + req, count * M, mask=req < batch)


def share_rows(worth: Tensor, rows: Tensor, chunk: int, chunks: int, lens_out: Tensor) -> None:
    batch, nodes = worth.shape
    block_c = triton.next_power_of_2(nodes // chunk - 1)
    block_b = triton.next_power_of_2(batch)
    share_kernel[(1,)](
        worth,
        rows,
        lens_out,
        batch,
        nodes,
        chunks,
        M=chunk,
        BLOCK_C=block_c,
        BLOCK_B=block_b,
        num_warps=max(1, min(16, block_c * block_b // 128)),
        **launch_options(worth.device),
    )


@triton.jit
def pack_kernel(
    lens,  # [B] int32
    seq_lens,  # [B] int32
    window,  # [B, n or more] int32
    tokens,  # [B, n] int64
    positions,  # [B, n] int64, in place
    words,  # [B, n, W] int64, in place
    next_token,  # [B, n] int64, in place
    next_sibling,  # [B, n] int64, in place
    qo_indptr_out,  # [B + 1] int32, out
    tokens_out,  # [R] int64, out
    positions_out,  # [R] int64, out
    slots_out,  # [R] int32, out
    requests_out,  # [R] int64, out
    tail_slots_out,  # [B, n] int32, out
    index_out,  # [B, n] int64, out
    batch,
    rows,
    nodes,
    stride_window,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pack one request's first nodes, and cut its tree."""
    enter(PDL)
    req = tl.program_id(0)
    each = tl.arange(0, BLOCK_B)  # [BLOCK_B]
    start = tl.sum(tl.load(lens + each, mask=each < req, other=0), 0)
    length = tl.load(lens + req)
    tl.store(qo_indptr_out + req, start)
    tl.store(qo_indptr_out + batch, rows, mask=req == 0)
    node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    live = node < nodes
    kept = node < length
    at = req.to(tl.int64) * nodes + node
    row = start + node
    tl.store(tokens_out + row, tl.load(tokens + at, mask=kept, other=0), mask=kept)
    place = tl.load(positions + at, mask=live, other=0)
    tl.store(positions_out + row, place, mask=kept)
    slots = window + req.to(tl.int64) * stride_window
    slot = tl.load(slots + tl.where(kept, node, 0))
    tl.store(slots_out + row, slot, mask=kept)
    tl.store(requests_out + row, req.to(tl.int64) + tl.zeros_like(at), mask=kept)
    tl.store(tail_slots_out + at, slot, mask=live)
    # of a request without rows nobody asks
    index = tl.minimum(tl.where(kept, row, start), rows - 1)
    tl.store(index_out + at, index.to(tl.int64), mask=live)

    child = tl.load(next_token + at, mask=live, other=-1)
    tl.store(next_token + at, tl.where(kept & (child < length), child, -1), mask=live)
    sibling = tl.load(next_sibling + at, mask=live, other=-1)
    tl.store(next_sibling + at, tl.where(kept & (sibling < length), sibling, -1), mask=live)
    root = tl.load(seq_lens + req).to(tl.int64) + tl.zeros_like(at)
    tl.store(positions + at, root, mask=live & ~kept)
    for w in range(W):
        bit = tl.full([BLOCK_N], 1, tl.int64) << (node % 64)
        tl.store(words + at * W + w, tl.where(node // 64 == w, bit, 0), mask=live & ~kept)


def pack_rows(
    lens: Tensor,
    seq_lens: Tensor,
    window: Tensor,
    tokens: Tensor,
    positions: Tensor,
    words: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    out: PackedRows,
) -> None:
    batch, nodes = tokens.shape
    block = triton.next_power_of_2(nodes)
    pack_kernel[(batch,)](
        lens,
        seq_lens,
        window,
        tokens,
        positions,
        words,
        next_token,
        next_sibling,
        *out,
        batch,
        len(out.tokens),
        nodes,
        window.stride(0),
        W=words.shape[2],
        BLOCK_N=block,
        BLOCK_B=triton.next_power_of_2(batch),
        num_warps=max(1, block // 64),
        **launch_options(tokens.device),
    )
