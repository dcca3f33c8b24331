"""Device code of attention whose sums depend on neither batch nor mode.

`deterministic` is the host side and says what is computed. Everything here keeps to one rule: a
row's result is a function of its own keys, in the order of their positions, and of nothing else.
A key it does not see has weight 0 and leaves its running maximum alone, so it changes no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.attention.triton_deterministic_plan import REQUEST_FIELDS, SPLIT_FIELDS
from specattn.kernels.attention.triton_tile import (
    EMPTY,
    FLOOR,
    LN2,
    LOG2E,
    as_factor,
    attend_tile,
    load_query,
)


@triton.jit
def _fold(values, top, weight, partial, log):
    """Add a partial to ``values / weight``, which have the scale ``top``.

    In fused operations spelled out, so that both kernels here round alike.
    """
    new_top = tl.maximum(top, log)
    fade = tl.exp2(top - new_top)
    gain = tl.exp2(log - new_top)
    values = tl.fma(partial, gain[:, None], values * fade[:, None])
    return values, new_top, tl.fma(weight, fade, gain)


@triton.jit
def _fold_sinks(values, top, weight, sinks):
    """Add the sinks, ``[ROWS]`` pointers, as a last partial without values.

    Last, because which partial is the first that a row shares depends on the others' windows.
    """
    log = tl.load(sinks).to(tl.float32) * LOG2E
    new_top = tl.maximum(top, log)
    fade = tl.exp2(top - new_top)
    # not of a difference: a compiler may leave its product unrounded, and the maximum is rounded
    gain = tl.where(log >= top, 1.0, tl.exp2(log - new_top))
    return values * fade[:, None], new_top, tl.fma(weight, fade, gain)


@triton.jit
def _store_result(
    out,  # [ROWS] pointers
    lse,  # [ROWS] pointers, or None
    values,
    top,
    weight,
    ok,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
):
    dv = tl.arange(0, V_PAD)  # [V_PAD]
    # rows without any key: their partials are all 0, and so is the result
    result = tl.div_rn(values, weight[:, None])
    tl.store(
        out[:, None] + dv[None, :],
        result.to(out.dtype.element_ty),
        mask=ok[:, None] & (dv < V_DIM)[None, :],
    )
    if lse is not None:
        value = tl.where(top > 0.5 * EMPTY, (top + tl.log2(weight)) * LN2, float("-inf"))
        tl.store(lse, value, mask=ok)


@triton.jit
def _shared_tiles(
    q,
    acc,
    top,
    total,
    begin,
    end,
    first_key,
    prefix_len,
    pos_q,
    index_row,
    k_head,
    v_head,
    base2,
    cap_in,
    cap_out,
    K_SLOT: tl.constexpr,
    V_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to full tiles of the prefix, visible but for windows."""
    r = tl.arange(0, BN)  # [BN]
    raw = tl.load(
        index_row + tl.minimum(tl.maximum(begin + r, first_key), prefix_len - 1),
        mask=begin < end,
        other=0,
    )
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        slots = raw
        raw = tl.load(index_row + tl.minimum(start + BN + r, prefix_len - 1))
        visible = None
        if WINDOW >= 0:
            visible = pos_q[:, None] - (start + r)[None, :] <= WINDOW
        elif HAS_CAP:
            # all are visible; a select keeps the compiler from fusing the cap's product into what
            # follows, as it cannot in `_own_tiles`
            visible = (start + r < end)[None, :]
        acc, top, total = attend_tile(
            q,
            acc,
            top,
            total,
            slots,
            visible,
            k_head,
            v_head,
            base2,
            cap_in,
            cap_out,
            K_SLOT,
            V_SLOT,
            HEAD_DIM,
            V_DIM,
            D_PAD,
            V_PAD,
            HAS_CAP,
        )
    return acc, top, total


