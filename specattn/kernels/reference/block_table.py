"""Twin of `specattn.kernels.block_table`."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_block_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    page_size: int,
    lists: int = 1,
) -> None:
    """See `specattn.kernels.block_table.fill_block_table`."""
    max_len, tail = req_to_token.shape[1], tail_slots.shape[1]
    prefix = seq_lens.clamp(0, max_len).long()[:, None, None]  # [B, 1, 1]
    order = torch.arange(lists, device=table.device)[:, None]
    length = prefix + tail - (lists - 1) + order  # [B, lists, 1]
    lens.copy_(length.flatten())
    place = torch.arange(table.shape[1], device=table.device) * page_size  # [width]
    cached = req_to_token[req_pool_indices[:, None], place.clamp(max=max_len - 1)]  # [B, width]
    own = tail_slots.gather(1, (place - prefix[:, 0]).clamp(0, tail - 1))
    pages = torch.where(place < prefix[:, 0], cached, own) // page_size
    table.copy_(torch.where(place < length, pages[:, None], 0).flatten(0, 1))


def fill_slots(
    rows: Tensor,
    block_table: Tensor,
    lens: Tensor,
    req_to_token: Tensor,
    reserved: Tensor,
    *,
    page_size: int,
    block_stride: int,
) -> None:
    """See `specattn.kernels.block_table.fill_slots`."""
    room = min(req_to_token.shape[1], block_table.shape[1] * page_size)
    length = torch.where(rows != 0, lens.clamp(0, room), 0)
    reserved[rows] = length
    place = torch.arange(room, device=rows.device)
    slots = block_table[:, place // page_size] * block_stride + place % page_size  # [B, room]
    kept = req_to_token[rows, :room]
    req_to_token[rows, :room] = torch.where(place < length[:, None], slots.to(kept), kept)
