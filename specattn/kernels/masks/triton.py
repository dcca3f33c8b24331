"""Inputs of plans from an engine's tensors, and packed masks."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter

# columns of a window table that a program writes at a time
TABLE_BLOCK = tl.constexpr(1024)


@triton.jit
def _copy_in_request(req, rows, seq_lens, counted, out, TABLE: tl.constexpr):
    """Return a request's prefix and, with ``TABLE``, its table row."""
    rows_out, seq_lens_out, _, _, _, _ = out
    writes = tl.program_id(1) == 0
    prefix = tl.maximum(tl.load(seq_lens + req).to(tl.int64) - counted, 0)
    row = tl.zeros([], tl.int64)
    if TABLE or writes:
        row = tl.load(rows + req).to(tl.int64)
    if writes:
        tl.store(rows_out + req, row)
        tl.store(seq_lens_out + req, prefix.to(tl.int32))
    return prefix, row


@triton.jit
def _from_table(req_to_token, row, stride_table, column, context, ok):
    return tl.load(
        req_to_token + row * stride_table + column, mask=ok & (column < context), other=0
    )


@triton.jit
def _mapped(slot_map, slot, ok):
    """Return slots of the window layers' pool, below 0 for none."""
    found = tl.load(slot_map + tl.maximum(slot, 0), mask=ok & (slot >= 0), other=-1)
    return found.to(tl.int32)


@triton.jit
def _window_row(
    req,
    row,
    prefix,
    new,
    req_to_token,
    stride_table,
    context,
    window,  # see `Window.arguments`
    first,
    step,
    PAGE: tl.constexpr,
):
    """Write some blocks of a request's window table; return where it begins."""
    slot_map, table, lens, _, _, _, stride_window, keys = window
    start = tl.maximum(prefix - keys, 0) // PAGE * PAGE
    if first == 0:
        tl.store(lens + req, (prefix - start).to(tl.int32))
    for begin in range(first, prefix - start + new, step):
        at = begin + tl.arange(0, TABLE_BLOCK)  # [TABLE_BLOCK]
        ok = at < prefix - start + new
        slot = _from_table(req_to_token, row, stride_table, start + at, context, ok)
        slot = tl.maximum(_mapped(slot_map, slot, ok), 0)
        tl.store(table + req * stride_window + at, slot, mask=ok)
    return start


