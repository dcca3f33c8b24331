"""Convolve over ancestors, and over prompts."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.fused.triton import sum_partials
from specattn.kernels.pdl import enter


@triton.jit
def _add_up(part, at, column, ok, SPLIT: tl.constexpr):
    """Add up the partials of tokens ``at`` in ``column``."""
    partials, stride_partial, stride_token = part
    offset = at.to(tl.int64)[:, None] * stride_token + column[None, :]
    return sum_partials(partials, offset, ok, stride_partial, SPLIT)


@triton.jit
def _write_mixed(total, out, at, column, ok, Q_SIZE: tl.constexpr, V_SIZE: tl.constexpr):
    """Activate channels, and write them as queries, keys or values."""
    q, k, v, _, _ = out
    mixed = (total / (1 + tl.exp(-total))).to(q.dtype.element_ty)
    token, column = at.to(tl.int64)[:, None], column[None, :]
    is_q, is_v = column < Q_SIZE, column >= 2 * Q_SIZE
    tl.store(q + token * Q_SIZE + column, mixed, mask=ok & is_q)
    tl.store(k + token * Q_SIZE + column - Q_SIZE, mixed, mask=ok & (column >= Q_SIZE) & (~is_v))
    tl.store(v + token * V_SIZE + column - 2 * Q_SIZE, mixed, mask=ok & is_v)


@triton.jit
def _write_gates(
    parts, gates, out, at, ok_token, HEADS: tl.constexpr, H_BLOCK: tl.constexpr, SPLIT: tl.constexpr
):
    """Compute and write the gates of tokens."""
    _, b, a = parts
    a_log, dt_bias = gates
    q, _, _, g_out, beta_out = out
    head = tl.arange(0, H_BLOCK)  # [H_BLOCK]
    ok = ok_token[:, None] & (head < HEADS)[None, :]
    rate = tl.exp(tl.load(a_log + head, mask=head < HEADS, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=head < HEADS, other=0.0).to(tl.float32)
    kind = q.dtype.element_ty
    x = _add_up(a, at, head, ok, SPLIT).to(kind).to(tl.float32) + bias[None, :]
    # log(1 + e^x), of large x without its exponential; of small ones torch has more digits
    near = tl.exp(tl.minimum(x, 20.0))
    grown = 1 + near
    log = tl.where(grown == 1, near, tl.log(grown) * (near / tl.where(grown == 1, 1, grown - 1)))
    g = -rate[None, :] * tl.where(x > 20.0, x, log)
    share = _add_up(b, at, head, ok, SPLIT).to(kind).to(tl.float32)
    beta = (1 / (1 + tl.exp(-share))).to(kind).to(tl.float32)
    place = at.to(tl.int64)[:, None] * HEADS + head[None, :]
    tl.store(g_out + place, g, mask=ok)
    tl.store(beta_out + place, beta, mask=ok)


@triton.jit(do_not_specialize=["n"])
def convolve_nodes_kernel(
    parts,  # qkv [SPLIT, B n, C], b and a [SPLIT, B n, HEADS], each with two strides
    weight,  # [C, WIDTH]
    gates,  # a_log, dt_bias [HEADS]
    windows,  # [rows, C, WIDTH - 1]
    rows,  # [B] int64
    words,  # [B, n] int64
    inputs,  # [B n, C], out
    out,  # see `Tokens`
    n,
    C: tl.constexpr,
    Q_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    H_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request and block of channels, or for gates."""
    enter(PDL)
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    node = tl.arange(0, N_BLOCK)  # [N_BLOCK]
    first, live = request * n, node < n
    if block == tl.num_programs(1) - 1:
        _write_gates(parts, gates, out, first + node, live, HEADS, H_BLOCK, SPLIT)
    else:
        word = tl.load(words + first + node, mask=live, other=0)
        held = ((word[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
        above = held & (node[None, :] < node[:, None])
        parent = tl.max(tl.where(above, node[None, :], -1), 1)  # [N_BLOCK]
        column = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        row = tl.load(rows + request)
        window = windows + (row * C + column[None, :]) * (WIDTH - 1)
        source = node
        total = tl.zeros([N_BLOCK, BLOCK], tl.float32)
        for back in tl.static_range(WIDTH):
            # below 0 are the inputs before the root, the newest at -1
            in_tree = source >= 0
            ok = (live & in_tree)[:, None] & (column < C)[None, :]
            x = _add_up(parts[0], first + source, column, ok, SPLIT).to(inputs.dtype.element_ty)
            if back == 0:
                place = (first + node)[:, None] * C + column[None, :]
                tl.store(inputs + place, x, mask=ok)
            else:
                old = (live & (source < 0))[:, None] & (column < C)[None, :]
                x = tl.where(
                    old, tl.load(window + source[:, None] + WIDTH - 1, mask=old, other=0), x
                )
            tap = tl.load(weight + column * WIDTH + WIDTH - 1 - back, mask=column < C, other=0)
            total += x.to(tl.float32) * tap.to(tl.float32)[None, :]
            up = tl.gather(parent, tl.maximum(source, 0), 0)
            source = tl.where(in_tree, up, source - 1)
        ok = live[:, None] & (column < C)[None, :]
        _write_mixed(total, out, first + node, column, ok, Q_SIZE, V_SIZE)


@triton.jit(do_not_specialize=["pieces"])
def convolve_pieces_kernel(
    parts,  # qkv [SPLIT, T, C], b and a [SPLIT, T, HEADS], each with two strides
    weight,  # [C, WIDTH]
    gates,  # a_log, dt_bias [HEADS]
    windows,  # [rows, C, WIDTH - 1]
    rows,  # [pieces] int64
    qo_indptr,  # [pieces + 1] int32
    out,  # see `Tokens`
    pieces,
    C: tl.constexpr,
    Q_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    H_BLOCK: tl.constexpr,
    T_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per block of tokens and of channels, or for gates."""
    enter(PDL)
    token = tl.program_id(0) * T_BLOCK + tl.arange(0, T_BLOCK)  # [T_BLOCK]
    piece = tl.arange(0, P_BLOCK)  # [P_BLOCK]
    start = tl.load(qo_indptr + piece, mask=piece < pieces, other=0)
    stop = tl.load(qo_indptr + 1 + piece, mask=piece < pieces, other=0)
    own = (token[:, None] >= start[None, :]) & (token[:, None] < stop[None, :])
    live = tl.sum(own.to(tl.int32), 1) > 0
    if tl.program_id(1) == tl.num_programs(1) - 1:
        _write_gates(parts, gates, out, token, live, HEADS, H_BLOCK, SPLIT)
    else:
        row = tl.load(rows + piece, mask=piece < pieces, other=0)
        row = tl.sum(tl.where(own, row[None, :], 0), 1)  # [T_BLOCK]
        # tokens of the piece before this one
        before = token - tl.sum(tl.where(own, start[None, :], 0), 1)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        window = windows + (row[:, None] * C + column[None, :]) * (WIDTH - 1)
        total = tl.zeros([T_BLOCK, BLOCK], tl.float32)
        for back in tl.static_range(WIDTH):
            inside = before >= back
            ok = (live & inside)[:, None] & (column < C)[None, :]
            x = _add_up(parts[0], token - back, column, ok, SPLIT).to(windows.dtype.element_ty)
            if back > 0:
                old = (live & (before < back))[:, None] & (column < C)[None, :]
                at = before[:, None] - back + WIDTH - 1
                x = tl.where(old, tl.load(window + at, mask=old, other=0), x)
            tap = tl.load(weight + column * WIDTH + WIDTH - 1 - back, mask=column < C, other=0)
            total += x.to(tl.float32) * tap.to(tl.float32)[None, :]
        _write_mixed(
            total, out, token, column, live[:, None] & (column < C)[None, :], Q_SIZE, V_SIZE
        )


@triton.jit
def carry_windows_kernel(
    qkv,  # [SPLIT, T, C], with two strides
    windows,  # [rows, C, WIDTH - 1], in place
    rows,  # [pieces] int64
    qo_indptr,  # [pieces + 1] int32
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    W_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per piece and block of channels."""
    enter(PDL)
    piece = tl.program_id(0)
    row = tl.load(rows + piece)
    start, stop = tl.load(qo_indptr + piece), tl.load(qo_indptr + piece + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    place = tl.arange(0, W_BLOCK)  # [W_BLOCK]
    # which input of (window, piece) comes to a place; what is below 0 lies in the window
    source = place + (stop - start) - (WIDTH - 1)
    kept = (place < WIDTH - 1)[:, None] & (column < C)[None, :] & (row > 0)
    x = _add_up(qkv, start + source, column, kept & (source >= 0)[:, None], SPLIT)
    window = windows + (row * C + column[None, :]) * (WIDTH - 1)
    old = kept & (source < 0)[:, None]
    before = tl.load(window + source[:, None] + WIDTH - 1, mask=old, other=0)
    new = tl.where(old, before, x.to(windows.dtype.element_ty))
    # places are read before any is written
    tl.debug_barrier()
    tl.store(window + place[:, None], new, mask=kept)
