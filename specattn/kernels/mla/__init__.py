"""Absorbed multi-head latent attention of trees and prompts over one pool.

DeepSeek-V2 (arXiv:2405.04434): all heads read the same row of a token, as its key; the row's
first ``v_head_dim`` numbers are its value, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specattn.checks import whole_number
from specattn.kernels import TritonModule
from specattn.kernels.attention import check_extend
from specattn.kernels.attention.tiles import (
    DeviceLimits,
    TileConfig,
    logit_factors,
)
from specattn.kernels.attention.tree_attention import (
    DeterministicSplits,
    Operands,
    TreeAttention,
    row_strides,
)
from specattn.kernels.launch import cdiv
from specattn.kernels.mla.tiles import latent_widths, mla_extend_tile_config

if TYPE_CHECKING:
    from specattn.kernels.attention.launches import TreeKernels

launch = TritonModule("specattn.kernels.mla.triton_extend")

__all__ = ["MlaAttention", "mla_extend"]


class MlaAttention(TreeAttention):
    """Launch constants, plan and workspace of one bucket; see `TreeAttention`.

    ``run`` takes the pool twice: ``k_cache [slots, 1, head_dim]``, and ``v_cache``, which must be
    the view of its first ``v_head_dim`` columns. A tail is needed. Windows, caps, index lists,
    float8, shared prefixes and deterministic splits are not served.

    Raises
    ------
    ValueError
        As of `TreeAttention`, or for what is not served.
    """

    def _kernels(
        self, tile: TileConfig | None, deterministic: DeterministicSplits | None
    ) -> TreeKernels:
        from specattn.kernels.mla.triton import LatentKernels

        whole_number("num_kv_heads", self.num_kv_heads, 1, 1)
        whole_number("v_head_dim", self.v_head_dim, 1, self.head_dim - 1)
        whole_number("tail_len", self.tail_len, 1)
        asked = deterministic, self.csr, self.has_cap, self.share_from
        if any(asked) or self.window_left >= 0 or self.kv_dtype != self.dtype:
            raise ValueError(
                "latent attention has no window_left, logit_cap, csr, kv_dtype, share_from or "
                "deterministic"
            )
        return LatentKernels(self, tile)

    def _check_run(self, operands: Operands) -> None:
        super()._check_run(operands)
        check_latent(operands.k_cache, operands.v_cache)


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
        See `specattn.kernels.attention.extend_attention`.

    Raises
    ------
    ValueError
        If a shape or dtype disagrees with the above, or ``v_cache`` is no such view.
    """
    check_extend(q, k_cache, v_cache, out, lse)
    if k_cache.shape[1] != 1:
        raise ValueError(f"k_cache must have one head, got {k_cache.shape[1]}")
    check_latent(k_cache, v_cache)
    if not len(q):
        return
    heads, head_dim = q.shape[1:]
    tile = mla_extend_tile_config(q.dtype, DeviceLimits.of(q.device))
    launch.mla_extend_kernel[cdiv(max_q_len * heads, tile.block_m), len(seq_lens)](
        q,
        k_cache,
        out,
        lse,
        qo_indptr,
        seq_lens,
        req_pool_indices,
        req_to_token,
        logit_factors(sm_scale, 0.0)[0],
        req_to_token.stride(0),
        *row_strides(q),
        *row_strides(out),
        *row_strides(lse),
        SLOT=k_cache.stride(0),
        WIDTHS=latent_widths(head_dim, out.shape[2]),
        HEADS=heads,
        BM=tile.block_m,
        BN=tile.block_n,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def check_latent(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise a ValueError unless values are a view of the latent keys."""
    if v_cache.data_ptr() != k_cache.data_ptr() or v_cache.stride() != k_cache.stride():
        raise ValueError(
            f"v_cache must be k_cache[..., :{v_cache.shape[-1]}], a view, "
            f"got memory or strides of its own"
        )
