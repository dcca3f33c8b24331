"""Attention in plain torch: what the kernels compute, and the `torch_native` backend.

Vectorised over the batch, float32 inside for half and float8 inputs. A key no query sees is never
used, whatever its slot holds (0 × NaN is NaN, so masking the logits alone would not do).

All take as options the scale ``sm_scale``, and ``logit_cap``, ``k_scale``, ``v_scale``, ``sinks``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specattn.autocast import without_autocast


def gather(cache: Tensor, slots: Tensor, seen: Tensor, scale: float = 1.0) -> Tensor:
    """Return rows as ``[B, heads, N, dim]``; zeros where not ``seen``."""
    rows = cache[slots.long().masked_fill(~seen, 0)]
    rows = rows.to(torch.float64 if cache.dtype == torch.float64 else torch.float32)
    rows = rows.masked_fill_(~seen[..., None, None], 0)
    return (rows if scale == 1 else rows * scale).transpose(1, 2)


@without_autocast
def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    slots: Tensor,
    visible: Tensor,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> None:
    """Attend ``q [B, T, Hq, D]`` to ``slots [B, N]``, masked.

    The mask is ``visible [B, T, N]``; ``out`` and ``lse`` have ``B * T`` rows. ``k_scale`` and
    ``v_scale`` multiply the caches' contents; ``sinks [Hq]`` are those of
    `TreeAttention.with_sinks`.
    """
    batch, q_len, heads, _ = q.shape
    kv_heads = k_cache.shape[1]
    seen = visible.any(1)  # [B, N]
    k = gather(k_cache, slots, seen, k_scale)  # [B, Hkv, N, D]
    v = gather(v_cache, slots, seen, v_scale)  # [B, Hkv, N, Dv]
    queries = q.to(k.dtype).transpose(1, 2)  # [B, Hq, T, D]
    if lse is None and not logit_cap and sinks is None and slots.shape[1]:
        values = scaled_dot_product_attention(
            queries, k, v, attn_mask=visible[:, None], scale=sm_scale, enable_gqa=True
        )
        blind = ~visible.any(2)[:, None, :, None]  # [B, 1, T, 1]
        out.copy_(values.masked_fill(blind, 0).transpose(1, 2).reshape(out.shape))
        return

    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, q_len, -1)
    logits = grouped @ k[:, :, None].transpose(-1, -2) * sm_scale  # [B, Hkv, G, T, N]
    if logit_cap:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.masked_fill(~visible[:, None, None], float("-inf"))
    sums = torch.logsumexp(logits, -1, keepdim=True)
    if sinks is not None:
        # a logit of each head that has no value: [Hkv, G, 1, 1]
        sums = torch.logaddexp(sums, sinks.to(sums.dtype).view(kv_heads, -1, 1, 1))
    weights = torch.exp(logits - sums.masked_fill(sums == float("-inf"), 0))
    values = (weights @ v[:, :, None]).reshape(batch, heads, q_len, -1)
    out.copy_(values.transpose(1, 2).reshape(out.shape))
    if lse is not None:
        lse.copy_(sums.reshape(batch, heads, q_len).transpose(1, 2).reshape(lse.shape))


def _in_window(pos_q: Tensor, pos_k: Tensor, window_left: int) -> Tensor:
    """Return ``[B, T, N]``: whether ``pos_k [B, N]`` is in ``pos_q``'s window."""
    distance = pos_q[:, :, None] - pos_k[:, None, :]
    return (distance >= 0) & (distance <= window_left)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    positions: Tensor | None,
    tail_slots: Tensor,
    tail_positions: Tensor | None,
    tail_words: Tensor,
    window_left: int = -1,
    max_prefix_len: int | None = None,
    **options: Any,
) -> None:
    """Attend query tokens to their request's prefix and tail.

    The arguments are those of `TreeAttention` and of its ``plan`` and ``run``. Prefixes are read
    from ``req_to_token [rows, C]``; ``max_prefix_len`` bounds ``seq_lens``, and without it the
    longest is read from the device.
    """
    batch, tail_len = tail_slots.shape
    q_len = q.shape[0] // batch
    if max_prefix_len is None:
        max_prefix_len = int(seq_lens.max())
    place = torch.arange(max_prefix_len, device=q.device)
    slots = torch.cat([req_to_token[req_pool_indices, :max_prefix_len], tail_slots], 1)
    bit = torch.arange(tail_len, device=q.device)
    words = tail_words.reshape(batch, q_len, -1)[:, :, bit // 64]  # [B, T, tail]
    in_prefix = (place < seq_lens[:, None])[:, None].expand(batch, q_len, -1)
    visible = torch.cat([in_prefix, (words >> (bit % 64)) & 1 != 0], 2)  # [B, T, N]
    if window_left >= 0:
        if positions is None or tail_positions is None:
            raise ValueError("positions and tail_positions must be given with a window")
        pos_k = torch.cat([place.expand(batch, -1), tail_positions], 1)
        visible = visible & _in_window(positions, pos_k, window_left)
    _attend(
        q.view(batch, q_len, *q.shape[1:]),
        k_cache,
        v_cache,
        out,
        lse,
        slots,
        visible,
        **options,
    )


def csr_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    window_left: int = -1,
    **options: Any,
) -> None:
    """Attend each query row to its own index list.

    Row i of ``q [rows, Hq, D]`` attends to ``kv_indices[kv_indptr[i] : kv_indptr[i + 1]]``, int32
    both. A key's position is its place in the list, the query's that of the last key.
    """
    begin = kv_indptr[:-1, None].long()
    lens = kv_indptr[1:, None] - kv_indptr[:-1, None]  # [rows, 1]
    place = torch.arange(int(lens.max()), device=q.device)  # [N]
    visible = place < lens
    if window_left >= 0:
        visible = visible & (lens - 1 - place <= window_left)
    slots = kv_indices[(begin + place).masked_fill(~visible, 0)] if len(place) else begin[:, :0]
    _attend(
        q[:, None],
        k_cache,
        v_cache,
        out,
        lse,
        slots,
        visible[:, None],
        **options,
    )


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
    window_left: int = -1,
    **options: Any,
) -> None:
    """See `specattn.kernels.attention.extend_attention`."""
    ends, prefixes = qo_indptr.tolist(), seq_lens.tolist()
    for b, prefix in enumerate(prefixes):
        rows = slice(ends[b], ends[b + 1])
        kv_len = prefix + rows.stop - rows.start
        if rows.stop == rows.start:
            continue
        place = torch.arange(kv_len, device=q.device)
        causal = _in_window(
            place[None, prefix:], place[None], window_left if window_left >= 0 else kv_len
        )
        _attend(
            q[None, rows],
            k_cache,
            v_cache,
            out[rows],
            None if lse is None else lse[rows],
            req_to_token[req_pool_indices[b], None, :kv_len],
            causal,
            **options,
        )
