"""Twin of `specattn.kernels.csr`."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_lists(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    tail_slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    """See `specattn.kernels.csr.fill_lists`."""
    batch, tail = tail_slots.shape
    begin, end = kv_indptr[:batch].long(), kv_indptr[1 : batch + 1].long()
    entry = torch.arange(len(kv_indices), device=kv_indices.device)
    request = torch.searchsorted(end, entry, right=True)
    used, request = request < batch, request.clamp(max=batch - 1)
    column, prefix = entry - begin[request], (end - begin)[request] - tail
    width = req_to_token.shape[1]
    slots = req_to_token[req_pool_indices[request], column.clamp(0, width - 1)]
    if tail:
        late = tail_slots[request, (column - prefix).clamp(0, tail - 1)]
        slots = torch.where(column < prefix, slots, late)
    kv_indices.copy_(torch.where(used, slots, kv_indices))


def pack_masks(
    kv_indptr: Tensor,
    mask_indptr: Tensor,
    positions: Tensor,
    tail_positions: Tensor,
    tail_words: Tensor,
    mask: Tensor,
    window_left: int,
) -> None:
    """See `specattn.kernels.csr.pack_masks`."""
    batch, q_len, _ = tail_words.shape
    begin, end = mask_indptr[:batch].long(), mask_indptr[1 : batch + 1].long()
    byte = torch.arange(len(mask), device=mask.device)
    request = torch.searchsorted(end, byte, right=True)
    used, request = request < batch, request.clamp(max=batch - 1)[:, None]
    cell = (byte - begin[request[:, 0]])[:, None] * 8 + torch.arange(8, device=mask.device)
    length = (kv_indptr[1:] - kv_indptr[:-1]).long()[request]  # [bytes, 1]
    query, column = cell // length, cell % length
    inside = used[:, None] & (query < q_len)
    query = torch.where(inside, query, 0)
    node = column - (length - tail_positions.shape[1])
    key = node.clamp(min=0)
    seen = (node < 0) | ((tail_words[request, query, key // 64] >> key % 64 & 1) != 0)
    if window_left >= 0:
        there = torch.where(node < 0, column, tail_positions[request, key])
        ago = positions[request, query] - there
        seen &= (ago >= 0) & (ago <= window_left)
    bits = (seen & inside) << torch.arange(8, device=mask.device)
    mask.copy_(torch.where(used, bits.sum(1).to(torch.uint8), mask))