@triton.jit
def _own_tiles(
    q,
    acc,
    top,
    total,
    paths,  # the path of the first token, from the first tile on
    tiles,
    tokens,
    token,  # [BM], of each row, counted from the first
    k_head,
    v_head,
    base2,
    cap_in,
    cap_out,
    K_SLOT: tl.constexpr,
    V_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to ``tiles`` tiles of each token's path, for its rows only."""
    r = tl.arange(0, BN)  # [BN]
    raw = tl.load(paths + r, mask=tiles > 0, other=0)
    turn = 0
    tile = 0
    for _ in tl.range(0, tiles * tokens, num_stages=STAGES):
        entry = raw
        visible = (token == turn)[:, None] & (entry >= 0)[None, :]
        tile += 1
        turn += (tile == tiles).to(tl.int32)
        tile = tl.where(tile == tiles, 0, tile)
        raw = tl.load(paths + tl.minimum(turn, tokens - 1) * WIDTH + tile * BN + r)
        # the complement where no key is visible
        slots = entry ^ (entry >> 31)
        acc, top, total = attend_tile(
            q,
            acc,
            top,
            total,
            slots,
            visible,
            k_head,
            v_head,
            base2,
            cap_in,
            cap_out,
            K_SLOT,
            V_SLOT,
            HEAD_DIM,
            V_DIM,
            D_PAD,
            V_PAD,
            HAS_CAP,
        )
    return acc, top, total


# strides of small tensors: no variants of the kernel for round ones
@triton.jit(do_not_specialize=["stride_pos"])
def deterministic_attention_kernel(
    q,  # [B * Q_LEN, Hq, HEAD_DIM]
    k_cache,  # [slots, NUM_KV, HEAD_DIM]
    v_cache,  # [slots, NUM_KV, V_DIM]
    out,  # [B * Q_LEN, Hq, V_DIM], out
    lse,  # [B * Q_LEN, Hq] float32, out, or None
    indices,  # flat int32: slot of each prefix position
    positions,  # [B, Q_LEN] int64, read under a window
    paths,  # [B * Q_LEN, WIDTH] int32
    path_lens,  # [B * Q_LEN] int32
    requests,  # [B, 6] int64
    splits,  # [SPLITS, 9] int64
    partial_out,  # [slots, NUM_KV, ROWS, V_DIM], out
    partial_lse,  # [slots, NUM_KV, ROWS] float32, out, base 2
    fold_out,  # [SPLITS, NUM_KV, ROWS, V_DIM] float32, out
    fold_scale,  # [SPLITS, NUM_KV, ROWS, 2] float32, out: top and weight
    sinks,  # [Hq] natural logits, or None
    base2,
    cap_in,
    cap_out,
    v_scale,  # of float8 values, else None
    stride_q,
    stride_q_head,
    stride_out,
    stride_out_head,
    stride_lse,
    stride_lse_head,
    stride_pos,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    Q_LEN: tl.constexpr,
    TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    CSR: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MT: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTIAL_TILES: tl.constexpr,
    EXTRA: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Walk a split's partials: one CTA per (split, M tile, KV head)."""
    ROWS: tl.constexpr = Q_LEN * GROUP
    pid = tl.program_id(0)
    head = pid % NUM_KV
    m_tile = pid // NUM_KV % MT
    split = pid // (NUM_KV * MT)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    packed = m_tile * BM + tl.arange(0, BM)  # [BM]
    token = packed // GROUP
    q_head = head * GROUP + packed % GROUP
    row_ok = packed < ROWS
    dv = tl.arange(0, V_PAD)  # [V_PAD]
    value_ok = row_ok[:, None] & (dv < V_DIM)[None, :]
    first_token = m_tile * BM // GROUP
    tokens = tl.minimum((m_tile * BM + BM - 1) // GROUP, Q_LEN - 1) - first_token + 1
    k_head = k_cache + head.to(tl.int64) * K_HEAD
    v_head = v_cache + head.to(tl.int64) * V_HEAD
    entry = splits + split * SPLIT_FIELDS
    left = tl.load(entry).to(tl.int32)
    tile = tl.load(entry + 1).to(tl.int32)
    req = tl.load(entry + 2).to(tl.int32)
    entry += 3
    while left > 0:
        base = tl.load(entry)
        prefix_len = tl.load(entry + 1).to(tl.int32)
        first_tile = tl.load(entry + 2).to(tl.int32)
        partials = tl.load(entry + 3).to(tl.int32)
        head_partials = tl.load(entry + 4).to(tl.int32)
        slot = tl.load(entry + 5)
        # the partial: tiles low to high, counted from position 0
        low = first_tile + tile
        nth = low // PARTIAL_TILES - first_tile // PARTIAL_TILES
        stop = first_tile + tl.maximum((prefix_len + TAIL + BN - 1) // BN - first_tile, 1)
        high = tl.minimum((low // PARTIAL_TILES + 1) * PARTIAL_TILES, stop)

        q_row = (req * Q_LEN + token).to(tl.int64)  # [BM]
        q_rows = q + q_row * stride_q + q_head * stride_q_head
        q_tile = as_factor(load_query(q_rows, row_ok, HEAD_DIM, D_PAD), k_cache)
        begin = low * BN
        first_key = 0
        pos_q = None
        if WINDOW >= 0:
            if CSR:
                pos_q = prefix_len - 1 + packed * 0
            else:
                # rows past the last repeat it
                pos_row = positions + req.to(tl.int64) * stride_pos
                pos_q = tl.load(pos_row + tl.minimum(token, Q_LEN - 1)).to(tl.int32)
            # keys left of every window may lie in recycled slots
            first_key = tl.maximum(tl.min(pos_q, 0) - WINDOW, 0)
            begin = tl.maximum(begin, first_key // BN * BN)
        own_tile = prefix_len // BN
        top = tl.full([BM], FLOOR, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, V_PAD], tl.float32)
        acc, top, total = _shared_tiles(
            q_tile,
            acc,
            top,
            total,
            begin,
            tl.minimum(high, own_tile) * BN,
            first_key,
            prefix_len,
            pos_q,
            indices + base,
            k_head,
            v_head,
            base2,
            cap_in,
            cap_out,
            K_SLOT,
            V_SLOT,
            HEAD_DIM,
            V_DIM,
            D_PAD,
            V_PAD,
            HAS_CAP,
            WINDOW,
            BN,
            STAGES,
        )
        near = tl.arange(0, TOKENS)  # [TOKENS]
        query = req.to(tl.int64) * Q_LEN + first_token
        longest = tl.max(tl.load(path_lens + query + near, mask=near < tokens, other=0), 0)
        own_low = tl.maximum(low, own_tile)
        own_high = tl.minimum(high, own_tile + (longest + BN - 1) // BN)
        acc, top, total = _own_tiles(
            q_tile,
            acc,
            top,
            total,
            paths + query * WIDTH + (own_low - own_tile) * BN,
            tl.maximum(own_high - own_low, 0),
            tokens,
            token - first_token,
            k_head,
            v_head,
            base2,
            cap_in,
            cap_out,
            K_SLOT,
            V_SLOT,
            HEAD_DIM,
            V_DIM,
            D_PAD,
            V_PAD,
            HAS_CAP,
            WIDTH,
            BN,
            STAGES,
        )
        seen = total > 0.0
        some = tl.where(seen, total, 1.0)
        log = (top if HAS_CAP else top * base2) + tl.log2(some)
        log = tl.where(seen, log, EMPTY)
        inverse = 1.0 / some
        if v_scale is not None:
            inverse *= v_scale
        partial = tl.where(seen[:, None], acc * inverse[:, None], 0.0)
        # rounded as the partial results are that another CTA reads
        partial = partial.to(partial_out.dtype.element_ty)
        if nth >= head_partials:
            at = ((slot + nth - head_partials) * NUM_KV + head) * ROWS + packed
            tl.store(partial_out + at[:, None] * V_DIM + dv[None, :], partial, mask=value_ok)
            tl.store(partial_lse + at, log, mask=row_ok)
        else:
            at = (split.to(tl.int64) * NUM_KV + head) * ROWS + packed
            fold_at = fold_out + at[:, None] * V_DIM + dv[None, :]
            values = partial.to(tl.float32)
            weight = tl.full([BM], 1.0, tl.float32)
            if nth > 0:
                # other threads of this CTA have stored it, and will store it anew
                tl.debug_barrier()
                before = tl.load(fold_at, mask=value_ok, other=0.0)
                before_top = tl.load(fold_scale + at * 2, mask=row_ok, other=0.0)
                before_weight = tl.load(fold_scale + at * 2 + 1, mask=row_ok, other=1.0)
                tl.debug_barrier()
                values, log, weight = _fold(before, before_top, before_weight, values, log)
            if nth + 1 == partials:
                if sinks is not None:
                    values, log, weight = _fold_sinks(values, log, weight, sinks + q_head)
                lse_at = None
                if lse is not None:
                    lse_at = lse + q_row * stride_lse + q_head * stride_lse_head
                _store_result(
                    out + q_row * stride_out + q_head * stride_out_head,
                    lse_at,
                    values,
                    log,
                    weight,
                    row_ok,
                    V_DIM,
                    V_PAD,
                )
            else:
                tl.store(fold_at, values, mask=value_ok)
                tl.store(fold_scale + at * 2, log, mask=row_ok)
                tl.store(fold_scale + at * 2 + 1, weight, mask=row_ok)
        left -= high - low
        tile += high - low
        if high == stop:
            left -= EXTRA
            req += 1
            tile = 0
        entry = requests + req * REQUEST_FIELDS


@triton.jit
def deterministic_merge_kernel(
    merges,  # [1 + SPLITS, 4] int32
    partial_out,  # [slots, NUM_KV, ROWS, V_DIM]
    partial_lse,  # [slots, NUM_KV, ROWS] float32, base 2
    fold_out,  # [SPLITS, NUM_KV, ROWS, V_DIM] float32
    fold_scale,  # [SPLITS, NUM_KV, ROWS, 2] float32
    out,  # [B * Q_LEN, Hq, V_DIM], out
    lse,  # [B * Q_LEN, Hq] float32, out, or None
    sinks,  # [Hq] natural logits, or None
    stride_out,
    stride_out_head,
    stride_lse,
    stride_lse_head,
    Q_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fold ``BLOCK`` rows' kept partials into what their first split left."""
    ROWS: tl.constexpr = Q_LEN * GROUP
    head = tl.program_id(0)
    nth = tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if nth < tl.load(merges):
        entry = merges + (nth + 1) * 4
        req = tl.load(entry)
        split = tl.load(entry + 1).to(tl.int64)
        slot = tl.load(entry + 2).to(tl.int64)
        kept = tl.load(entry + 3)
        dv = tl.arange(0, V_PAD)  # [V_PAD]
        packed = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        ok = packed < ROWS
        row = tl.minimum(packed, ROWS - 1)
        value_ok = ok[:, None] & (dv < V_DIM)[None, :]
        at = (split * NUM_KV + head) * ROWS + row
        values = tl.load(fold_out + at[:, None] * V_DIM + dv[None, :], mask=value_ok, other=0.0)
        top = tl.load(fold_scale + at * 2)
        weight = tl.load(fold_scale + at * 2 + 1)
        for p0 in tl.range(0, kept, PARTIALS):
            logs = ()
            partials = ()
            # all loads first; absent partials repeat the last one, and weigh nothing
            for p in tl.static_range(PARTIALS):
                at = ((slot + tl.minimum(p0 + p, kept - 1)) * NUM_KV + head) * ROWS + row
                log = tl.load(partial_lse + at, cache_modifier=".cg")
                ptr = partial_out + at[:, None] * V_DIM + dv[None, :]
                if V_PAD == V_DIM:
                    partial = tl.load(ptr, cache_modifier=".cg")
                else:
                    partial = tl.load(ptr, mask=value_ok, other=0.0, cache_modifier=".cg")
                # Triton knows tuple addition, not unpacking; mypy knows empty tuples by length
                logs = logs + (log,)  # type: ignore[assignment]  # noqa: RUF005
                partials = partials + (partial,)  # type: ignore[assignment]  # noqa: RUF005
            for p in tl.static_range(PARTIALS):
                log = tl.where(p0 + p < kept, logs[p], EMPTY)
                values, top, weight = _fold(values, top, weight, partials[p].to(tl.float32), log)

        q_row = (req * Q_LEN + packed // GROUP).to(tl.int64)
        q_head = head * GROUP + packed % GROUP
        if sinks is not None:
            values, top, weight = _fold_sinks(values, top, weight, sinks + q_head)
        lse_at = None
        if lse is not None:
            lse_at = lse + q_row * stride_lse + q_head * stride_lse_head
        _store_result(
            out + q_row * stride_out + q_head * stride_out_head,
            lse_at,
            values,
            top,
            weight,
            ok,
            V_DIM,
            V_PAD,
        )
