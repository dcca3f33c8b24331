"""Latent prompt attention: ragged new tokens over a cached prefix, causal, absorbed MLA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from specattn.kernels.attention.extend import _check, _load_slots
from specattn.kernels.attention.tiles import HOPPER, DeviceLimits, TileConfig, fit_tile
from specattn.kernels.attention.triton_tile import FLOOR, LN2, LOG2E, store_rows
from specattn.kernels.mla.tree import ROW, check_latent, latent_widths
from specattn.kernels.mla.triton_tile import attend_latent_tile, load_latent_query

if TYPE_CHECKING:
    from torch import Tensor


def mla_extend_tile_config(dtype: torch.dtype, limits: DeviceLimits = HOPPER) -> TileConfig:
    """Choose the tile of the prompt kernel, which is bound by arithmetic."""
    size = 16 if dtype == torch.float32 else 64 if limits.major == HOPPER.major else 32
    tile = TileConfig(size, size, warps=8, stages=2, ctas_per_sm=1)
    return fit_tile(tile, ROW * dtype.itemsize, ROW * dtype.itemsize, limits)


@triton.jit
def _tiles(
    q_latent,
    q_rotated,
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
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
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
            q_latent,
            q_rotated,
            acc,
            top,
            total,
            slots,
            visible,
            cache,
            base2,
            SLOT,
            RANK,
            ROPE,
            RANK_PAD,
            ROPE_PAD,
        )
    return acc, top, total


@triton.jit
def _mla_extend_kernel(
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
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One CTA per (tile of packed rows, request); a row is (token, head)."""
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
        q_latent, q_rotated = load_latent_query(
            q + q_row * stride_q + head * stride_q_head, row_ok, RANK, ROPE, RANK_PAD, ROPE_PAD
        )
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
        acc, top, total = _tiles(
            q_latent,
            q_rotated,
            acc,
            top,
            total,
            pos_q,
            0,
            full_end,
            raw_full,
            last_pos,
            table_row,
            cache,
            base2,
            SLOT,
            RANK,
            ROPE,
            RANK_PAD,
            ROPE_PAD,
            False,
            BN,
            STAGES,
        )
        acc, top, total = _tiles(
            q_latent,
            q_rotated,
            acc,
            top,
            total,
            pos_q,
            full_end,
            last_pos + 1,
            raw_last,
            last_pos,
            table_row,
            cache,
            base2,
            SLOT,
            RANK,
            ROPE,
            RANK_PAD,
            ROPE_PAD,
            True,
            BN,
            STAGES,
        )
        out_rows = out + q_row * stride_out + head * stride_out_head
        store_rows(out_rows, acc, total, row_ok, RANK, RANK_PAD)
        if lse is not None:
            # every row sees itself: total > 0
            natural = (top * base2 + tl.log2(total)) * LN2
            tl.store(lse + q_row * stride_lse + head * stride_lse_head, natural, mask=row_ok)


def mla_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    qo_indptr: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    max_q_len: int,
    sm_scale: float,
    tile: TileConfig | None = None,
) -> None:
    """Attend ragged new tokens, causally, to their request's cached prefix and themselves.

    Parameters
    ----------
    q : Tensor
        ``[T, Hq, D]``, absorbed; ``out`` is ``[T, Hq, Dv]``, written in place.
    k_cache, v_cache : Tensor
        ``[slots, 1, D]``, and the view of its first Dv columns.
    lse : Tensor or None
        ``[T, Hq]`` float32, natural log, written in place.
    qo_indptr, seq_lens, req_pool_indices, req_to_token, max_q_len, sm_scale
        See `specattn.kernels.attention.extend.extend_attention`.
    tile : TileConfig, optional
        Overrides `mla_extend_tile_config`.

    Raises
    ------
    ValueError
        If a shape or dtype disagrees with the above, or ``v_cache`` is no such view.
    """
    tokens, heads, head_dim = q.shape
    _check(q, k_cache, v_cache, out, lse)
    if k_cache.shape[1] != 1:
        raise ValueError(f"k_cache must have one head, got {k_cache.shape[1]}")
    check_latent(k_cache, v_cache)
    if not tokens:
        return
    tile = tile or mla_extend_tile_config(q.dtype, DeviceLimits.of(q.device))
    lse_strides = (0, 0) if lse is None else (lse.stride(0), lse.stride(1))
    grid = (triton.cdiv(max_q_len * heads, tile.block_m), len(seq_lens))
    _mla_extend_kernel[grid](
        q,
        k_cache,
        out,
        lse,
        qo_indptr,
        seq_lens,
        req_pool_indices,
        req_to_token,
        sm_scale * LOG2E,
        req_to_token.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *lse_strides,
        SLOT=k_cache.stride(0),
        HEADS=heads,
        BM=tile.block_m,
        BN=tile.block_n,
        STAGES=tile.stages,
        **latent_widths(head_dim, out.shape[2]),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
