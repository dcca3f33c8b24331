"""Attention in plain torch: what the kernels compute, and the `torch_native` backend.

Vectorised over the batch, float32 inside for half and float8 inputs. A key no query sees is never
used, whatever its slot holds (0 × NaN is NaN, so masking the logits alone would not do).

What queries see follows from the plan and the window, so layers share it: `tree_views`, `csr_views`
and `extend_views` find it. `attend` is what each layer does; its options are the scale
``sm_scale``, and ``logit_cap``, ``k_scale``, ``v_scale``, ``sinks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specattn.autocast import without_autocast

if TYPE_CHECKING:
    from collections.abc import Sequence


class View(NamedTuple):
    """What rows of q see: T of each of B requests.

    Parameters
    ----------
    rows : slice
        The rows of q, ``B * T`` of them.
    slots : Tensor
        ``[B, N]``, the slots of the keys; 0 where ``hidden``.
    visible : Tensor
        ``[B, T, N]`` bool.
    hidden : Tensor or None
        ``[B, N]`` bool: keys that no query sees, if there are any.
    blind : Tensor or None
        ``[B, T]`` bool: queries that see no key, if there are any.
    """

    rows: slice
    slots: Tensor
    visible: Tensor
    hidden: Tensor | None
    blind: Tensor | None

    @classmethod
    def of(cls, rows: slice, slots: Tensor, visible: Tensor) -> View:
        """Derive the rest from slots and mask; waits for the device."""
        hidden, blind = ~visible.any(1), ~visible.any(2)
        return cls(
            rows,
            slots.masked_fill(hidden, 0),
            visible,
            hidden if hidden.any() else None,
            blind if blind.any() else None,
        )


def gather(cache: Tensor, slots: Tensor, seen: Tensor) -> Tensor:
    """Return rows as ``[B, heads, N, dim]``; zeros where not ``seen``."""
    return _rows(cache, slots.masked_fill(~seen, 0), ~seen)


def _rows(cache: Tensor, slots: Tensor, hidden: Tensor | None, scale: float = 1.0) -> Tensor:
    """Return what `gather` does, of slots that are 0 where ``hidden``."""
    if cache.dtype.itemsize == 1:  # not every device selects float8
        rows = cache[slots]
    else:
        rows = cache.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])
    rows = rows.to(torch.float64 if cache.dtype == torch.float64 else torch.float32)
    if hidden is not None:
        rows = rows.masked_fill_(hidden[..., None, None], 0)
    return (rows if scale == 1 else rows * scale).transpose(1, 2)


@without_autocast
def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    views: Sequence[View],
    **options: Any,
) -> None:
    """Attend the rows of each view, and no others."""
    for view in views:
        sums = None if lse is None else lse[view.rows]
        _attend(q[view.rows], k_cache, v_cache, out[view.rows], sums, view, **options)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    view: View,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> None:
    """Attend ``q [B * T, Hq, D]`` as its view says.

    ``k_scale`` and ``v_scale`` multiply the caches' contents; ``sinks [Hq]`` are those of
    `TreeAttention.with_sinks`.
    """
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    batch, q_len, keys = view.visible.shape
    k = _rows(k_cache, view.slots, view.hidden, k_scale)  # [B, Hkv, N, D]
    v = _rows(v_cache, view.slots, view.hidden, v_scale)  # [B, Hkv, N, Dv]
    queries = q.view(batch, q_len, heads, -1).to(k.dtype).transpose(1, 2)  # [B, Hq, T, D]
    if lse is None and not logit_cap and sinks is None and keys:
        values = scaled_dot_product_attention(
            queries, k, v, attn_mask=view.visible[:, None], scale=sm_scale, enable_gqa=True
        )
        if view.blind is not None:
            values = values.masked_fill(view.blind[:, None, :, None], 0)
        out.copy_(values.transpose(1, 2).reshape(out.shape))
        return

    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, q_len, -1)
    logits = grouped @ k[:, :, None].transpose(-1, -2) * sm_scale  # [B, Hkv, G, T, N]
    if logit_cap:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.masked_fill(~view.visible[:, None, None], float("-inf"))
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


def tree_views(
    *,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    positions: Tensor | None,
    tail_slots: Tensor,
    tail_positions: Tensor | None,
    tail_words: Tensor,
    window_left: int = -1,
) -> list[View]:
    """Find that query tokens see their request's prefix and tail.

    The arguments are those of `TreeAttention` and of its ``plan`` and ``run``. Prefixes are read
    from ``req_to_token [rows, C]``, as far as the longest goes.
    """
    batch, q_len, _ = tail_words.shape
    longest = int(seq_lens.max())
    place = torch.arange(longest, device=seq_lens.device)
    slots = torch.cat([req_to_token[req_pool_indices, :longest], tail_slots], 1)
    bit = torch.arange(tail_slots.shape[1], device=seq_lens.device)
    words = tail_words[:, :, bit // 64]  # [B, T, tail]
    in_prefix = (place < seq_lens[:, None])[:, None].expand(batch, q_len, -1)
    visible = torch.cat([in_prefix, (words >> (bit % 64)) & 1 != 0], 2)  # [B, T, N]
    if window_left >= 0:
        if positions is None or tail_positions is None:
            raise ValueError("positions and tail_positions must be given with a window")
        pos_k = torch.cat([place.expand(batch, -1), tail_positions], 1)
        visible = visible & _in_window(positions, pos_k, window_left)
    return [View.of(slice(None), slots, visible)]


def csr_views(*, kv_indptr: Tensor, kv_indices: Tensor, window_left: int = -1) -> list[View]:
    """Find that each query row sees its own index list.

    Row i sees ``kv_indices[kv_indptr[i] : kv_indptr[i + 1]]``, int32 both. A key's position is its
    place in the list, the query's that of the last key.
    """
    begin = kv_indptr[:-1, None].long()
    lens = kv_indptr[1:, None] - kv_indptr[:-1, None]  # [rows, 1]
    place = torch.arange(int(lens.max()), device=kv_indptr.device)  # [N]
    visible = place < lens
    if window_left >= 0:
        visible = visible & (lens - 1 - place <= window_left)
    slots = kv_indices[(begin + place).masked_fill(~visible, 0)] if len(place) else begin[:, :0]
    return [View.of(slice(None), slots, visible[:, None])]


def extend_views(
    *,
    qo_indptr: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    window_left: int = -1,
) -> list[View]:
    """Find what new tokens see; see `specattn.kernels.attention.extend_attention`."""
    ends, prefixes = qo_indptr.tolist(), seq_lens.tolist()
    views = []
    for b, prefix in enumerate(prefixes):
        rows = slice(ends[b], ends[b + 1])
        kv_len = prefix + rows.stop - rows.start
        if rows.stop == rows.start:
            continue
        place = torch.arange(kv_len, device=seq_lens.device)
        causal = _in_window(
            place[None, prefix:], place[None], window_left if window_left >= 0 else kv_len
        )
        slots = req_to_token[req_pool_indices[b], None, :kv_len]
        views.append(View.of(rows, slots, causal))
    return views
