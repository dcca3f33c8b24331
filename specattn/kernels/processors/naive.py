"""Logits processors in torch, without a synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels.processors.kinds import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    BITMASK,
    ENDS,
    PENALTIES,
)


def process_logits(
    logits: Tensor,
    tokens: Tensor,
    words: Tensor,
    positions: Tensor,
    rows: Tensor,
    bitmask: Tensor | None,
    kinds: Tensor,
    history: Tensor,
    penalties: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    bad_words: Tensor,
    recent: Tensor,
    allowed: Tensor,
    end_ids: Tensor,
    ends_from: Tensor,
) -> Tensor:
    _, nodes, vocab = logits.shape
    scores, kind = logits.float(), kinds[rows][:, None, None]  # [B, 1, 1]
    path = _path(words, nodes)  # [B, n, n]

    def where(bit: int, processed: Tensor) -> Tensor:
        return torch.where((kind & bit) != 0, processed, scores)

    biased = _scatter(scores, bias_ids[rows][:, None], bias_values[rows][:, None])
    scores = where(BIAS, biased)
    scores = where(PENALTIES, _penalised(scores, tokens, path, history[rows], penalties[rows]))
    banned = _completing(tokens, path, bad_words[rows], recent[rows])
    scores = where(BAD_WORDS, _scatter(scores, banned, None))
    scores = where(ALLOWED, scores.masked_fill(~_bits(allowed[rows], vocab)[:, None], -torch.inf))
    if bitmask is not None:
        scores = where(BITMASK, scores.masked_fill(~_bits(bitmask, vocab), -torch.inf))
    early = (positions + 1 < ends_from[rows][:, None])[..., None]  # [B, n, 1]
    ends = torch.where(early, end_ids[rows][:, None], -1)  # [B, n, E]
    return where(ENDS, _scatter(scores, ends, None))


def _path(words: Tensor, nodes: int) -> Tensor:
    """Return which nodes lie on each node's path, but for node 0."""
    bits = words[..., None] >> torch.arange(64, device=words.device) & 1  # [B, n, W, 64]
    path = bits.flatten(2)[..., :nodes].bool()
    path[..., 0] = False
    return path


def _penalised(
    scores: Tensor, tokens: Tensor, path: Tensor, history: Tensor, penalties: Tensor
) -> Tensor:
    vocab = scores.shape[2]
    on_path = torch.zeros_like(scores).scatter_add_(
        2, tokens[:, None].expand_as(path).clamp(0, vocab - 1), path.to(scores.dtype)
    )
    emitted = (history >> 1)[:, None] + on_path  # [B, n, V]
    repetition, frequency, presence = penalties[:, None, None].unbind(-1)
    seen = (emitted > 0) | (history != 0)[:, None]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    return scores - frequency * emitted - presence * (emitted > 0)


def _completing(tokens: Tensor, path: Tensor, bad_words: Tensor, recent: Tensor) -> Tensor:
    """Return the tokens ``[B, n, S]`` that complete sequences, or -1."""
    batch, nodes, _ = path.shape
    # a path's tokens, the last first: where a key is larger, a node is further down
    place = torch.arange(nodes, device=tokens.device).expand_as(path)
    order = torch.where(path, place, -1).sort(dim=2, descending=True)
    own = tokens[:, None].expand_as(path).gather(2, order.indices)  # [B, n, n]
    depth = path.sum(2)[..., None]  # [B, n, 1]
    at = torch.arange(recent.shape[1], device=tokens.device).expand(batch, nodes, -1)
    before = recent[:, None].expand_as(at).gather(2, (at - depth).clamp(min=0))
    ahead = own.gather(2, at.clamp(max=nodes - 1))
    text = torch.where(at < depth, ahead, before)[:, :, None]  # [B, n, 1, M - 1]
    prefix = bad_words[:, None, :, :-1].flip(3)  # [B, 1, S, M - 1]
    complete = ((prefix == -1) | (prefix == text)).all(3)
    return torch.where(complete, bad_words[:, None, :, -1], -1)


def _scatter(scores: Tensor, ids: Tensor, values: Tensor | None) -> Tensor:
    """Add values, or -inf, to logits of tokens; -1 is none."""
    vocab, ids = scores.shape[2], ids.expand(*scores.shape[:2], -1).long()
    wide = torch.nn.functional.pad(scores, (0, 1))
    ids = torch.where(ids < 0, vocab, ids)
    if values is None:
        return wide.scatter(2, ids, -torch.inf)[..., :vocab]
    return wide.scatter_add(2, ids, values.expand(ids.shape))[..., :vocab]


def _bits(words: Tensor, vocab: int) -> Tensor:
    """Return a bitmask's bits, one per token."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return (words[..., None] >> shifts & 1).flatten(-2)[..., :vocab].bool()


def note_tokens(
    rows: Tensor, tokens: Tensor, lens: Tensor, kinds: Tensor, history: Tensor, recent: Tensor
) -> None:
    live = (rows != 0) & (kinds[rows] != 0)  # [B]
    for at in range(tokens.shape[1]):
        token = tokens[:, at]
        new = live & (at < lens) & (token >= 0)
        # rows that get nothing add 0; index_put adds up what padding writes to row 0
        where = (rows, torch.where(new, token, 0))
        history.index_put_(where, 2 * new.to(history.dtype), accumulate=True)
        old = recent[rows]
        moved = torch.cat([token[:, None].to(old.dtype), old[:, :-1]], 1)
        recent[rows] = torch.where(new[:, None], moved, old)
