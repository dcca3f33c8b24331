"""The kernels that begin a chunk of prompts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "size"])
def begin_prompts_kernel(
    pieces,  # [S, P, COLUMNS] int64, in the host's memory
    tokens,  # [S, T] int64, in the host's memory
    entry,  # [1] int64
    req_to_token,  # [R, context] int32
    pieces_out,  # the tensors of a `PieceStart`, out
    tokens_out,  # the tensors of a `TokenStart`, out
    count,
    size,
    stride_pieces,
    stride_tokens,
    stride_table,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Lay out a block of places; one program lays out pieces."""
    at = tl.load(entry)
    piece = tl.arange(0, BLOCK_P)  # [P]
    known = piece < count
    # no cache modifier: all warps of a multiprocessor share what comes over PCIe. In 32 bits it
    # takes half the registers
    column = pieces + at * stride_pieces + piece * COLUMNS
    row = tl.load(column, mask=known, other=0).to(tl.int32)
    start = tl.load(column + 1, mask=known, other=0).to(tl.int32)
    begin = tl.load(column + 2, mask=known, other=0).to(tl.int32)
    places = tl.load(column + 3, mask=known, other=0).to(tl.int32)
    ahead = tl.load(column + 4, mask=known, other=0).to(tl.int32)
    following = tl.load(column + 5, mask=known, other=0)
    end = begin + places
    last = tl.maximum(end - 1 - ahead, 0)

    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = place < size
    inside = (place[:, None] >= begin[None, :]) & (place[:, None] < end[None, :])
    inside = inside & known[None, :]  # [BLOCK, P]
    is_last = inside & (place[:, None] == last[None, :])
    live = tl.sum(inside.to(tl.int32), 1) > 0
    ends = tl.sum(is_last.to(tl.int32), 1) > 0
    own_row = tl.sum(tl.where(inside, row[None, :], 0), 1)
    position = tl.sum(tl.where(inside, (start - begin)[None, :], 0), 1)
    position = tl.where(live, position + place, 0)
    after = tl.sum(tl.where(is_last, tl.maximum(following, 0).to(tl.int32)[None, :], 0), 1)
    text = tokens + at * stride_tokens + place
    token = tl.load(text, mask=ok & live, other=0)
    next_id = tl.load(text + 1, mask=(place + 1 < size) & live & ~ends, other=0)
    next_id = tl.where(ends, after.to(tl.int64), next_id)
    slots = req_to_token + own_row.to(tl.int64) * stride_table
    slot = tl.load(slots + position, mask=ok & live, other=-1)
    tokens_to, next_to, rows_to, positions_to, slots_to = tokens_out
    tl.store(tokens_to + place, token, mask=ok)
    tl.store(next_to + place, next_id, mask=ok)
    tl.store(rows_to + place, own_row, mask=ok)
    tl.store(positions_to + place, position, mask=ok)
    tl.store(slots_to + place, slot, mask=ok)

    if tl.program_id(0) == 0:
        seed = tl.load(column + 6, mask=known, other=0)
        top_k = tl.load(column + 7, mask=known, other=0)
        temperature = tl.load(column + 8, mask=known, other=0).to(tl.int32)
        top_p = tl.load(column + 9, mask=known, other=0).to(tl.int32)
        ended = (places > 0) & (following < 0)
        before = tl.where(ended, start + places - ahead - 1, 0)
        tl.store(pieces_out[0] + piece, row, mask=known)
        tl.store(pieces_out[1] + piece, start.to(tl.int32), mask=known)
        tl.store(pieces_out[2] + piece, begin.to(tl.int32), mask=known)
        tl.store(pieces_out[2] + piece + 1, end.to(tl.int32), mask=piece == count - 1)
        tl.store(pieces_out[3] + piece, last, mask=known)
        tl.store(pieces_out[4] + piece, tl.maximum(end - 1, 0), mask=known)
        tl.store(pieces_out[5] + piece, tl.where(ended, row, 0), mask=known)
        tl.store(pieces_out[6] + piece, before.to(tl.int32), mask=known)
        tl.store(pieces_out[7] + piece, temperature.to(tl.float32, bitcast=True), mask=known)
        tl.store(pieces_out[8] + piece, top_k.to(tl.int32), mask=known)
        tl.store(pieces_out[9] + piece, top_p.to(tl.float32, bitcast=True), mask=known)
        tl.store(pieces_out[10] + piece, seed, mask=known)


@triton.jit(do_not_specialize=["count"])
def clear_rows_kernel(
    held,  # [L, count, SIZE], in place
    rows,  # [P] int64
    seq_lens,  # [P] int32
    count,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero a layer's part of a row, if its text begins."""
    piece, layer = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + piece)
    begins = (row > 0) & (tl.load(seq_lens + piece) == 0)
    if begins:
        first = held + (layer.to(tl.int64) * count + row) * SIZE
        for start in range(tl.program_id(2) * BLOCK, SIZE, tl.num_programs(2) * BLOCK):
            at = start + tl.arange(0, BLOCK)  # [BLOCK]
            nothing = tl.zeros([BLOCK], held.dtype.element_ty)
            tl.store(first + at, nothing, mask=at < SIZE)
