"""What lies between a decoder's matrix products: norms, rotation and KV store, activation.

Every kernel reads a product as ``parts [S, T, N]`` that add up to it: one part as torch leaves it,
or several in float32 from a product split along its inner dimension, whose sum costs no launch of
its own. Sums, norms and rotations are in float32 and rounded once.

On Hopper these are programmatic dependent launches (see `launch`): before a kernel waits, it
loads the weights of its norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.kv_store import _as_stored
from specattn.kernels.launch import enter, launch_options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# columns per program of the activation
SPAN = 512


@triton.jit
def sum_parts(parts, at, ok, stride_part, SPLIT: tl.constexpr):
    """Add up the parts of the values at ``at``, in float32 and in their order."""
    # all loads first
    loaded = ()
    for s in tl.static_range(SPLIT):
        values = tl.load(parts + s * stride_part + at, mask=ok, other=0.0)
        # Triton knows tuple addition, not unpacking; mypy knows empty tuples by length
        loaded = loaded + (values,)  # type: ignore[assignment]  # noqa: RUF005
    total = loaded[0].to(tl.float32)  # type: ignore[misc]
    for s in tl.static_range(1, SPLIT):
        total += loaded[s].to(tl.float32)
    return total


@triton.jit
def _norm(x, weight, eps, SIZE: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight


@triton.jit
def _add_norm_kernel(
    parts,  # [SPLIT, T, SIZE]
    residual,  # [T, SIZE]
    weight,  # [SIZE]
    rows,  # [R] int64, or None for all
    residual_out,  # [R, SIZE], out
    out,  # [R, SIZE], out
    eps,
    stride_part,
    stride_row,
    stride_residual,
    stride_residual_out,
    stride_out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    to = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    scale = tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    enter(PDL)
    row = to
    if rows is not None:
        row = tl.load(rows + to)
    x = sum_parts(parts, row * stride_row + column, ok, stride_part, SPLIT)
    x += tl.load(residual + row * stride_residual + column, mask=ok, other=0.0).to(tl.float32)
    # the norm is of what the stream holds, as rounded
    x = x.to(residual_out.dtype.element_ty)
    tl.store(residual_out + to * stride_residual_out + column, x, mask=ok)
    x = _norm(x.to(tl.float32), scale, eps, SIZE)
    tl.store(out + to * stride_out + column, x.to(out.dtype.element_ty), mask=ok)


def add_rms_norm(
    parts: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rows: Tensor | None = None,
    residual_out: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a product to the residual stream, and norm the sum.

    Parameters
    ----------
    parts : Tensor
        ``[S, T, H]``, dense in its last axis as all of these.
    residual : Tensor
        ``[T, H]``, the stream so far.
    weight : Tensor
        ``[H]``.
    eps : float
        Added to the mean of squares.
    rows : Tensor, optional
        ``[R]`` int64, the rows to compute; all T of them if None.
    residual_out, out : Tensor, optional
        ``[R, H]``, where to write; new tensors if None.

    Returns
    -------
    tuple of Tensor
        The normed sum ``[R, H]`` and the sum.
    """
    count = residual.shape[0] if rows is None else rows.shape[0]
    size = residual.shape[1]
    if residual_out is None:
        residual_out = residual.new_empty(count, size)
    if out is None:
        out = residual.new_empty(count, size)
    if count:
        _add_norm_kernel[(count,)](
            parts,
            residual,
            weight,
            rows,
            residual_out,
            out,
            eps,
            parts.stride(0),
            parts.stride(1),
            residual.stride(0),
            residual_out.stride(0),
            out.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            SPLIT=parts.shape[0],
            num_warps=_warps(size),
            **launch_options(residual.device),
        )
    return out, residual_out


