"""Prompt lookup in torch, without a synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


def lookup_tree(
    text: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    matches: int,
    min_ngram: int,
    max_ngram: int,
    num_steps: int,
    tokens_out: Tensor,
    parents_out: Tensor,
    ngrams_out: Tensor,
) -> None:
    own, last = text[rows], seq_lens[:, None].long()  # [B, context], [B, 1]
    keys = _match_keys(own, last, min_ngram, max_ngram)
    found = keys.topk(min(matches, keys.shape[1])).values  # [B, M]
    ngrams_out.copy_(found[:, 0] >> 24)
    after = (found & 0xFFFFFF) + 1  # [B, M]
    period = last - after + 1
    ahead = torch.arange(num_steps, device=text.device)
    places = after[:, :, None] + ahead % period.clamp(min=1)[:, :, None]
    places = places.clamp(max=text.shape[1] - 1)  # of what is no match
    proposed = own.gather(1, places.flatten(1)).view_as(places).long()  # [B, M, N]
    tokens, parents = _merge(proposed, found > 0, tokens_out.shape[1])
    tokens[:, :1] = own.gather(1, last).long()
    tokens_out.copy_(tokens)
    parents_out.copy_(parents)


def _match_keys(own: Tensor, last: Tensor, min_ngram: int, max_ngram: int) -> Tensor:
    """Return ``length << 24 | place`` of every place's match, or 0."""
    place = torch.arange(own.shape[1], device=own.device)
    alive = place < last  # [B, context]
    length = torch.zeros_like(own)
    for back in range(max_ngram):
        want = own.gather(1, (last - back).clamp(min=0))
        shifted = own[:, (place - back).clamp(min=0)]
        alive = alive & (place >= back) & (shifted == want)
        length += alive
    return torch.where(length >= min_ngram, length.long() << 24 | place, 0)


def _merge(proposed: Tensor, live: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return tokens and parents ``[B, nodes]`` of the tree of live proposals."""
    batch, count, steps = proposed.shape
    device = proposed.device
    depth = torch.arange(steps, device=device)
    row = torch.arange(count, device=device)
    # a column more takes what has no room
    tokens = proposed.new_zeros(batch, nodes + 1)
    parents = torch.full_like(tokens, -1)
    numbers = proposed.new_zeros(batch, count, steps)
    size = proposed.new_ones(batch)  # [B], nodes so far
    for i in range(count):
        same = (proposed == proposed[:, i : i + 1]) & live[:, :, None]
        shared = same.long().cumprod(2).sum(2)  # [B, M]
        shared = torch.where(row < i, shared, 0)
        depth_shared, nearest = shared.max(1)
        old = depth < depth_shared[:, None]  # [B, N]
        own = size[:, None] + depth - depth_shared[:, None]
        number = torch.where(old, numbers[torch.arange(batch, device=device), nearest], own)
        numbers[:, i] = number
        above = torch.cat([torch.zeros_like(number[:, :1]), number[:, :-1]], 1)
        new = ~old & live[:, i : i + 1] & (number < nodes)
        where = torch.where(new, number, nodes)
        tokens.scatter_(1, where, proposed[:, i])
        parents.scatter_(1, where, above)
        size = size + torch.where(live[:, i], steps - depth_shared, 0)
    return tokens[:, :nodes], parents[:, :nodes]


def append_text(text: Tensor, rows: Tensor, seq_lens: Tensor, tokens: Tensor, lens: Tensor) -> None:
    for at in range(tokens.shape[1]):
        place = seq_lens.long() + 1 + at
        new = (rows != 0) & (at < lens) & (place < text.shape[1])
        # the others write what is there
        place = torch.where(new, place, 0)
        old = text[rows, place]
        text[rows, place] = torch.where(new, tokens[:, at].int(), old)
