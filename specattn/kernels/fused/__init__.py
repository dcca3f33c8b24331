"""Run a decoder's norms, rotation, KV store and activation between its products.

Every operation reads a product as ``partials [S, T, N]`` that add up to it: one as torch leaves it,
or several in float32 from a product split along its inner dimension (split-K), whose sum costs no
launch of its own. Sums, norms and rotations are in float32 and rounded once.

On Hopper these are programmatic dependent launches (`specattn.kernels.launch`): a kernel loads the
weights of its norm before it waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import silu

from specattn.kernels import Launchers, on_triton
from specattn.kernels.cache import store_kv

if TYPE_CHECKING:
    from specattn.kernels.fused import triton as launch
else:
    launch = Launchers("specattn.kernels.fused.triton")


@dataclass(frozen=True, eq=False)
class Rotation:
    """Position embedding of query and key heads, after optional norms.

    Parameters
    ----------
    table : Tensor
        ``[L, D]`` float32, contiguous: row p holds the cosines of position p's D / 2 angles, then
        their sines. Dimension i is rotated with dimension i + D / 2.
    norms : tuple of Tensor, optional
        ``[D]`` each: weights of the RMSNorm of every query head and of every key head.
    eps : float
        Added to the mean of squares by these norms.
    """

    table: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


def add_rms_norm(
    partials: Tensor,
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
    partials : Tensor
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
    if on_triton(residual):
        return launch.add_rms_norm(
            partials=partials,
            residual=residual,
            weight=weight,
            eps=eps,
            rows=rows,
            residual_out=residual_out,
            out=out,
        )
    total = (partials.float().sum(0) + residual.float()).to(residual.dtype)
    if rows is not None:
        total = total[rows]
    if residual_out is None:
        residual_out = torch.empty_like(total)
    residual_out.copy_(total)
    if out is None:
        out = torch.empty_like(total)
    out.copy_(_norm(total, weight, eps))
    return out, residual_out


def embed_rms_norm(
    ids: Tensor, table: Tensor, weight: Tensor, eps: float, *, embedded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Look up the tokens' embeddings, and norm them.

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
    if on_triton(weight):
        return launch.embed_rms_norm(
            ids=ids, table=table, weight=weight, eps=eps, embedded=embedded
        )
    if embedded is None:
        embedded = weight.new_empty(len(ids), table.shape[1])
    embedded.copy_(table[ids])
    return _norm(embedded, weight, eps).to(weight.dtype), embedded


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
    """Norm embeddings and hidden states, side by side (EAGLE-3).

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
    if on_triton(hidden):
        return launch.embed_norm_pair(
            ids=ids,
            table=table,
            hidden=hidden,
            embed_weight=embed_weight,
            hidden_weight=hidden_weight,
            eps=eps,
            rows=rows,
        )
    if rows is not None:
        hidden = hidden[rows]
    dtype = hidden_weight.dtype
    pair = (
        _norm(table[ids].to(dtype), embed_weight, eps),
        _norm(hidden.to(dtype), hidden_weight, eps),
    )
    return torch.cat(pair, dim=-1).to(dtype), hidden


def silu_mul(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``silu(gate) * up``, ``[T, I]`` in ``dtype``.

    Parameters
    ----------
    partials : Tensor
        ``[S, T, 2 I]``, gates first; dense last axis.
    dtype : torch.dtype
        Of the result.
    """
    if on_triton(partials):
        return launch.silu_mul(partials=partials, dtype=dtype)
    gate, up = partials.float().sum(0).chunk(2, dim=-1)
    return (silu(gate) * up).to(dtype)


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
        Of D dimensions, after norms of every query head and of every key head (Qwen3), if any.
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
    if on_triton(q):
        return launch.qk_norm_rope_store_kv(
            partials=partials,
            positions=positions,
            rotation=rotation,
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            slots=slots,
            k_scale=k_scale,
            v_scale=v_scale,
            prefetch=prefetch,
        )
    count, q_heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    heads = partials.float().sum(0).unflatten(-1, (-1, dim))
    new_q, new_k, new_v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if rotation.norms is not None:
        of_q, of_k = rotation.norms
        new_q, new_k = _norm(new_q, of_q, rotation.eps), _norm(new_k, of_k, rotation.eps)
    table = rotation.table
    cosine, sine = table[positions.clamp(max=len(table) - 1)][:, None].chunk(2, dim=-1)
    q.copy_(_rotate(new_q, cosine, sine))
    if slots is None:
        slots = torch.arange(count, dtype=torch.int32, device=q.device)[:, None]
    new_k, new_v = _rotate(new_k, cosine, sine).to(q.dtype), new_v.to(q.dtype)
    store_kv(new_k, new_v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


def split_k_reduce(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of a product's partials, ``[T, N]`` in ``dtype``.

    For a product whose next reader does not add them up itself.

    Parameters
    ----------
    partials : Tensor
        ``[S, T, N]``; dense last axis.
    dtype : torch.dtype
        Of the result.
    """
    if on_triton(partials):
        return launch.split_k_reduce(partials=partials, dtype=dtype)
    return partials.float().sum(0).to(dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)