@triton.jit
def _embed_norm_kernel(
    ids,  # [T] int64
    table,  # [V, SIZE]
    weight,  # [SIZE]
    embedded,  # [T, SIZE], out
    out,  # [T, SIZE], out
    eps,
    stride_table,
    stride_embedded,
    stride_out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    scale = tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    enter(PDL)
    x = tl.load(table + tl.load(ids + row) * stride_table + column, mask=ok, other=0.0)
    x = x.to(embedded.dtype.element_ty)
    tl.store(embedded + row * stride_embedded + column, x, mask=ok)
    x = _norm(x.to(tl.float32), scale, eps, SIZE)
    tl.store(out + row * stride_out + column, x.to(out.dtype.element_ty), mask=ok)


def embed_rms_norm(
    ids: Tensor, table: Tensor, weight: Tensor, eps: float, *, embedded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Look tokens up, and norm what was found.

    Parameters
    ----------
    ids : Tensor
        ``[T]`` int64.
    table : Tensor
        ``[V, H]``.
    weight : Tensor
        ``[H]``, of the norm.
    eps : float
        Added to the mean of squares.
    embedded : Tensor, optional
        ``[T, H]``, where to write the embeddings; a new tensor if None.

    Returns
    -------
    tuple of Tensor
        The normed embeddings ``[T, H]`` and the embeddings.
    """
    size = table.shape[1]
    if embedded is None:
        embedded = weight.new_empty(len(ids), size)
    out = weight.new_empty(len(ids), size)
    if len(ids):
        _embed_norm_kernel[(len(ids),)](
            ids,
            table,
            weight,
            embedded,
            out,
            eps,
            table.stride(0),
            embedded.stride(0),
            out.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=_warps(size),
            **launch_options(weight.device),
        )
    return out, embedded


@triton.jit
def _norm_pair_kernel(
    ids,  # [T] int64
    table,  # [V, SIZE]
    hidden,  # [N, SIZE]
    rows,  # [T] int64, or None: token i's is row i
    embed_weight,  # [SIZE]
    hidden_weight,  # [SIZE]
    hidden_out,  # [T, SIZE], out; None without rows
    out,  # [T, 2, SIZE], out
    eps,
    stride_table,
    stride_hidden,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    scale = tl.load((embed_weight if half == 0 else hidden_weight) + column, mask=ok, other=0.0)
    enter(PDL)
    if half == 0:
        x = tl.load(table + tl.load(ids + row) * stride_table + column, mask=ok, other=0.0)
        x = x.to(out.dtype.element_ty)
    else:
        source = row
        if rows is not None:
            source = tl.load(rows + row)
        x = tl.load(hidden + source * stride_hidden + column, mask=ok, other=0.0)
        if rows is not None:
            tl.store(hidden_out + row * SIZE + column, x, mask=ok)
        x = x.to(out.dtype.element_ty)
    x = _norm(x.to(tl.float32), scale.to(tl.float32), eps, SIZE)
    tl.store(out + (row * 2 + half) * SIZE + column, x.to(out.dtype.element_ty), mask=ok)


def embed_norm_pair(
    ids: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    *,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm tokens' embeddings and their hidden states, and put them side by side (EAGLE-3).

    Parameters
    ----------
    ids : Tensor
        ``[T]`` int64.
    table : Tensor
        ``[V, H]``.
    hidden : Tensor
        ``[N, H]``; N = T without ``rows``.
    embed_weight, hidden_weight : Tensor
        ``[H]``, of the two norms.
    eps : float
        Added to the mean of squares.
    rows : Tensor, optional
        ``[T]`` int64, each token's row of ``hidden``; row i for token i if None.

    Returns
    -------
    tuple of Tensor
        The norms ``[T, 2 H]``, and the hidden states ``[T, H]`` that were normed.
    """
    count, size = len(ids), hidden.shape[1]
    out = hidden_weight.new_empty(count, 2 * size)
    chosen = None if rows is None else hidden.new_empty(count, size)
    if count:
        _norm_pair_kernel[(count, 2)](
            ids,
            table,
            hidden,
            rows,
            embed_weight,
            hidden_weight,
            chosen,
            out,
            eps,
            table.stride(0),
            hidden.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=_warps(size),
            **launch_options(hidden.device),
        )
    return out, hidden if chosen is None else chosen


@triton.jit
def _silu_mul_kernel(
    parts,  # [SPLIT, T, 2, SIZE]
    out,  # [T, SIZE], out
    stride_part,
    stride_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < SIZE
    enter(PDL)
    at = row * stride_row + column
    gate = sum_parts(parts, at, ok, stride_part, SPLIT)
    up = sum_parts(parts, at + SIZE, ok, stride_part, SPLIT)
    x = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + column, x.to(out.dtype.element_ty), mask=ok)


def silu_mul(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``silu(gate) * up [T, I]`` of a product ``[S, T, 2 I]``, gates first, in ``dtype``."""
    split, count, both = parts.shape
    out = parts.new_empty(count, both // 2, dtype=dtype)
    if count:
        _silu_mul_kernel[(count, triton.cdiv(both // 2, SPAN))](
            parts,
            out,
            parts.stride(0),
            parts.stride(1),
            SIZE=both // 2,
            BLOCK=SPAN,
            SPLIT=split,
            num_warps=2,
            **launch_options(parts.device),
        )
    return out


@triton.jit
def _place(
    positions,
    table,
    slots,
    token,
    dim,
    last_position,
    stride_slot,
    Q_LEN: tl.constexpr,
    DIM: tl.constexpr,
    CACHE: tl.constexpr,
):
    """A token's slot, and the cosines and sines of its position."""
    HALF: tl.constexpr = DIM // 2
    slot = token
    if slots is not None:
        at = slots + token // Q_LEN * stride_slot + token % Q_LEN
        slot = tl.load(at, cache_modifier=CACHE).to(tl.int64)
    # positions past the table's end would be read from elsewhere
    position = tl.minimum(tl.load(positions + token, cache_modifier=CACHE), last_position)
    cosine = tl.load(table + position * DIM + dim, mask=dim < HALF, other=0.0)[None, :]
    sine = tl.load(table + position * DIM + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    return slot, cosine, sine


@triton.jit
def _rotate_kernel(
    parts,  # [SPLIT, T, Q_HEADS + 2 * KV_HEADS, DIM]
    positions,  # [T] int64
    table,  # [L, DIM] float32: cosines of DIM / 2 angles, then their sines
    q_weight,  # [DIM], or None
    k_weight,  # [DIM], or None
    q,  # [T, Q_HEADS, DIM], out
    k_cache,  # [slots, KV_HEADS, DIM], out
    v_cache,  # [slots, KV_HEADS, DIM], out
    slots,  # [B, Q_LEN] int32, or None: token i goes to row i
    eps,
    k_factor,
    v_factor,
    last_position,
    stride_part,
    stride_row,
    stride_slot,
    stride_kc,
    stride_kch,
    stride_vc,
    stride_vch,
    Q_LEN: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    HALF: tl.constexpr = DIM // 2
    head = first + tl.arange(0, HEADS)  # [HEADS]
    dim = tl.arange(0, HALF_BLOCK)  # [HALF_BLOCK]
    ok = (dim < HALF)[None, :] & (head >= 0)[:, None]
    if EARLY:
        # by the L1 cache, which keeps nothing of other kernels' writes up to date
        slot, cosine, sine = _place(
            positions, table, slots, token, dim, last_position, stride_slot, Q_LEN, DIM, ".cg"
        )
    if q_weight is not None:
        weight = (q_weight if first < Q_HEADS else k_weight) + dim
        low_weight = tl.load(weight, mask=dim < HALF, other=0.0)[None, :]
        high_weight = tl.load(weight + HALF, mask=dim < HALF, other=0.0)[None, :]
    enter(PDL)
    if not EARLY:
        slot, cosine, sine = _place(
            positions, table, slots, token, dim, last_position, stride_slot, Q_LEN, DIM, ""
        )
    at = token * stride_row + head[:, None] * DIM + dim[None, :]
    low = sum_parts(parts, at, ok, stride_part, SPLIT)
    high = sum_parts(parts, at + HALF, ok, stride_part, SPLIT)
    if first < Q_HEADS + KV_HEADS:
        if q_weight is not None:
            mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM
            factor = tl.rsqrt(mean + eps)[:, None]
            low *= factor * low_weight
            high *= factor * high_weight
        low, high = low * cosine - high * sine, high * cosine + low * sine
    if first < Q_HEADS:
        q_to = q + (token * Q_HEADS + head[:, None]) * DIM + dim[None, :]
        tl.store(q_to, low.to(q.dtype.element_ty), mask=ok)
        tl.store(q_to + HALF, high.to(q.dtype.element_ty), mask=ok)
    elif first < Q_HEADS + KV_HEADS:
        k_head = (head - Q_HEADS)[:, None] * stride_kch
        # a float8 pool stores what the model's dtype holds, as `store_kv` does
        k_to = k_cache + slot * stride_kc + k_head + dim[None, :]
        tl.store(k_to, _as_stored(low.to(q.dtype.element_ty), k_factor, k_cache), mask=ok)
        tl.store(k_to + HALF, _as_stored(high.to(q.dtype.element_ty), k_factor, k_cache), mask=ok)
    else:
        v_head = (head - (Q_HEADS + KV_HEADS))[:, None] * stride_vch
        v_to = v_cache + slot * stride_vc + v_head + dim[None, :]
        tl.store(v_to, _as_stored(low.to(q.dtype.element_ty), v_factor, v_cache), mask=ok)
        tl.store(v_to + HALF, _as_stored(high.to(q.dtype.element_ty), v_factor, v_cache), mask=ok)


def rotate_store(
    parts: Tensor,
    positions: Tensor,
    table: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor | None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    following: bool = False,
) -> None:
    """Norm heads, apply the position embedding and store keys and values, all in one launch.

    Parameters
    ----------
    parts : Tensor
        ``[S, T, (Hq + 2 Hkv) D]``: queries, keys and values of every token.
    positions : Tensor
        ``[T]`` int64; past the table's end its last row counts.
    table : Tensor
        ``[L, D]`` float32, contiguous: the cosines of D / 2 angles, then their sines.
    norms : tuple of Tensor, optional
        Weights ``[D]`` of the norms of every query head and of every key head (Qwen3).
    eps : float
        Added to the mean of squares by these norms.
    q : Tensor
        ``[T, Hq, D]``, contiguous; written.
    k_cache, v_cache : Tensor
        ``[slots, Hkv, D]``; written at ``slots``.
    slots : Tensor, optional
        ``[B, q]`` int32 with B q = T, may have a row stride; row i for token i if None.
    k_scale, v_scale : float
        Of float8 caches; see `specattn.kernels.kv_store.store_kv`.
    following : bool
        Whether an attention kernel ran since ``positions`` and ``slots`` were written, as in all
        layers but the first: on Hopper, they are then read before the wait (see
        `specattn.kernels.attention.gluon_tree`).
    """
    count, q_heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    if not count:
        return
    # a program's heads are all queries, all keys or all values
    heads = next(n for n in (4, 2, 1) if q_heads % n == 0 and kv_heads % n == 0)
    q_weight, k_weight = norms or (None, None)
    _rotate_kernel[(count, (q_heads + 2 * kv_heads) // heads)](
        parts,
        positions,
        table,
        q_weight,
        k_weight,
        q,
        k_cache,
        v_cache,
        slots,
        eps,
        1 / k_scale,
        1 / v_scale,
        len(table) - 1,
        parts.stride(0),
        parts.stride(1),
        0 if slots is None else slots.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        Q_LEN=1 if slots is None else slots.shape[1],
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF_BLOCK=triton.next_power_of_2(dim // 2),
        HEADS=heads,
        SPLIT=parts.shape[0],
        EARLY=following,
        num_warps=2,
        **launch_options(q.device),
    )


def _warps(size: int) -> int:
    """Warps of a program that holds a whole row: all there can be, for it waits for memory."""
    return max(1, min(32, int(triton.next_power_of_2(size)) // 128))
