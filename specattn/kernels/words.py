"""Ancestor words of bool masks and of nodes, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_words(seen: Tensor, count: int) -> Tensor:
    """Write ``[B, n, keys]`` bool as ``[B, n, count]`` int64 words."""
    key = torch.arange(seen.shape[2], device=seen.device)
    words = torch.zeros(*seen.shape[:2], count, dtype=torch.int64, device=seen.device)
    # distinct bits: their sum is their union, and the sign bit wraps into place
    return words.index_add_(2, key // 64, seen.long() << key % 64)


def unpack_words(words: Tensor, keys: int) -> Tensor:
    """Return ``[..., keys]`` bool: the first bits of words."""
    key = torch.arange(keys, device=words.device)
    return (words[..., key // 64] >> key % 64 & 1) != 0


def seen_slots(words: Tensor, slots: Tensor, spare: Tensor) -> Tensor:
    """Return ``[B, n, width]`` slots of set bits, then what ``spare`` holds.

    Words are ``[B, n, W]``, slots ``[B, keys]``; ``spare``, of the result's shape, is what stays
    behind the last of them. Bits without room are left out.
    """
    seen, width = unpack_words(words, slots.shape[1]), spare.shape[2]
    # what is not listed lands in a column more
    rank = torch.where(seen, seen.long().cumsum(2) - 1, width).clamp(max=width)
    listed = torch.cat([spare, spare[..., :1]], 2)
    return listed.scatter_(2, rank, slots[:, None].expand_as(rank))[..., :-1]


def node_bits(nodes: Tensor, num_words: int) -> Tensor:
    """Return words ``[..., num_words]`` with just each node's bit."""
    words = torch.arange(num_words, device=nodes.device)
    bits = torch.ones_like(nodes) << nodes % 64
    return torch.where(words == nodes[..., None] // 64, bits[..., None], 0)
