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
    lens_out.copy_(torch.where(live, (1 + more) * chunk, 0))


def pack_rows(
    lens: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    window: Tensor,
    tokens: Tensor,
    positions: Tensor,
    words: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    index_out: Tensor,
    out: PackedRows,
) -> None:
    batch, nodes = tokens.shape
    chunks, chunk = out.tokens.shape
    device = tokens.device
    ends = (lens // chunk).cumsum(0)  # [B]
    starts = ends - lens // chunk
    nth = torch.arange(chunks, device=device)
    owner = (ends[None] <= nth[:, None]).sum(1)  # [C]
    taken = owner < batch
    owner = torch.where(taken, owner, 0)
    node = (nth - starts[owner]).clamp(0, nodes // chunk - 1)[:, None] * chunk
    node = node + torch.arange(chunk, device=device)  # [C, m]
    out.rows.copy_(torch.where(taken, rows[owner], 0))
    out.seq_lens.copy_(torch.where(taken, seq_lens[owner], 0))
    out.requests.copy_(owner)
    some = taken[:, None]
    at = owner[:, None], node
    out.tokens.copy_(torch.where(some, tokens[at], 0))
    out.positions.copy_(torch.where(some, positions[at], 0))
    out.slots.copy_(torch.where(some, window[at], 0))
    first = torch.zeros_like(words[0, :1])
    first[:, 0] = 1
    out.words.copy_(torch.where(some[:, :, None], words[at], first))
    every = torch.arange(nodes, device=device)
    seen = torch.where(every < lens[owner][:, None], every, 0)  # [C, n]
    at = owner[:, None], seen
    out.tail_slots.copy_(torch.where(some, window[at], 0))
    out.tail_positions.copy_(torch.where(some, positions[at], 0))

    kept = every < lens[:, None]  # [B, n]
    index = starts[:, None] * chunk + torch.where(kept, every, 0)
    index_out.copy_(torch.where(lens[:, None] > 0, index, 0))
    for links in (next_token, next_sibling):
        links.masked_fill_(~kept | (links >= lens[:, None]), -1)
    positions.copy_(torch.where(kept, positions, seq_lens[:, None]))
    word = torch.arange(words.shape[2], device=device)
    own = torch.where(word == every[:, None] // 64, 1 << every[:, None] % 64, 0)  # [n, W]
    words.copy_(torch.where(kept[:, :, None], words, own))
