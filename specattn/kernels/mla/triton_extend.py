"""Latent prompt attention: ragged new tokens, causally, over a cached prefix."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.attention.softmax import FLOOR, LN2, store_rows
from specattn.kernels.mla.triton_tile import attend_latent_tile, load_latent_query


@triton.jit
def _load_slots(table_row, pos, last):
    """Load raw slots of positions, clamped to the last key, unmasked."""
    return tl.load(table_row + tl.minimum(pos, last))


@triton.jit
def _tiles(
    query,  # of `load_latent_query`
    acc,
    top,
    total,
    pos_q,  # [BM] int32
    begin,
    end,  # first key of the first tile; end of the keys
    raw,  # [BN] int32, slots of the first tile
    last,
    table_row,
    cache,
    base2,
    SLOT: tl.constexpr,
    WIDTHS: tl.constexpr,  # see `latent_widths`
    MASK: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to the tiles of ``[begin, end)``, masked by position if ``MASK``."""
    r = tl.arange(0, BN)  # [BN]
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        slots = raw
        raw = _load_slots(table_row, start + BN + r, last)
        visible = None
        if MASK:
            visible = pos_q[:, None] >= (start + r)[None, :]  # [BM, BN]
        acc, top, total = attend_latent_tile(
            query, acc, top, total, slots, visible, cache, base2, SLOT, WIDTHS
        )
    return acc, top, total


@triton.jit
def mla_extend_kernel(
    q,  # [T, HEADS, RANK + ROPE]
    cache,  # [slots, RANK + ROPE]
    out,  # [T, HEADS, RANK], out
    lse,  # [T, HEADS] float32, out, or None
    qo_indptr,  # [B + 1] int32
    seq_lens,  # [B] int32
    req_pool_indices,  # [B] int64
    req_to_token,  # [rows, C] int32
    base2,
    stride_table,
    stride_q,
    stride_q_head,
    stride_out,
    stride_out_head,
    stride_lse,
    stride_lse_head,
    SLOT: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTHS: tl.constexpr,  # see `latent_widths`
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend packed (token, head) rows: one CTA per (tile, request)."""
    RANK: tl.constexpr = WIDTHS[0]
    RANK_PAD: tl.constexpr = WIDTHS[2]
    req = tl.program_id(1)
    q_begin = tl.load(qo_indptr + req)
    q_len = tl.load(qo_indptr + req + 1) - q_begin
    # the last tiles have most keys: start them first
    m_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if m_tile * BM < q_len * HEADS:
        prefix = tl.load(seq_lens + req)
        packed = m_tile * BM + tl.arange(0, BM)  # [BM]
        token = packed // HEADS
        head = packed % HEADS
        row_ok = packed < q_len * HEADS
        q_row = (q_begin + token).to(tl.int64)
        query = load_latent_query(q + q_row * stride_q + head * stride_q_head, row_ok, WIDTHS)
        pos_q = prefix + tl.minimum(token, q_len - 1)
        last_pos = prefix + tl.minimum((m_tile * BM + BM - 1) // HEADS, q_len - 1)
        table_row = req_to_token + tl.load(req_pool_indices + req).to(tl.int64) * stride_table
        r = tl.arange(0, BN)  # [BN]

        # tiles that every row sees whole need no mask
        full_end = (prefix + m_tile * BM // HEADS + 1) // BN * BN
        raw_full = _load_slots(table_row, r, last_pos)
        raw_last = _load_slots(table_row, full_end + r, last_pos)
        top = tl.full([BM], FLOOR, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, RANK_PAD], tl.float32)
        for part in tl.static_range(2):
            acc, top, total = _tiles(
                query,
                acc,
                top,
                total,
                pos_q,
                full_end if part else 0,
                last_pos + 1 if part else full_end,
                raw_last if part else raw_full,
                last_pos,
                table_row,
                cache,
                base2,
                SLOT,
                WIDTHS,
                part == 1,
                BN,
                STAGES,
            )
        out_rows = out + q_row * stride_out + head * stride_out_head
        store_rows(out_rows, acc, total, row_ok, RANK, RANK_PAD)
        if lse is not None:
            # every row sees itself: total > 0
            natural = (top * base2 + tl.log2(total)) * LN2
            tl.store(lse + q_row * stride_lse + head * stride_lse_head, natural, mask=row_ok)
