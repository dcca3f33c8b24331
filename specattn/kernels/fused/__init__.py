"""Run a decoder's norms, rotation, KV store and activation between its products.

Every operation reads a product as ``partials [S, T, N]`` that add up to it: one as torch leaves it,
or several in float32 from a product split along its inner dimension (split-K), whose sum costs no
launch of its own. Sums, norms and rotations are in float32 and rounded once.

On Hopper these are programmatic dependent launches (`specattn.kernels.pdl`): a kernel loads the
weights of its norm before it waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu

from specattn.kernels import TritonModule, on_triton
from specattn.kernels.cache import rows_of_slots, store_kv
from specattn.kernels.launch import cdiv, columns_of, launch_options, power_of_2

launch = TritonModule("specattn.kernels.fused.triton")


@dataclass(frozen=True, eq=False)
class Rotation:
    """Position embedding of heads, after an optional bias and norms.

    Parameters
    ----------
    table : Tensor
        ``[L, D]`` float32, contiguous: row p holds the cosines of position p's D / 2 angles, then
        their sines. Dimension i is rotated with dimension i + D / 2.
    norms : tuple of Tensor, optional
        ``[D]`` each: weights of the RMSNorm of every query head and of every key head.
    eps : float
        Added to the mean of squares by these norms.
    bias : Tensor, optional
        ``[(Hq + 2 Hkv) D]``, contiguous: added to queries, keys and values before all else.
    """

    table: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0
    bias: Tensor | None = None


def add_rms_norm(
    partials: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    rows: Tensor | None = None,
    residual_out: Tensor | None = None,
    out: Tensor | None = None,
    added_weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a product to the residual stream, and norm the sum.

    Parameters
    ----------
    partials : Tensor
        ``[S, T, H]``, dense in its last axis as all of these. Or a table of embeddings,
        ``[1, V, H]``: with the tokens as ``rows`` they are looked up.
    residual : Tensor, optional
        ``[T, H]``, the stream so far; None where it begins.
    weight : Tensor
        ``[H]``.
    eps : float
        Added to the mean of squares.
    rows : Tensor, optional
        ``[R]`` int64, the rows to compute; all T of them if None.
    residual_out, out : Tensor, optional
        ``[R, H]``, where to write; if None, new tensors.
    added_weight : Tensor, optional
        ``[H]``: if given, the product is normed by this weight before it is added (Gemma 3).
    dtype : torch.dtype, optional
        Of new tensors; if None, that of ``residual``, or of ``weight`` without one.

    Returns
    -------
    tuple of Tensor
        The normed sum ``[R, H]`` and the sum.
    """
    (split, count, size), like = partials.shape, weight if residual is None else residual
    count = count if rows is None else len(rows)
    if residual_out is None:
        residual_out = like.new_empty(count, size, dtype=dtype)
    if out is None:
        out = like.new_empty(count, size, dtype=dtype)
    if on_triton(weight):
        if count:
            launch.add_norm_kernel[(count,)](
                partials,
                residual,
                weight,
                added_weight,
                rows,
                residual_out,
                out,
                eps,
                *partials.stride()[:2],
                0 if residual is None else residual.stride(0),
                residual_out.stride(0),
                out.stride(0),
                SPLIT=split,
                **whole_rows(size),
                **launch_options(weight.device),
            )
        return out, residual_out
    if rows is not None:
        partials, residual = partials[:, rows], None if residual is None else residual[rows]
    total = partials.float().sum(0)
    if added_weight is not None:
        total = _norm(total, added_weight, eps)
    residual_out.copy_(total if residual is None else total + residual.float())
    out.copy_(_norm(residual_out, weight, eps))
    return out, residual_out


