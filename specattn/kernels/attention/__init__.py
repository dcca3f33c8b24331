"""Attend trees, index lists and prompts to paged keys; merge results.

`TreeAttention` holds what a bucket needs between steps, so it is an object; `extend_attention` and
`merge_lse` are functions. `reference` attends in torch, on any device, as a backend of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_rows, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.attention.tiles import FLOAT8, TileConfig, logit_factors
from specattn.kernels.attention.tree_attention import (
    DeterministicSplits,
    Operands,
    Prompts,
    TreeAttention,
    check_sinks,
)
from specattn.kernels.launch import cdiv, power_of_2

merge = TritonModule("specattn.kernels.attention.merges")

if TYPE_CHECKING:
    from specattn.kernels.attention import launches as launch
else:
    launch = TritonModule("specattn.kernels.attention.launches")

__all__ = ["DeterministicSplits", "TreeAttention", "check_sinks", "extend_attention", "merge_lse"]


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
    sinks: Tensor | None = None,
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
        As in `TreeAttention`.
    deterministic : bool
        Give a token the same bits however its text is cut into extends, and whatever else is in
        the batch.
    sinks : Tensor, optional
        ``[Hq]``, as in `TreeAttention.with_sinks`.
    tile : TileConfig, optional
        Overrides the tile table.

    Raises
    ------
    ValueError
        If a shape or dtype disagrees with the above.
    """
    check_extend(q, k_cache, v_cache, out, lse)
    if sinks is not None:
        check_sinks(sinks, q.shape[1], q.device)
    if not len(q):
        return
    prompts = Prompts(
        qo_indptr,
        seq_lens,
        req_pool_indices,
        max_q_len,
        # q (k_scale k): the keys' scale is a factor of the logits, whatever follows
        logit_factors(sm_scale * k_scale, logit_cap),
        window_left,
        v_scale,
        page_size,
        deterministic,
        sinks,
    )
    operands = Operands(q, k_cache, v_cache, out, lse, req_to_token)
    launch.extend_attention(operands=operands, prompts=prompts, tile=tile)


def merge_lse(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    prefix_keys: Tensor,
    tail_out: Tensor,
    tail_lse: Tensor,
    tail_keys: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    base2: bool = False,
) -> None:
    """Weigh two attention results over disjoint keys by their log-sum-exp.

    The merge of partial softmaxes by log-sum-exp is that of FlashDecoding and of cascade
    inference (Ye et al., 2024).

    Parameters
    ----------
    prefix_out, tail_out : Tensor
        ``[B, T, H, D]``, T query tokens per request, any dtype; dense last axis.
    prefix_lse, tail_lse : Tensor
        ``[B, T, H]`` float32, natural log; any strides.
    prefix_keys : Tensor
        ``[B]`` int32, keys behind every row of the request's prefix result.
    tail_keys : Tensor
        ``[B, T]`` int32, contiguous, keys behind each tail result. A result of 0 keys is not read.
    out : Tensor
        ``[B, T, H, D]``, written in place; may be ``prefix_out`` itself. A row without any key
        gets 0.
    lse : Tensor or None
        ``[B, T, H]`` float32, natural log, written in place; -inf for a row without any key.
    base2 : bool
        ``prefix_lse`` and ``tail_lse`` are log2, as FlashInfer's are; ``lse`` is natural still.
    """
    unit = math.log(2) if base2 else 1.0
    if on_triton(out):
        batch, q_len, heads, head_dim = out.shape
        block_h = min(8, power_of_2(heads))
        merge.merge_lse_kernel[batch * q_len, cdiv(heads, block_h)](
            prefix_out,
            prefix_lse,
            prefix_keys,
            tail_out,
            tail_lse,
            tail_keys,
            out,
            lse,
            q_len,
            heads,
            head_dim,
            *prefix_out.stride()[:3],
            *tail_out.stride()[:3],
            *out.stride()[:3],
            *prefix_lse.stride(),
            *tail_lse.stride(),
            *((0, 0, 0) if lse is None else lse.stride()),
            UNIT=unit,
            BLOCK_H=block_h,
            BLOCK_D=power_of_2(head_dim),
        )
        return
    nothing = float("-inf")
    has_prefix = (prefix_keys > 0)[:, None, None]  # [B, 1, 1]
    has_tail = (tail_keys > 0)[:, :, None]  # [B, T, 1]
    logs = (
        torch.stack(
            [  # [2, B, T, H]
                prefix_lse.masked_fill(~has_prefix, nothing),
                tail_lse.masked_fill(~has_tail, nothing),
            ]
        )
        * unit
    )
    total = torch.logsumexp(logs, 0)
    weights = torch.exp(logs - total.masked_fill(total == nothing, 0))[..., None]
    results = (
        prefix_out.float().masked_fill(~has_prefix[..., None], 0),
        tail_out.float().masked_fill(~has_tail[..., None], 0),
    )
    out.copy_(weights[0] * results[0] + weights[1] * results[1])
    if lse is not None:
        lse.copy_(total)


def check_extend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None
) -> None:
    """Raise a ValueError unless the tensors of a prompt extend go together."""
    tokens, heads, head_dim = q.shape
    slots, kv_heads, v_head_dim = v_cache.shape
    kv_dtype = q.dtype
    if k_cache.dtype == FLOAT8 and q.dtype != torch.float32:
        kv_dtype = FLOAT8
    if heads % kv_heads:
        raise ValueError(f"q must have a multiple of {kv_heads} heads, got {heads}")
    require_shape((slots, kv_heads, head_dim), kv_dtype, k_cache=k_cache)
    require_shape((slots, kv_heads, v_head_dim), kv_dtype, v_cache=v_cache)
    require_shape((tokens, heads, v_head_dim), q.dtype, out=out)
    require_shape((tokens, heads), torch.float32, lse=lse)
    require_rows(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
