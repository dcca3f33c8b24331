"""Trees such as a draft grows them, as ancestor bits."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random


def grow(topk: int, steps: int, nodes: int, rng: random.Random) -> list[int]:
    """Return each node's parent; the root, node 0, has -1.

    Every step expands the ``topk`` best nodes of the last by ``topk`` children each; the best
    ``nodes - 1`` of all stay (EAGLE-2, arXiv:2406.16858). A child scores below its parent, so a
    node's parent stays with it.
    """
    found = [(rng.random(), -1) for _ in range(topk)]  # score and parent among the candidates
    beam = list(range(topk))
    for _ in range(steps - 1):
        fresh = range(len(found), len(found) + len(beam) * topk)
        found += [(found[b][0] * rng.random(), b) for b in beam for _ in range(topk)]
        beam = heapq.nlargest(topk, fresh, key=lambda i: found[i][0])
    if nodes - 1 > len(found):
        raise ValueError(f"nodes must be at most {len(found) + 1}, got {nodes}")
    kept = sorted(heapq.nlargest(nodes - 1, range(len(found)), key=lambda i: found[i][0]))
    place = {candidate: node for node, candidate in enumerate(kept, 1)} | {-1: 0}
    return [-1, *(place[found[candidate][1]] for candidate in kept)]


def branch(topk: int, step: int, rng: random.Random) -> list[int]:
    """Return the parents of a draft's nodes: ``topk`` per step, the first ones without."""
    return [
        -1 if node < topk else (node // topk - 1) * topk + rng.randrange(topk)
        for node in range(topk * (step + 1))
    ]


def chain(length: int) -> list[int]:
    return list(range(-1, length - 1))


def ancestry(parents: list[int]) -> tuple[list[int], list[int]]:
    """Return each node's bits (its own and its ancestors') and depth."""
    bits: list[int] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        bits.append(1 << node | (bits[parent] if parent >= 0 else 0))
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return bits, depths


def signed_words(bits: int, tail: int) -> list[int]:
    """Cut bits into int64 words."""
    words = [bits >> 64 * w & 2**64 - 1 for w in range(-(-tail // 64))]
    return [word - 2**64 if word >> 63 else word for word in words]