@triton.jit
def _mask_start(seq_lens, counted, req, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the cells, or bytes, of earlier requests' masks."""
    start = tl.zeros([], tl.int64)
    for first in range(0, req, BLOCK):
        other = first + tl.arange(0, BLOCK)  # [BLOCK]
        length = tl.load(seq_lens + other, mask=other < req, other=0).to(tl.int64)
        cells = n * (tl.maximum(length - counted, 0) + n)
        if BITS:
            cells = (cells + 7) // 8
        start += tl.sum(tl.where(other < req, cells, 0), 0)
    return start


@triton.jit
def copy_in_rows_kernel(
    rows,  # [B]
    seq_lens,  # [B]
    slots,  # [B, n], or None
    positions,  # [B, n], or None
    mask,  # flat uint8, or None
    req_to_token,  # [R, context] int32
    out,  # see `PlanInputs`
    window,  # see `Window.arguments`; or None: no layer has a window pool
    n,
    counted,
    context,
    mask_size,
    row_bytes,
    stride_table,
    stride_slot,
    stride_slot_n,
    stride_position,
    stride_position_n,
    stride_slots_out,
    stride_store_out,
    stride_positions_out,
    PAGE: tl.constexpr,
    PREFIX: tl.constexpr,
    FULL: tl.constexpr,
    BITS: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy in some rows of one request."""
    enter(PDL)
    _, _, slots_out, store_out, positions_out, words_out = out
    req = tl.program_id(0).to(tl.int64)
    TABLE: tl.constexpr = slots is None or window is not None
    prefix, row = _copy_in_request(req, rows, seq_lens, counted, out, TABLE)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    ok = node < n
    if slots is None:
        given = _from_table(req_to_token, row, stride_table, prefix + node, context, ok)
    else:
        given = tl.load(slots + req * stride_slot + node * stride_slot_n, mask=ok, other=0)
    tl.store(store_out + req * stride_store_out + node, given.to(tl.int32), mask=ok)
    # nobody sees the tail of "prefix", whose slots may hold anything
    slot = tl.zeros([ROWS], tl.int32) if PREFIX else tl.maximum(given, 0).to(tl.int32)
    tl.store(slots_out + req * stride_slots_out + node, slot, mask=ok)

    start = tl.zeros([], tl.int64)
    if FULL:
        start = _mask_start(seq_lens, counted, req, n, BITS, BLOCK_B)
    depth = tl.zeros([ROWS], tl.int64)
    for word in range(W):
        key = word * 64 + tl.arange(0, 64)[None, :]  # [1, 64]
        seen = key <= node[:, None]  # [ROWS, 64]
        if mask is not None:
            if FULL:
                cell = node[:, None] * (prefix + n) + prefix + key
                at = start + (cell // 8 if BITS else cell)
            elif BITS:
                cell = tl.broadcast_to(key, [ROWS, 64])
                at = (req * n + node[:, None]) * row_bytes + cell // 8
            else:
                cell = (req * n + node[:, None]) * n + key
                at = cell
            inside = ok[:, None] & (key < n) & (at < mask_size)
            found = tl.load(mask + at, mask=inside, other=0).to(tl.int32)
            if BITS:
                found = (found >> (cell % 8).to(tl.int32)) & 1
            seen = (found != 0) | (key == node[:, None])
        bits = tl.where(seen, tl.full([ROWS, 64], 1, tl.int64), 0)
        if PREFIX:
            bits = tl.zeros([ROWS, 64], tl.int64)
        depth += tl.sum(bits, 1)
        # distinct bits: their sum is their union
        bits = tl.sum(bits << (key % 64), 1)
        tl.store(words_out + (req * n + node) * W + word, bits, mask=ok)
    if positions is None:
        position = prefix + tl.maximum(depth - 1, 0)
    else:
        at = req * stride_position + node * stride_position_n
        position = tl.load(positions + at, mask=ok, other=0).to(tl.int64)
    tl.store(positions_out + req * stride_positions_out + node, position, mask=ok)
    if window is not None:
        slot_map, _, _, window_slots, window_store, window_positions, _, _ = window
        block = tl.program_id(1) * TABLE_BLOCK
        step = tl.num_programs(1) * TABLE_BLOCK
        start = _window_row(
            req, row, prefix, 0, req_to_token, stride_table, context, window, block, step, PAGE
        )
        tl.store(window_positions + req * n + node, position - start, mask=ok)
        slot = _mapped(slot_map, given, ok)
        tl.store(window_store + req * n + node, slot, mask=ok)
        slot = tl.zeros([ROWS], tl.int32) if PREFIX else tl.maximum(slot, 0)
        tl.store(window_slots + req * n + node, slot, mask=ok)


@triton.jit
def copy_in_steps_kernel(
    rows,  # [B]
    seq_lens,  # [B]
    slots,  # [B, steps, TOPK], or None
    req_to_token,  # [R, context] int32
    out,  # see `PlanInputs`, with [B, steps, TOPK] in place of [B, n]
    nodes,
    counted,
    context,
    stride_table,
    stride_slot,
    stride_step,
    stride_branch,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy in some nodes of one request's draft."""
    enter(PDL)
    _, _, slots_out, store_out, positions_out, words_out = out
    req = tl.program_id(0).to(tl.int64)
    prefix, row = _copy_in_request(req, rows, seq_lens, counted, out, slots is None)
    node = tl.program_id(1) * NODES + tl.arange(0, NODES)  # [NODES]
    ok = node < nodes
    step, branch = node // TOPK, node % TOPK
    if slots is None:
        slot = _from_table(req_to_token, row, stride_table, prefix + node, context, ok)
    else:
        at = req * stride_slot + step * stride_step + branch * stride_branch
        slot = tl.load(slots + at, mask=ok, other=0)
    to = req * nodes + node
    tl.store(store_out + to, slot.to(tl.int32), mask=ok)
    tl.store(slots_out + to, tl.maximum(slot, 0).to(tl.int32), mask=ok)
    tl.store(positions_out + to, prefix + step, mask=ok)
    word = tl.arange(0, BLOCK_W)[None, :]  # [1, BLOCK_W]
    own = tl.full([NODES, BLOCK_W], 1, tl.int64) << (node % 64)[:, None]
    last = (node // 64)[:, None]
    bits = tl.where(word == last, own, 0)
    if TOPK == 1:
        # all before and itself; of bit 63 the sum wraps into place
        bits = tl.where(word < last, -1, tl.where(word == last, own + (own - 1), 0))
    cell = to[:, None] * W + word
    tl.store(words_out + cell, bits.to(tl.int64), mask=ok[:, None] & (word < W))


# prompts come in any number, of any number of tokens
@triton.jit(do_not_specialize=["batch", "tokens"])
def copy_in_prompts_kernel(
    rows,  # [B]
    prefix_lens,  # [B]
    new_lens,  # [B]
    slots,  # [T]
    rows_out,  # [B] int64, out
    seq_lens_out,  # [B] int32, out
    indptr_out,  # [B + 1] int32, out
    slots_out,  # [T] int32, out
    req_to_token,  # [R, context] int32
    window,  # see `Window.arguments`; or None
    batch,
    tokens,
    context,
    stride_slot,
    stride_table,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy in a block of requests, and a block of their tokens."""
    enter(PDL)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    at = begin + tl.arange(0, BLOCK)  # [BLOCK]
    slot = tl.load(slots + at * stride_slot, mask=at < tokens, other=0)
    tl.store(slots_out + at, slot.to(tl.int32), mask=at < tokens)
    if window is not None:
        slot_map, _, _, _, window_store, _, _, _ = window
        tl.store(window_store + at, _mapped(slot_map, slot, at < tokens), mask=at < tokens)
        req = tl.program_id(0).to(tl.int64)
        if req < batch:
            row = tl.load(rows + req).to(tl.int64)
            prefix = tl.load(prefix_lens + req).to(tl.int64)
            new = tl.load(new_lens + req).to(tl.int64)
            step = TABLE_BLOCK
            _window_row(
                req, row, prefix, new, req_to_token, stride_table, context, window, 0, step, PAGE
            )
    if begin < batch:
        earlier = tl.zeros([], tl.int64)
        for first in range(0, begin, BLOCK):
            earlier += tl.sum(tl.load(new_lens + first + tl.arange(0, BLOCK)).to(tl.int64), 0)
        ok = at < batch
        tl.store(rows_out + at, tl.load(rows + at, mask=ok, other=0).to(tl.int64), mask=ok)
        prefix = tl.load(prefix_lens + at, mask=ok, other=0)
        tl.store(seq_lens_out + at, prefix.to(tl.int32), mask=ok)
        new = tl.load(new_lens + at, mask=ok, other=0).to(tl.int64)
        tl.store(indptr_out + 1 + at, (earlier + tl.cumsum(new, 0)).to(tl.int32), mask=ok)
    if begin == 0:
        tl.store(indptr_out, 0)


@triton.jit
def pack_masks_kernel(
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
    """Pack a share of one request's mask."""
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
