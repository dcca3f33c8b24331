"""Run a decoder's norms, rotation, KV store and activation between its products.

Every operation reads a product as ``partials [S, T, N]`` that add up to it: one as torch leaves it,
or several in float32 from a product split along its inner dimension (split-K), whose sum costs no
launch of its own. Sums, norms and rotations are in float32 and rounded once.

On Hopper these are programmatic dependent launches (`specattn.kernels.launch`): a kernel loads the
weights of its norm before it waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specattn.kernels import implementation
from specattn.kernels.fused import naive


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
    return implementation(naive.add_rms_norm, residual.device)(
        partials, residual, weight, eps, rows, residual_out, out
    )


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
    return implementation(naive.embed_rms_norm, weight.device)(ids, table, weight, eps, embedded)


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
    return implementation(naive.embed_norm_pair, hidden.device)(
        ids, table, hidden, embed_weight, hidden_weight, eps, rows
    )


def silu_mul(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``silu(gate) * up``, ``[T, I]`` in ``dtype``.

    Parameters
    ----------
    partials : Tensor
        ``[S, T, 2 I]``, gates first; dense last axis.
    dtype : torch.dtype
        Of the result.
    """
    return implementation(naive.silu_mul, partials.device)(partials, dtype)


def qk_norm_rope_store_kv(
    partials: Tensor,
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
    prefetch: bool = False,
) -> None:
    """Norm heads, rotate them, and store keys and values, in one launch.

    Parameters
    ----------
    partials : Tensor
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
    implementation(naive.qk_norm_rope_store_kv, q.device)(
        partials,
        positions,
        table,
        norms,
        eps,
        q,
        k_cache,
        v_cache,
        slots,
        k_scale,
        v_scale,
        prefetch,
    )


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
    return implementation(naive.split_k_reduce, partials.device)(partials, dtype)
