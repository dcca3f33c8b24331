"""Index lists, tables and masks, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_window(
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    slots_out: Tensor,
    positions_out: Tensor | None,
    accept_lens: Tensor | None,
    last_rows_out: Tensor | None,
    after_out: Tensor | None,
) -> None:
    (batch, width), context = slots_out.shape, req_to_token.shape[1]
    length = seq_lens.long()
    columns = length[:, None] + torch.arange(width, device=rows.device)  # [B, W]
    found = req_to_token[rows[:, None], columns.clamp(max=context - 1)]
    slots_out.copy_(torch.where(columns < context, found, 0))
    if positions_out is not None:
        depth = torch.arange(positions_out.shape[1], device=rows.device)
        positions_out.copy_((length[:, None] + depth)[:, :, None])
    if accept_lens is not None:
        assert last_rows_out is not None
        assert after_out is not None
        first = torch.arange(batch, device=rows.device) * width
        last_rows_out.copy_(first + accept_lens.clamp(min=1) - 1)
        after_out.copy_(length + accept_lens)


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


def fill_block_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    page_size: int,
    lists: int,
) -> None:
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
    page_size: int,
    block_stride: int,
) -> None:
    room = min(req_to_token.shape[1], block_table.shape[1] * page_size)
    length = torch.where(rows != 0, lens.clamp(0, room), 0)
    reserved[rows] = length
    place = torch.arange(room, device=rows.device)
    slots = block_table[:, place // page_size] * block_stride + place % page_size  # [B, room]
    kept = req_to_token[rows, :room]
    req_to_token[rows, :room] = torch.where(place < length[:, None], slots.to(kept), kept)


def fill_page_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    q_len: int,
    window_left: int,
) -> None:
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


def fill_draft_kv(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    branch_slots: Tensor,
    words: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    batch, steps, topk, _ = words.shape
    max_len = req_to_token.shape[1]
    lens = seq_lens.clamp(0, max_len).long().repeat_interleave(topk)  # [B * topk]
    rows = req_pool_indices.repeat_interleave(topk)
    entry = torch.arange(batch * topk * (max_len + steps), device=lens.device)
    for step in range(steps):
        kv_indptr[step, 0] = 0
        kv_indptr[step, 1:] = (lens + step + 1).cumsum(0)
        branch = torch.searchsorted(kv_indptr[step, 1:].contiguous(), entry, right=True)
        used = branch < len(lens)
        branch = branch.clamp(max=len(lens) - 1)
        column = entry - kv_indptr[step].long()[branch]
        prefix = req_to_token[rows[branch], column.clamp(0, max_len - 1)]
        line = kv_indices[step, : len(entry)]
        line.copy_(torch.where(used & (column < lens[branch]), prefix, line))
        fill_draft_tails(step, seq_lens, branch_slots, words, kv_indptr, kv_indices)


def fill_draft_tails(
    step: int,
    seq_lens: Tensor,
    branch_slots: Tensor,
    words: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    topk = words.shape[2]
    tails = _ancestor_slots(step, branch_slots, words).flatten(0, 1)  # [B * topk, step + 1]
    begin, end = kv_indptr[step, :-1].long(), kv_indptr[step, 1:].long()
    lens = seq_lens.long().clamp(min=0).repeat_interleave(topk)
    at = begin + torch.minimum(lens, end - begin - step - 1)
    at = at[:, None] + torch.arange(step + 1, device=at.device)
    kv_indices[step].index_copy_(0, at.flatten(), tails.flatten())


def _ancestor_slots(step: int, branch_slots: Tensor, words: Tensor) -> Tensor:
    """Return slots ``[B, topk, step + 1]`` of set bits, then 0."""
    batch, _, topk = branch_slots.shape
    nodes = torch.arange((step + 1) * topk, device=words.device)
    word = words[:, step][:, :, nodes // 64]  # [B, topk, nodes]
    seen = (word >> nodes % 64 & 1) != 0
    rank = torch.where(seen, seen.long().cumsum(2) - 1, step + 1).clamp(max=step + 1)
    slots = branch_slots.flatten(1)[:, None, : len(nodes)].expand(-1, topk, -1)
    tails = torch.zeros(batch, topk, step + 2, dtype=slots.dtype, device=slots.device)
    return tails.scatter_(2, rank, slots)[:, :, :-1]
