"""Twin of `specattn.kernels.page_table`."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_page_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    q_len: int,
    window_left: int = -1,
) -> None:
    """See `specattn.kernels.page_table.fill_page_table`."""
    tail, width = tail_slots.shape[1], table.shape[1]
    prefix = seq_lens.clamp(0, req_to_token.shape[1]).long()[:, None]  # [B, 1]
    start = torch.zeros_like(prefix)
    if window_left >= 0:
        start = (prefix + tail - q_len - window_left).clamp(min=0)
    lens.copy_((prefix + tail - start).squeeze(1).clamp(max=width))
    place = start + torch.arange(width, device=table.device)  # [B, width]
    cached = req_to_token[req_pool_indices[:, None], place.clamp(max=req_to_token.shape[1] - 1)]
    own = tail_slots.gather(1, (place - prefix).clamp(0, tail - 1))
    slots = torch.where(place < prefix, cached, own)
    table.copy_(torch.where(place < prefix + tail, slots, table))


def fill_ancestor_table(
    tail_slots: Tensor, tail_words: Tensor, table: Tensor, lens: Tensor
) -> None:
    """See `specattn.kernels.page_table.fill_ancestor_table`."""
    batch, tail = tail_slots.shape
    q_len = tail_words.shape[1]
    bit = torch.arange(tail, device=table.device)
    seen = (tail_words[:, :, bit // 64] >> (bit % 64) & 1) != 0  # [B, q_len, tail]
    seen = seen.flatten(0, 1)
    lens.copy_(seen.sum(1))
    # keys nobody sees all land in an extra column
    rank = torch.where(seen, seen.long().cumsum(1) - 1, tail)
    slots = tail_slots[:, None].expand(batch, q_len, tail).flatten(0, 1)
    packed = torch.cat([table, table[:, :1]], 1).scatter_(1, rank, slots)
    table.copy_(packed[:, :tail])
