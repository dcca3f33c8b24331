"""Prompt attention: ragged new tokens over a cached prefix, causal, read through the slot table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from specattn.kernels.attention import gluon as gluon_attention
from specattn.kernels.attention.gluon import GluonTile
from specattn.kernels.attention.tiles import FLOAT8, DeviceLimits, TileConfig, extend_tile_config
from specattn.kernels.attention.triton_tile import (
    FLOOR,
    LN2,
    LOG2E,
    as_factor,
    attend_tile,
    load_query,
    store_rows,
)

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _load_slots(table_row, pos, last):
    """Raw slots of positions, clamped to the last key: no load needs a mask."""
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
    FIXED: tl.constexpr,
):
    """Attend to the tiles of ``[begin, end)``, masked by position if ``MASK``."""
    r = tl.arange(0, BN)  # [BN]
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        slots = raw
        raw = _load_slots(table_row, tl.maximum(start + BN + r, first_key), last)
        visible = None
        if MASK:
            distance = pos_q[:, None] - (start + r)[None, :]  # [BM, BN]
            visible = distance >= 0
            if WINDOW >= 0:
                visible = visible & (distance <= WINDOW)
        elif FIXED and HAS_CAP:
            # all are visible; see `deterministic_kernel._shared_tiles`
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
def _extend_kernel(
    q,  # [T, Hq, HEAD_DIM]
    k_cache,  # [slots, Hkv, HEAD_DIM]
    v_cache,  # [slots, Hkv, V_DIM]
    out,  # [T, Hq, V_DIM], out
    lse,  # [T, Hq] float32, out, or None
    qo_indptr,  # [B + 1] int32
    seq_lens,  # [B] int32
    req_pool_indices,  # [B] int64
    req_to_token,  # [rows, C] int32
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
    FIXED: tl.constexpr,
):
    """One CTA per (tile of packed rows, KV head, request); a row is (token, head of the group)."""
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
        raw_full = _load_slots(table_row, full_begin + r, last_pos)
        raw_last = _load_slots(table_row, tl.maximum(full_end + r, first_key), last_pos)
        top = tl.full([BM], FLOOR, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, V_PAD], tl.float32)
        if WINDOW >= 0:
            raw = _load_slots(table_row, tl.maximum(begin + r, first_key), last_pos)
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
                FIXED,
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
            FIXED,
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
            FIXED,
        )
        out_rows = out + q_row * stride_out + q_head * stride_out_head
        store_rows(out_rows, acc, total, row_ok, V_DIM, V_PAD, v_scale)
        if lse is not None:
            if not HAS_CAP:
                top = top * base2
            # every row sees itself: total > 0
            natural = (top + tl.log2(total)) * LN2
            tl.store(lse + q_row * stride_lse + q_head * stride_lse_head, natural, mask=row_ok)


def extend_attention(
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
    window_left: int = -1,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    page_size: int = 1,
    deterministic: bool = False,
    tile: TileConfig | None = None,
) -> None:
    """Attend ragged new tokens, causally, to their request's cached prefix and themselves.

    Token i of request b has position ``seq_lens[b] + i``; its keys are the slots
    ``req_to_token[row, : seq_lens[b] + i + 1]``, the new tokens' own already stored.

    Parameters
    ----------
    q : Tensor
        ``[T, Hq, D]``; ``out`` is ``[T, Hq, Dv]``, written in place.
    k_cache, v_cache : Tensor
        ``[slots, Hkv, D]`` and ``[slots, Hkv, Dv]``, the last dimension contiguous; of the dtype
        of q, or float8 (e4m3) where q is float16 or bfloat16.
    lse : Tensor or None
        ``[T, Hq]`` float32, natural log, written in place.
    qo_indptr : Tensor
        ``[B + 1]`` int32, offsets of each request's new tokens.
    seq_lens, req_pool_indices : Tensor
        ``[B]`` int32 and int64: cached prefix, and table row.
    req_to_token : Tensor
        ``[rows, C]`` int32.
    max_q_len : int
        Most new tokens of a request; the grid is made for it.
    sm_scale, window_left, logit_cap
        See `specattn.config.AttnConfig`.
    k_scale, v_scale : float
        What float8 keys and values are to be multiplied by.
    page_size : int
        As in `specattn.kernels.attention.tree.TreeAttention`.
    deterministic : bool
        Give a token the same bits however its text is cut into extends, and whatever else is in
        the batch.
    tile : TileConfig, optional
        Overrides the tile table.

    Raises
    ------
    ValueError
        If a shape or dtype disagrees with the above.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, v_head_dim = v_cache.shape[1:]
    _check(q, k_cache, v_cache, out, lse)
    if not tokens:
        return
    # q (k_scale k): the keys' scale is a factor of the logits, whatever follows
    base = sm_scale * k_scale
    factors = (base * LOG2E, base / logit_cap if logit_cap else 0.0, logit_cap * LOG2E)
    group = heads // kv_heads
    if (
        tile is None
        and not deterministic
        and max_q_len * group > gluon_attention.SHORT_PROMPT
        and gluon_attention.serves(head_dim, v_head_dim, k_cache.dtype, q.device)
        and gluon_attention.aligned(k_cache)
        and gluon_attention.aligned(v_cache)
    ):
        tile = gluon_attention.gluon_extend_tile(head_dim, page_size, k_cache.dtype)
    if isinstance(tile, GluonTile):
        gluon_attention.launch_extend(
            tile,
            page_size,
            q,
            k_cache,
            v_cache,
            out,
            lse,
            qo_indptr,
            seq_lens,
            req_pool_indices,
            req_to_token,
            max_q_len,
            window_left,
            factors,
            v_scale,
        )
        return
    tile = tile or extend_tile_config(
        head_dim, v_head_dim, k_cache.dtype, DeviceLimits.of(q.device)
    )
    lse_strides = (0, 0) if lse is None else (lse.stride(0), lse.stride(1))
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.max_regs:
        options["maxnreg"] = tile.max_regs
    grid = (triton.cdiv(max_q_len * group, tile.block_m), kv_heads, len(seq_lens))
    _extend_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        lse,
        qo_indptr,
        seq_lens,
        req_pool_indices,
        req_to_token,
        *factors,
        v_scale if k_cache.dtype == FLOAT8 else None,
        req_to_token.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *lse_strides,
        K_SLOT=k_cache.stride(0),
        K_HEAD=k_cache.stride(1),
        V_SLOT=v_cache.stride(0),
        V_HEAD=v_cache.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        V_DIM=v_head_dim,
        D_PAD=max(16, triton.next_power_of_2(head_dim)),
        V_PAD=max(16, triton.next_power_of_2(v_head_dim)),
        HAS_CAP=logit_cap > 0,
        WINDOW=window_left,
        BM=tile.block_m,
        BN=tile.block_n,
        STAGES=tile.stages,
        FIXED=deterministic,
        **options,
    )


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None) -> None:
    tokens, heads, head_dim = q.shape
    slots, kv_heads, v_head_dim = v_cache.shape
    kv_dtype = q.dtype
    if k_cache.dtype == FLOAT8 and q.dtype != torch.float32:
        kv_dtype = FLOAT8
    if k_cache.shape != (slots, kv_heads, head_dim):
        raise ValueError(
            f"k_cache must be {[slots, kv_heads, head_dim]}, got {list(k_cache.shape)}"
        )
    if heads % kv_heads:
        raise ValueError(f"q must have a multiple of {kv_heads} heads, got {heads}")
    if out.shape != (tokens, heads, v_head_dim):
        raise ValueError(f"out must be {[tokens, heads, v_head_dim]}, got {list(out.shape)}")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("out", out)):
        if tensor.dtype != (q.dtype if name == "out" else kv_dtype):
            raise ValueError(f"{name} must be {q.dtype} like q, got {tensor.dtype}")
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache, out)):
        raise ValueError("q, k_cache, v_cache and out must be contiguous in their last dimension")
    if lse is not None and (lse.shape != (tokens, heads) or lse.dtype != torch.float32):
        raise ValueError(
            f"lse must be float32 {[tokens, heads]}, got {lse.dtype} {list(lse.shape)}"
        )
