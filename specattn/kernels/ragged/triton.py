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
    # numbers that are not negative are in the order of their bits
    key = tl.where(known, total.to(tl.int32, bitcast=True), -1)
    left = chunks - tl.sum(live.to(tl.int32), 0)
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x7F800000, tl.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = tl.sum(tl.sum((key >= middle).to(tl.int32), 0), 0) >= left
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = key > low
    left -= tl.sum(tl.sum(above.to(tl.int32), 0), 0)
    equal = tl.reshape((key == low).to(tl.int32), [BLOCK_C * BLOCK_B])
    place = tl.reshape(tl.cumsum(equal, 0), [BLOCK_C, BLOCK_B])
    more = above | ((key == low) & (place <= left))
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
    rows,  # [B] int64
    seq_lens,  # [B] int32
    window,  # [B, n or more] int32
    tokens,  # [B, n] int64
    positions,  # [B, n] int64, in place
    words,  # [B, n, W] int64, in place
    next_token,  # [B, n] int64, in place
    next_sibling,  # [B, n] int64, in place
    index_out,  # [B, n] int64, out
    rows_out,  # [C] int64, out
    seq_lens_out,  # [C] int32, out
    tokens_out,  # [C, M] int64, out
    positions_out,  # [C, M] int64, out
    words_out,  # [C, M, W] int64, out
    slots_out,  # [C, M] int32, out
    tail_slots_out,  # [C, n] int32, out
    tail_positions_out,  # [C, n] int64, out
    requests_out,  # [C] int64, out
    batch,
    chunks,
    nodes,
    stride_window,
    M: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pack one chunk; or, past the last chunk, cut one request's tree.

    The former reads what is verified of a tree, the latter writes the rest.
    """
    enter(PDL)
    pid = tl.program_id(0)
    each = tl.arange(0, BLOCK_B)  # [BLOCK_B]
    counts = tl.load(lens + each, mask=each < batch, other=0) // M
    node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    live = node < nodes
    if pid < chunks:
        ends = tl.cumsum(counts, 0)
        req = tl.sum(((ends <= pid) & (each < batch)).to(tl.int32), 0)
        taken = req < batch
        req = tl.where(taken, req, 0)
        nth = pid - tl.sum(tl.where(each < req, counts, 0), 0)
        length = tl.load(lens + req)
        wide = req.to(tl.int64)
        tl.store(rows_out + pid, tl.load(rows + req, mask=taken, other=0))
        tl.store(seq_lens_out + pid, tl.load(seq_lens + req, mask=taken, other=0))
        tl.store(requests_out + pid, wide)

        part = tl.arange(0, BLOCK_M)  # [BLOCK_M]
        mine = part < M
        some = mine & taken
        at = wide * nodes + nth * M + part
        to = pid.to(tl.int64) * M + part
        tl.store(tokens_out + to, tl.load(tokens + at, mask=some, other=0), mask=mine)
        tl.store(positions_out + to, tl.load(positions + at, mask=some, other=0), mask=mine)
        slot = tl.load(window + wide * stride_window + nth * M + part, mask=some, other=0)
        tl.store(slots_out + to, slot, mask=mine)
        for w in range(W):
            word = tl.load(words + at * W + w, mask=some, other=0)
            word = tl.where(taken, word, tl.where(w == 0, 1, 0).to(tl.int64))
            tl.store(words_out + to * W + w, word, mask=mine)

        seen = tl.where(node < length, node, 0)
        to = pid.to(tl.int64) * nodes + node
        slot = tl.load(window + wide * stride_window + seen, mask=live & taken, other=0)
        tl.store(tail_slots_out + to, slot, mask=live)
        place = tl.load(positions + wide * nodes + seen, mask=live & taken, other=0)
        tl.store(tail_positions_out + to, place, mask=live)
    else:
        req = pid - chunks
        wide = req.to(tl.int64)
        start = tl.sum(tl.where(each < req, counts, 0), 0)
        length = tl.load(lens + req)
        kept = node < length
        index = start * M + tl.where(kept, node, 0)
        at = wide * nodes + node
        tl.store(index_out + at, tl.where(length > 0, index, 0).to(tl.int64), mask=live)
        child = tl.load(next_token + at, mask=live, other=-1)
        child = tl.where(kept & (child < length), child, -1)
        sibling = tl.load(next_sibling + at, mask=live, other=-1)
        sibling = tl.where(kept & (sibling < length), sibling, -1)
        tl.store(next_token + at, child, mask=live)
        tl.store(next_sibling + at, sibling, mask=live)
        root = tl.load(seq_lens + req).to(tl.int64) + tl.zeros_like(at)
        tl.store(positions + at, root, mask=live & ~kept)
        for w in range(W):
            bit = tl.full([BLOCK_N], 1, tl.int64) << (node % 64)
            tl.store(words + at * W + w, tl.where(node // 64 == w, bit, 0), mask=live & ~kept)


def pack_rows(
    lens: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    window: Tensor,
    tokens: Tensor,
    positions: Tensor,
    words: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    index_out: Tensor,
    out: PackedRows,
) -> None:
    batch, nodes = tokens.shape
    chunks, chunk = out.tokens.shape
    pack_kernel[(chunks + batch,)](
        lens,
        rows,
        seq_lens,
        window,
        tokens,
        positions,
        words,
        next_token,
        next_sibling,
        index_out,
        *out,
        batch,
        chunks,
        nodes,
        window.stride(0),
        M=chunk,
        W=words.shape[2],
        BLOCK_M=triton.next_power_of_2(chunk),
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_B=triton.next_power_of_2(batch),
        num_warps=1,
        **launch_options(tokens.device),
    )
