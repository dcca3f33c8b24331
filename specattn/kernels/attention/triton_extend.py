"""Prompt attention: ragged new tokens, causally, over a cached prefix."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.attention.triton_tile import (
    FLOOR,
    LN2,
    as_factor,
    attend_tile,
    load_query,
    start_from_sinks,
    store_rows,
)


@triton.jit
def load_slots(table_row, pos, last):
    """Load raw slots of positions, clamped to the last key, unmasked."""
    return tl.load(table_row + tl.minimum(pos, last))


@triton.jit
def _extend_tiles(
    q,
    acc,
    top,
    total,
    pos_q,  # [BM] int32
    begin,
    end,  # first key of the first tile; end of the keys
    raw,  # [BN] int32, slots of the first tile
    first_key,
    last,
    table_row,
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
    MASK: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
):
    """Attend to the tiles of ``[begin, end)``, masked by position if ``MASK``."""
    r = tl.arange(0, BN)  # [BN]
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        slots = raw
        raw = load_slots(table_row, tl.maximum(start + BN + r, first_key), last)
        visible = None
        if MASK:
            distance = pos_q[:, None] - (start + r)[None, :]  # [BM, BN]
            visible = distance >= 0
            if WINDOW >= 0:
                visible = visible & (distance <= WINDOW)
        elif DETERMINISTIC and HAS_CAP:
            # all are visible; see `tree_attention_kernel`
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
def extend_kernel(
    q,  # [T, Hq, HEAD_DIM]
    k_cache,  # [slots, Hkv, HEAD_DIM]
    v_cache,  # [slots, Hkv, V_DIM]
    out,  # [T, Hq, V_DIM], out
    lse,  # [T, Hq] float32, out, or None
    qo_indptr,  # [B + 1] int32
    seq_lens,  # [B] int32
    req_pool_indices,  # [B] int64
    req_to_token,  # [rows, C] int32
    sinks,  # [Hq] natural logits, or None
    base2,
    cap_in,
    cap_out,
    v_scale,  # of float8 values, else None
    stride_table,
    stride_q,
    stride_q_head,
    stride_out,
    stride_out_head,
    stride_lse,
    stride_lse_head,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
):
    """Attend packed (token, head) rows: one CTA per (tile, KV head, request)."""
    req = tl.program_id(2)
    head = tl.program_id(1)
    q_begin = tl.load(qo_indptr + req)
    q_len = tl.load(qo_indptr + req + 1) - q_begin
    # the last tiles have most keys: start them first
    m_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if m_tile * BM < q_len * GROUP:
        prefix = tl.load(seq_lens + req)
        packed = m_tile * BM + tl.arange(0, BM)  # [BM]
        token = packed // GROUP
        row_ok = packed < q_len * GROUP
        q_row = (q_begin + token).to(tl.int64)
        q_head = head * GROUP + packed % GROUP
        q_rows = q + q_row * stride_q + q_head * stride_q_head
        q_tile = as_factor(load_query(q_rows, row_ok, HEAD_DIM, D_PAD), k_cache)
        pos_q = prefix + tl.minimum(token, q_len - 1)
        first_pos = prefix + m_tile * BM // GROUP
        last_pos = prefix + tl.minimum((m_tile * BM + BM - 1) // GROUP, q_len - 1)
        k_head = k_cache + head.to(tl.int64) * K_HEAD
        v_head = v_cache + head.to(tl.int64) * V_HEAD
        table_row = req_to_token + tl.load(req_pool_indices + req).to(tl.int64) * stride_table
        r = tl.arange(0, BN)  # [BN]

        # tiles that every row sees whole need no mask
        first_key = 0
        begin = 0
        full_begin = 0
        full_end = (first_pos + 1) // BN * BN
        if WINDOW >= 0:
            first_key = tl.maximum(first_pos - WINDOW, 0)
            begin = first_key // BN * BN
            full_begin = (tl.maximum(last_pos - WINDOW, 0) + BN - 1) // BN * BN
            full_end = tl.maximum(full_end, begin)
            full_begin = tl.minimum(full_begin, full_end)
        raw_full = load_slots(table_row, full_begin + r, last_pos)
        raw_last = load_slots(table_row, tl.maximum(full_end + r, first_key), last_pos)
        top = tl.full([BM], FLOOR, tl.float32)
        total = tl.zeros([BM], tl.float32)
        if sinks is not None:
            top, total = start_from_sinks(sinks + q_head, True, base2, HAS_CAP)
        acc = tl.zeros([BM, V_PAD], tl.float32)
        if WINDOW >= 0:
            raw = load_slots(table_row, tl.maximum(begin + r, first_key), last_pos)
            acc, top, total = _extend_tiles(
                q_tile,
                acc,
                top,
                total,
                pos_q,
                begin,
                full_begin,
                raw,
                first_key,
                last_pos,
                table_row,
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
                True,
                BN,
                STAGES,
                DETERMINISTIC,
            )
        acc, top, total = _extend_tiles(
            q_tile,
            acc,
            top,
            total,
            pos_q,
            full_begin,
            full_end,
            raw_full,
            0,
            last_pos,
            table_row,
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
            False,
            BN,
            STAGES,
            DETERMINISTIC,
        )
        acc, top, total = _extend_tiles(
            q_tile,
            acc,
            top,
            total,
            pos_q,
            full_end,
            last_pos + 1,
            raw_last,
            first_key,
            last_pos,
            table_row,
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
            True,
            BN,
            STAGES,
            DETERMINISTIC,
        )
        out_rows = out + q_row * stride_out + q_head * stride_out_head
        store_rows(out_rows, acc, total, row_ok, V_DIM, V_PAD, v_scale)
        if lse is not None:
            if not HAS_CAP:
                top = top * base2
            # every row sees itself: total > 0
            natural = (top + tl.log2(total)) * LN2
            tl.store(lse + q_row * stride_lse + q_head * stride_lse_head, natural, mask=row_ok)
