"""Device code that merges a request's partial results, or two kernels' results."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.attention.softmax import EMPTY, LN2, LOG2E
from specattn.kernels.fused.triton_fp8 import store_heads


@triton.jit
def _weigh(
    first_lse,  # [ROWS], partial 0 of every row
    first_out,  # [ROWS, SPAN]
    top,
    total,
    acc,
    first,
    partials,
    column_ok,
    stride_partial,
    V_DIM: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTIALS: tl.constexpr,
    ALL: tl.constexpr,
    IN_ORDER: tl.constexpr,
    OF_ROWS: tl.constexpr = False,
):
    """Add ``PARTIALS`` partials, from partial ``first`` on; with ``ALL``, none is absent.

    ``OF_ROWS``: ``partials [ROWS]`` is a number for each row.

    ``IN_ORDER`` adds one after the other, so that the sum does not depend on where in a row they
    begin. Its fused operations are spelled out: every variant of the kernel rounds alike.
    """
    logs = ()
    outs = ()
    # all loads first; absent partials repeat the last one and get weight 0, since predicated loads
    # would be sunk behind the arithmetic
    for p in tl.static_range(PARTIALS):
        partial = first + p
        if not ALL:
            partial = tl.minimum(partial, partials - 1)
        at = partial.to(tl.int64) * stride_partial
        log = tl.load(first_lse + at, cache_modifier=".cg")
        at = at * V_DIM
        if OF_ROWS:
            at = at[:, None]
        if WHOLE:
            values = tl.load(first_out + at, cache_modifier=".cg")
        else:
            values = tl.load(first_out + at, mask=column_ok, other=0.0, cache_modifier=".cg")
        # Triton knows tuple addition, not unpacking; mypy knows empty tuples by length
        logs = logs + (log,)  # type: ignore[assignment]  # noqa: RUF005
        outs = outs + (values,)  # type: ignore[assignment]  # noqa: RUF005
    new_top = top
    if IN_ORDER:
        for p in tl.static_range(PARTIALS):
            log = tl.where(first + p < partials, logs[p], EMPTY)
            new_top = tl.maximum(top, log)
            fade = tl.exp2(top - new_top)
            weight = tl.exp2(log - new_top)
            total = tl.fma(total, fade, weight)
            top = new_top
            acc = tl.fma(outs[p].to(tl.float32), weight[:, None], acc * fade[:, None])
        return top, total, acc
    for p in tl.static_range(PARTIALS):
        new_top = tl.maximum(new_top, logs[p])
    fade = tl.exp2(top - new_top)
    total = total * fade
    acc = acc * fade[:, None]
    for p in tl.static_range(PARTIALS):
        weight = tl.exp2(logs[p] - new_top)
        if not ALL:
            weight = tl.where(first + p < partials, weight, 0.0)
        total += weight
        acc += outs[p].to(tl.float32) * weight[:, None]
    return new_top, total, acc


@triton.jit
def _place(req, head, packed, Q_LEN: tl.constexpr, GROUP: tl.constexpr):
    """Return rows and heads of a request's packed rows."""
    return (req * Q_LEN + packed // GROUP).to(tl.int64), head * GROUP + packed % GROUP


@triton.jit(do_not_specialize=["own_rows"])
def merge_kernel(
    merges,  # [1 + SPLITS, 4] int32
    partial_out,  # [slots, NUM_KV, MT, BM, V_DIM]
    partial_lse,  # [slots, NUM_KV, MT, BM] float32, base 2
    out,  # [B * Q_LEN, Hq, V_DIM], out
    lse,  # [B * Q_LEN, Hq] float32, out, or None
    sinks,  # [Hq] natural logits that are in no partial, or None
    stride_out,
    stride_out_head,
    stride_lse,
    stride_lse_head,
    Q_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    BM: tl.constexpr,
    MT: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    PARTIALS: tl.constexpr,
    MANY: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
    # of shared prefixes
    shares=None,  # [ENTRIES, 2] int32
    own_rows=None,
    TILE_ROWS: tl.constexpr = 1,
    # of heads that are quantised, cut or not: results are there already of those that are not
    requests=None,  # [B, 8] int64
    scaled=None,  # values [TERMS, P, Hq * V_DIM], out; scales [Hq, TERMS, P] float32, out; P
    TERMS: tl.constexpr = 1,
):
    """Weigh the partials of ``ROWS`` rows and ``SPAN`` columns by their log-sum-exp.

    ``PARTIALS`` are taken at a time; ``MANY`` as long as there are as many, unless it is 0. Those
    of a group's entries, behind the ``own_rows`` of requests, follow the request's own.
    """
    WHOLE: tl.constexpr = V_DIM % SPAN == 0
    SPANS: tl.constexpr = V_PAD // SPAN
    head = tl.program_id(0) // SPANS
    first_column = tl.program_id(0) % SPANS * SPAN
    first_row = tl.program_id(1) * ROWS
    nth = tl.program_id(2)
    # the plan was there before the attention kernel, which has waited for it, let this one start;
    # an entry past the last is read with the count, not after it, and dropped
    if requests is not None:
        req = nth
        partials = tl.load(requests + nth * 8 + 3).to(tl.int32)
        rank = tl.load(requests + nth * 8 + 4).to(tl.int32)
        live = partials > 1
        slot = tl.load(merges + (rank + 1) * 4 + 1, mask=live, other=0)
    else:
        count = tl.load(merges)
        req = tl.load(merges + (nth + 1) * 4)
        slot = tl.load(merges + (nth + 1) * 4 + 1)
        partials = tl.load(merges + (nth + 1) * 4 + 2)
        live = nth < count
    if shares is not None:
        place = tl.load(merges + (nth + 1) * 4 + 3)
    if PDL:
        # whoever comes next waits for this kernel's end; until then it may fetch what is its own
        gdc_launch_dependents()
        gdc_wait()
    if IN_ORDER and sinks is None:
        # a sole result is there already
        live = live & (partials > 1)
    if live:
        dv = first_column + tl.arange(0, SPAN)  # [SPAN]
        column_ok = (dv < V_DIM)[None, :]
        packed = first_row + tl.arange(0, ROWS)  # [ROWS]
        # ROWS divides BM: the rows of this program lie in one M tile
        row = tl.minimum(packed, Q_LEN * GROUP - 1) % BM
        row = row.to(tl.int64) + ((slot * NUM_KV + head) * MT + first_row // BM).to(tl.int64) * BM
        first_lse = partial_lse + row
        first_out = partial_out + row[:, None] * V_DIM + dv[None, :]

        top = tl.full([ROWS], EMPTY, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, SPAN], tl.float32)
        begin = partials // MANY * MANY if MANY > 0 else 0
        # the first parts many at once, as long as there are as many; then the rest
        for part in tl.static_range(0 if MANY > 0 else 1, 2):
            for p0 in tl.range(
                begin if part else 0, partials if part else begin, PARTIALS if part else MANY
            ):
                top, total, acc = _weigh(
                    first_lse,
                    first_out,
                    top,
                    total,
                    acc,
                    p0,
                    partials,
                    column_ok,
                    NUM_KV * MT * BM,
                    V_DIM,
                    WHOLE,
                    PARTIALS if part else MANY,
                    part == 0,
                    IN_ORDER,
                )

        if shares is not None:
            # a request's rows may lie in two entries
            among = place - 1 + tl.minimum(packed, Q_LEN * GROUP - 1)  # [ROWS]
            share = shares + among // TILE_ROWS * 2
            slot_of = tl.load(share, mask=place > 0, other=0)
            counts = tl.load(share + 1, mask=place > 0, other=0)
            row = (slot_of * NUM_KV + head).to(tl.int64) * TILE_ROWS + own_rows + among % TILE_ROWS
            for p0 in tl.range(0, tl.max(counts, 0), PARTIALS):
                top, total, acc = _weigh(
                    partial_lse + row,
                    partial_out + row[:, None] * V_DIM + dv[None, :],
                    top,
                    total,
                    acc,
                    p0,
                    counts,
                    column_ok,
                    NUM_KV * TILE_ROWS,
                    V_DIM,
                    WHOLE,
                    PARTIALS,
                    False,
                    False,
                    True,
                )

        ok = packed < Q_LEN * GROUP
        q_row, q_head = _place(req, head, packed, Q_LEN, GROUP)
        if sinks is not None:
            # last: which partial is a row's first depends on the windows of its neighbours
            log = tl.load(sinks + q_head).to(tl.float32) * LOG2E
            new_top = tl.maximum(top, log)
            fade = tl.exp2(top - new_top)
            # not of a difference: a compiler may leave its product unrounded, and the maximum is
            # rounded
            weight = tl.where(log >= top, 1.0, tl.exp2(log - new_top))
            total = tl.fma(total, fade, weight)
            acc = acc * fade[:, None]
            top = new_top
        # rows without any key: their partials are all 0, and so is the result
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        if requests is not None:
            # quantised is what a product of plain weights would read
            x = result.to(tl.float32)
            store_heads(x, scaled, q_row, q_head, ok, NUM_KV * GROUP * V_DIM, V_DIM, TERMS)
        else:
            ptr = out + (q_row * stride_out + q_head * stride_out_head)[:, None] + dv[None, :]
            tl.store(ptr, result, mask=ok[:, None] & column_ok)
        if lse is not None:
            # a sum that is no number says so, whatever the maximum left out
            seen = (top > 0.5 * EMPTY) | (total != total)
            value = tl.where(seen, (top + tl.log2(total)) * LN2, float("-inf"))
            ptr = lse + q_row * stride_lse + q_head * stride_lse_head
            tl.store(ptr, value, mask=ok & (first_column == 0))
    elif requests is not None:
        packed = first_row + tl.arange(0, ROWS)  # [ROWS]
        ok = packed < Q_LEN * GROUP
        q_row, q_head = _place(req, head, packed, Q_LEN, GROUP)
        ptr = out + (q_row * stride_out + q_head * stride_out_head)[:, None]
        x = tl.load(ptr + tl.arange(0, SPAN)[None, :], mask=ok[:, None], other=0.0).to(tl.float32)
        store_heads(x, scaled, q_row, q_head, ok, NUM_KV * GROUP * V_DIM, V_DIM, TERMS)


@triton.jit
def merge_lse_kernel(
    prefix_out,  # [B, T, H, D]
    prefix_lse,  # [B, T, H] float32
    prefix_keys,  # [B] int32
    tail_out,  # [B, T, H, D]
    tail_lse,  # [B, T, H] float32
    tail_keys,  # [B, T] int32
    out,  # [B, T, H, D], out; may be prefix_out
    lse,  # [B, T, H] float32, out, or None
    q_len,
    heads,
    head_dim,
    prefix_b,
    prefix_t,
    prefix_h,
    tail_b,
    tail_t,
    tail_h,
    out_b,
    out_t,
    out_h,
    prefix_lse_b,
    prefix_lse_t,
    prefix_lse_h,
    tail_lse_b,
    tail_lse_t,
    tail_lse_h,
    lse_b,
    lse_t,
    lse_h,
    UNIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weigh two results over disjoint keys: ``BLOCK_H`` heads of a token."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // q_len, row % q_len
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    ok = h < heads
    # what a kernel writes for a row without keys is not relied upon
    in_prefix = ok & (tl.load(prefix_keys + b) > 0)
    in_tail = ok & (tl.load(tail_keys + row) > 0)

    empty = float("-inf")
    at = b * prefix_lse_b + t * prefix_lse_t + h * prefix_lse_h
    log_p = tl.load(prefix_lse + at, mask=in_prefix, other=empty) * UNIT
    at = b * tail_lse_b + t * tail_lse_t + h * tail_lse_h
    log_t = tl.load(tail_lse + at, mask=in_tail, other=empty) * UNIT
    top = tl.maximum(log_p, log_t)
    base = tl.where(top == empty, 0.0, top)
    weight_p, weight_t = tl.exp(log_p - base), tl.exp(log_t - base)
    total = weight_p + weight_t
    share = 1 / tl.where(total > 0, total, 1.0)

    column = (d < head_dim)[None, :]
    at = (b * prefix_b + t * prefix_t + h * prefix_h)[:, None] + d[None, :]
    acc = tl.load(prefix_out + at, mask=in_prefix[:, None] & column, other=0).to(tl.float32)
    acc *= (weight_p * share)[:, None]
    at = (b * tail_b + t * tail_t + h * tail_h)[:, None] + d[None, :]
    partial = tl.load(tail_out + at, mask=in_tail[:, None] & column, other=0).to(tl.float32)
    acc += partial * (weight_t * share)[:, None]
    at = (b * out_b + t * out_t + h * out_h)[:, None] + d[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=ok[:, None] & column)
    if lse is not None:
        value = tl.where(total != 0, base + tl.log(tl.where(total != 0, total, 1.0)), empty)
        tl.store(lse + b * lse_b + t * lse_t + h * lse_h, value, mask=ok)
