"""Combine the parts of requests whose keys were cut between chunks of work."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.attention_tile import EMPTY, LN2

# elements of a tile: two loads of 16 bytes per thread
TILE = tl.constexpr(2048)


@triton.jit
def _weigh(
    part_lse,  # [LANES], part 0 of every row
    part_out,  # [LANES, SPAN]
    top, total, acc, first, parts, lane, column_ok, stride_part,
    V_DIM: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr,
    TILES: tl.constexpr, ALL: tl.constexpr,
):
    """Add ``TILES`` tiles of parts, from part ``first`` on; with ``ALL``, none is absent."""
    logs = ()
    outs = ()
    # all loads first; absent parts repeat the last one and get weight 0, since predicated loads
    # would be sunk behind the arithmetic
    for t in tl.static_range(TILES):
        part = first + t * SIDE + lane // ROWS
        if not ALL:
            part = tl.minimum(part, parts - 1)
        log = tl.load(part_lse + part * stride_part, cache_modifier=".cg")
        ptr = part_out + (part * stride_part).to(tl.int64)[:, None] * V_DIM
        if WHOLE:
            out_tile = tl.load(ptr, cache_modifier=".cg")
        else:
            out_tile = tl.load(ptr, mask=column_ok, other=0.0, cache_modifier=".cg")
        # Triton knows tuple addition, not unpacking; mypy knows empty tuples by length
        logs = logs + (log,)  # type: ignore[assignment]  # noqa: RUF005
        outs = outs + (out_tile,)  # type: ignore[assignment]  # noqa: RUF005
    new_top = top
    for t in tl.static_range(TILES):
        new_top = tl.maximum(new_top, logs[t])
    fade = tl.exp2(top - new_top)
    total = total * fade
    acc = acc * fade[:, None]
    for t in tl.static_range(TILES):
        weight = tl.exp2(logs[t] - new_top)
        if not ALL:
            weight = tl.where(first + t * SIDE + lane // ROWS < parts, weight, 0.0)
        total += weight
        acc += outs[t].to(tl.float32) * weight[:, None]
    return new_top, total, acc


@triton.jit
def merge_kernel(
    splits,       # [1 + NC, 4] int32
    partial_out,  # [slots, NUM_KV, MT, BM, V_DIM]
    partial_lse,  # [slots, NUM_KV, MT, BM] float32, base 2
    out,          # [B * Q_LEN, Hq, V_DIM], out
    lse,          # [B * Q_LEN, Hq] float32, out, or None
    stride_out, stride_out_head, stride_lse, stride_lse_head,
    Q_LEN: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, V_DIM: tl.constexpr,
    V_PAD: tl.constexpr, BM: tl.constexpr, MT: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, MANY: tl.constexpr, PDL: tl.constexpr,
):
    """Weigh the parts of ``ROWS`` rows by their log-sum-exp, ``SPAN`` of the columns.

    ``PARTS`` are taken at a time, or some more; ``MANY`` as long as there are as many, unless it
    is 0. A tile holds ``SIDE`` parts one below the other, each with sums of its own until the
    end: few tiles compile fast, and wide loads fill them.
    """
    SIDE: tl.constexpr = TILE // (ROWS * SPAN) if ROWS * SPAN < TILE else 1
    TILES: tl.constexpr = (PARTS + SIDE - 1) // SIDE
    MORE: tl.constexpr = (MANY + SIDE - 1) // SIDE
    WHOLE: tl.constexpr = V_DIM % SPAN == 0
    SPANS: tl.constexpr = V_PAD // SPAN
    head = tl.program_id(0) // SPANS
    first_column = tl.program_id(0) % SPANS * SPAN
    first_row = tl.program_id(1) * ROWS
    nth = tl.program_id(2)
    # the plan was there before the attention kernel, which has waited for it, let this one start;
    # an entry past the last is read with the count, not after it, and dropped
    count = tl.load(splits)
    req = tl.load(splits + (nth + 1) * 4)
    slot = tl.load(splits + (nth + 1) * 4 + 1)
    parts = tl.load(splits + (nth + 1) * 4 + 2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if nth < count:
        dv = first_column + tl.arange(0, SPAN)                            # [SPAN]
        column_ok = (dv < V_DIM)[None, :]
        lane = tl.arange(0, SIDE * ROWS)                                  # [SIDE * ROWS]
        # ROWS divides BM: the rows of this program lie in one M tile
        row = tl.minimum(first_row + lane % ROWS, Q_LEN * GROUP - 1) % BM
        row += ((slot * NUM_KV + head) * MT + first_row // BM) * BM
        part_lse = partial_lse + row
        part_out = partial_out + row.to(tl.int64)[:, None] * V_DIM + dv[None, :]

        top = tl.full([SIDE * ROWS], EMPTY, tl.float32)
        total = tl.zeros([SIDE * ROWS], tl.float32)
        acc = tl.zeros([SIDE * ROWS, SPAN], tl.float32)
        begin = 0
        if MANY > 0:
            begin = parts // (SIDE * MORE) * (SIDE * MORE)
            for p0 in tl.range(0, begin, SIDE * MORE):
                top, total, acc = _weigh(
                    part_lse, part_out, top, total, acc, p0, parts, lane, column_ok,
                    NUM_KV * MT * BM, V_DIM, WHOLE, ROWS, SIDE, MORE, True,
                )
        for p0 in tl.range(begin, parts, SIDE * TILES):
            top, total, acc = _weigh(
                part_lse, part_out, top, total, acc, p0, parts, lane, column_ok,
                NUM_KV * MT * BM, V_DIM, WHOLE, ROWS, SIDE, TILES, False,
            )
        if SIDE > 1:
            tops = tl.reshape(top, [SIDE, ROWS])
            top = tl.max(tops, 0)
            share = tl.exp2(tops - top[None, :])                          # [SIDE, ROWS]
            total = tl.sum(tl.reshape(total, [SIDE, ROWS]) * share, 0)
            acc = acc * tl.reshape(share, [SIDE * ROWS])[:, None]
            acc = tl.sum(tl.reshape(acc, [SIDE, ROWS, SPAN]), 0)

        packed = first_row + tl.arange(0, ROWS)                           # [ROWS]
        ok = packed < Q_LEN * GROUP
        q_row = (req * Q_LEN + packed // GROUP).to(tl.int64)
        q_head = head * GROUP + packed % GROUP
        ptr = out + (q_row * stride_out + q_head * stride_out_head)[:, None] + dv[None, :]
        # rows without any key: their parts are all 0, and so is the result
        tl.store(ptr, (acc / total[:, None]).to(out.dtype.element_ty), mask=ok[:, None] & column_ok)
        if lse is not None:
            value = tl.where(top > 0.5 * EMPTY, (top + tl.log2(total)) * LN2, float("-inf"))
            ptr = lse + q_row * stride_lse + q_head * stride_lse_head
            tl.store(ptr, value, mask=ok & (first_column == 0))
