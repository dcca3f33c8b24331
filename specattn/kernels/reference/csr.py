"""Twin of `specattn.kernels.csr`."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_lists(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    tail_slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    window_left: int,
) -> None:
    """See `specattn.kernels.csr.fill_lists`."""
    batch, tail = tail_slots.shape
    begin, end = kv_indptr[:batch].long(), kv_indptr[1 : batch + 1].long()
    entry = torch.arange(len(kv_indices), device=kv_indices.device)
    request = torch.searchsorted(end, entry, right=True)
    used, request = request < batch, request.clamp(max=batch - 1)
    length, prefix = (end - begin)[request], seq_lens.long()[request]
    key = entry - begin[request] + prefix + tail - length
    width = req_to_token.shape[1]
    slots = req_to_token[req_pool_indices[request], key.clamp(0, width - 1)]
    if tail:
        late = tail_slots[request, (key - prefix).clamp(0, tail - 1)]
        slots = torch.where(key < prefix, slots, late)
    if window_left >= 0:
        unseen = key < torch.minimum(positions.amin(1)[request] - window_left, prefix)
        slots = torch.where(unseen, tail_slots[request, -1], slots)
    kv_indices.copy_(torch.where(used, slots, kv_indices))


def pack_masks(
    kv_indptr: Tensor,
    mask_indptr: Tensor,
    seq_lens: Tensor,
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
    place = seq_lens.long()[request] + node  # a prefix key's position is its place
    key = node.clamp(min=0)
    seen = (node < 0) | ((tail_words[request, query, key // 64] >> key % 64 & 1) != 0)
    if window_left >= 0:
        there = torch.where(node < 0, place, tail_positions[request, key])
        ago = positions[request, query] - there
        seen &= (ago >= 0) & (ago <= window_left)
    bits = (seen & inside) << torch.arange(8, device=mask.device)
    mask.copy_(torch.where(used, bits.sum(1).to(torch.uint8), mask))
