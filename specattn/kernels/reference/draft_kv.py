"""Twin of `specattn.kernels.draft_kv`, and the sizes of both."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_kv_width(batch: int, topk: int, max_context_len: int, step_count: int) -> int:
    """Return how many entries a row of ``kv_indices`` needs for any lengths of ``batch`` requests.

    Raises
    ------
    ValueError
        If that is more than int32 offsets can address.
    """
    width = batch * topk * (max_context_len + step_count)
    if width >= 2**31:
        raise ValueError(
            f"kv_indices of {batch} requests x {topk} branches x {max_context_len} tokens needs "
            f"{width} entries per step, int32 offsets reach {2**31 - 1}"
        )
    return width


def check_lists(
    branch_slots: Tensor, words: Tensor, kv_indptr: Tensor, kv_indices: Tensor, max_len: int
) -> None:
    """Raise ValueError, before anything is written, unless lists of full rows fit."""
    batch, steps, topk, num_words = words.shape
    if branch_slots.shape != (batch, steps, topk) or num_words * 64 < steps * topk:
        raise ValueError(
            f"branch_slots {tuple(branch_slots.shape)} and words {tuple(words.shape)} disagree"
        )
    width = draft_kv_width(batch, topk, max_len, steps)
    if kv_indices.shape[0] != steps or kv_indices.shape[1] < width:
        raise ValueError(
            f"kv_indices must be [{steps}, at least {width}], got {list(kv_indices.shape)}"
        )
    if kv_indptr.shape != (steps, batch * topk + 1):
        raise ValueError(
            f"kv_indptr must be [{steps}, {batch * topk + 1}], got {list(kv_indptr.shape)}"
        )


def fill_draft_kv(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    branch_slots: Tensor,
    words: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    """See `specattn.kernels.draft_kv.fill_draft_kv`."""
    batch, steps, topk, _ = words.shape
    max_len = req_to_token.shape[1]
    check_lists(branch_slots, words, kv_indptr, kv_indices, max_len)
    if not batch:
        kv_indptr.zero_()
        return
    lens = seq_lens.clamp(0, max_len).long().repeat_interleave(topk)  # [B * topk]
    rows = req_pool_indices.repeat_interleave(topk)
    entry = torch.arange(draft_kv_width(batch, topk, max_len, steps), device=lens.device)
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
    """See `specattn.kernels.draft_kv.fill_draft_tails`."""
    topk = words.shape[2]
    tails = _ancestor_slots(step, branch_slots, words).flatten(0, 1)  # [B * topk, step + 1]
    begin, end = kv_indptr[step, :-1].long(), kv_indptr[step, 1:].long()
    lens = seq_lens.long().clamp(min=0).repeat_interleave(topk)
    at = begin + torch.minimum(lens, end - begin - step - 1)
    at = at[:, None] + torch.arange(step + 1, device=at.device)
    kv_indices[step].index_copy_(0, at.flatten(), tails.flatten())


def _ancestor_slots(step: int, branch_slots: Tensor, words: Tensor) -> Tensor:
    """Return ``[B, topk, step + 1]`` slots of each branch's set bits, 0 where bits are missing."""
    batch, _, topk = branch_slots.shape
    nodes = torch.arange((step + 1) * topk, device=words.device)
    word = words[:, step][:, :, nodes // 64]  # [B, topk, nodes]
    seen = (word >> nodes % 64 & 1) != 0
    rank = torch.where(seen, seen.long().cumsum(2) - 1, step + 1).clamp(max=step + 1)
    slots = branch_slots.flatten(1)[:, None, : len(nodes)].expand(-1, topk, -1)
    tails = torch.zeros(batch, topk, step + 2, dtype=slots.dtype, device=slots.device)
    return tails.scatter_(2, rank, slots)[:, :, :-1]
