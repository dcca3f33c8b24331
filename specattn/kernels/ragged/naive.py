"""Verify lengths per request in torch, without a synchronisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.kernels.ragged.outputs import PackedRows


def share_rows(worth: Tensor, rows: Tensor, chunk: int, chunks: int, lens_out: Tensor) -> None:
    live = rows != 0
    each = worth.nan_to_num(nan=0.0).clamp(0, 1e30).unflatten(1, (-1, chunk))  # [B, C, m]
    total = each[:, 1:, 0]
    for node in range(1, chunk):  # in the order of the kernel, to the last bit
        total = total + each[:, 1:, node]
    total = total.cummin(1).values.masked_fill(~live[:, None], -1)
    order = total.T.flatten().sort(descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    more = (rank < chunks - live.sum()).view(-1, len(rows)).sum(0)
    lens_out.copy_((live + more) * chunk)


def pack_rows(
    lens: Tensor,
    seq_lens: Tensor,
    window: Tensor,
    tokens: Tensor,
    positions: Tensor,
    words: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    out: PackedRows,
) -> None:
    nodes, device = tokens.shape[1], tokens.device
    starts = lens.cumsum(0) - lens  # [B]
    out.qo_indptr[:-1] = starts
    out.qo_indptr[-1] = len(out.tokens)
    every = torch.arange(nodes, device=device)
    kept = every < lens[:, None]  # [B, n]
    seen = torch.where(kept, every, 0)
    out.tail_slots.copy_(window.gather(1, seen))
    # of a request without rows nobody asks
    out.retrieve_index.copy_((starts[:, None] + seen).clamp(max=len(out.tokens) - 1))
    nth = torch.arange(len(out.tokens), device=device)
    owner = (out.qo_indptr[None, 1:] <= nth[:, None]).sum(1)  # [R]
    at = owner, nth - starts[owner]
    out.requests.copy_(owner)
    for to, of in ((out.tokens, tokens), (out.positions, positions), (out.slots, window)):
        to.copy_(of[at])

    for links in (next_token, next_sibling):
        links.masked_fill_(~kept | (links >= lens[:, None]), -1)
    positions.copy_(torch.where(kept, positions, seq_lens[:, None]))
    word = torch.arange(words.shape[2], device=device)
    own = torch.where(word == every[:, None] // 64, 1 << every[:, None] % 64, 0)  # [n, W]
    words.copy_(torch.where(kept[:, :, None], words, own))