def embed_norm_pair(
    ids: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    *,
    rows: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm embeddings and hidden states, side by side (EAGLE-3, MTP).

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
    dtype : torch.dtype, optional
        Of the norms; that of ``hidden_weight`` if None.

    Returns
    -------
    tuple of Tensor
        The norms ``[T, 2 H]``, and the hidden states ``[T, H]`` that were normed.
    """
    dtype = dtype or hidden_weight.dtype
    if on_triton(hidden):
        count, size = len(ids), hidden.shape[1]
        out = hidden_weight.new_empty(count, 2 * size, dtype=dtype)
        chosen = None if rows is None else hidden.new_empty(count, size)
        if count:
            launch.norm_pair_kernel[count, 2](
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
                **whole_rows(size),
                **launch_options(hidden.device),
            )
        return out, hidden if chosen is None else chosen
    if rows is not None:
        hidden = hidden[rows]
    pair = (
        _norm(table[ids].to(dtype), embed_weight, eps),
        _norm(hidden.to(dtype), hidden_weight, eps),
    )
    return torch.cat(pair, dim=-1).to(dtype), hidden


def add_partials(partials: Tensor, dtype: torch.dtype, *, gated: bool = False) -> Tensor:
    """Return the sum of a product's partials, ``[T, N]`` in ``dtype``.

    Parameters
    ----------
    partials : Tensor
        ``[S, T, N]``, with ``gated`` ``[S, T, 2 N]``, gates first; dense last axis.
    dtype : torch.dtype
        Of the result.
    gated : bool
        Whether to return ``silu(gate) * up``.
    """
    if on_triton(partials):
        split, count, size = partials.shape
        size = size // 2 if gated else size
        out = partials.new_empty(count, size, dtype=dtype)
        block, warps = columns_of(count)
        if count:
            launch.add_partials_kernel[count, cdiv(size, block)](
                partials,
                out,
                *partials.stride()[:2],
                SIZE=size,
                BLOCK=block,
                SPLIT=split,
                GATED=gated,
                num_warps=warps,
                **launch_options(partials.device),
            )
        return out
    total = partials.float().sum(0)
    if gated:
        gate, up = total.chunk(2, dim=-1)
        total = silu(gate) * up
    return total.to(dtype)


def qk_norm_rope_store_kv(
    partials: Tensor,
    positions: Tensor,
    rotation: Rotation,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor | None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    prefetch: bool = False,
) -> None:
    """Norm heads, rotate them, and store keys and values, in one launch.

    Parameters
    ----------
    partials : Tensor
        ``[S, T, (Hq + 2 Hkv) D]``: queries, keys and values of every token.
    positions : Tensor
        ``[T]`` int64; past the table's end its last row counts.
    rotation : Rotation
        Of D dimensions, after a bias (Qwen2) and norms of every query and key head (Qwen3), if any.
    q : Tensor
        ``[T, Hq, D]``, contiguous; written.
    k_cache, v_cache : Tensor
        ``[slots, Hkv, D]``; written at ``slots``.
    slots : Tensor, optional
        ``[B, q]`` int32 or int64 with B q = T, may have a row stride; those below 0 are skipped.
        Row i for token i if None.
    k_scale, v_scale : float
        Of float8 caches; see `specattn.kernels.cache.store_kv`.
    prefetch : bool
        Whether to read ``positions`` and ``slots`` before the launch waits, on Hopper. An attention
        kernel must have run since they were written, as in all layers but the first.
    """
    if not len(q):
        return
    (count, q_heads, dim), kv_heads = q.shape, k_cache.shape[1]
    if on_triton(q):
        # a program's heads are all queries, all keys or all values
        heads = next(n for n in (4, 2, 1) if q_heads % n == 0 and kv_heads % n == 0)
        q_weight, k_weight = rotation.norms or (None, None)
        q_len, stride_slot = (1, 0) if slots is None else rows_of_slots(slots)
        launch.qk_norm_rope_store_kernel[count, (q_heads + 2 * kv_heads) // heads](
            partials,
            (positions, rotation.table, len(rotation.table) - 1, slots, stride_slot),
            q_weight,
            k_weight,
            rotation.bias,
            q,
            k_cache,
            v_cache,
            rotation.eps,
            1 / k_scale,
            1 / v_scale,
            *partials.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            Q_LEN=q_len,
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            HALF_BLOCK=power_of_2(dim // 2),
            HEADS=heads,
            SPLIT=partials.shape[0],
            PREFETCH=prefetch,
            num_warps=2,
            **launch_options(q.device),
        )
        return
    total = partials.float().sum(0)
    if rotation.bias is not None:
        total += rotation.bias.float()
    heads = total.unflatten(-1, (-1, dim))
    new_q, new_k, new_v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if rotation.norms is not None:
        of_q, of_k = rotation.norms
        new_q, new_k = _norm(new_q, of_q, rotation.eps), _norm(new_k, of_k, rotation.eps)
    table = rotation.table
    cosine, sine = table[positions.clamp(max=len(table) - 1)][:, None].chunk(2, dim=-1)
    q.copy_(rotate(new_q, cosine, sine))
    if slots is None:
        slots = torch.arange(count, dtype=torch.int32, device=q.device)[:, None]
    new_k, new_v = rotate(new_k, cosine, sine).to(q.dtype), new_v.to(q.dtype)
    store_kv(new_k, new_v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each dimension with that half a head behind it.

    ``x`` is ``[..., D]``; ``cosine`` and ``sine`` are those of D / 2 angles.
    """
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


@cache
def whole_rows(size: int) -> dict[str, int]:
    """Return the constants of kernels that take whole rows."""
    block = power_of_2(size)
    # as many warps as a row takes: they await memory
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, min(32, block // 128))}
