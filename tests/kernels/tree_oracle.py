"""Draft trees in plain Python: random candidates, and what must become of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specattn.batch import AcceptResult, DraftTree

if TYPE_CHECKING:
    import random

    from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = -7_777_777


def poisoned(*shape: int, dtype: torch.dtype = torch.int64, gap: int = 0) -> Tensor:
    """Return unwritten memory, with ``gap`` columns between rows."""
    value = POISON if not dtype.is_floating_point else math.nan
    wide = torch.full((*shape[:-1], shape[-1] + gap), value, dtype=dtype, device=DEVICE)
    return wide[..., : shape[-1]]


def poisoned_tree(batch: int, n: int) -> DraftTree:
    """A tree of which nothing is written."""
    tokens, positions, first, sibling = (poisoned(batch, n) for _ in range(4))
    words, none = poisoned(batch, n, -(-n // 64)), poisoned(batch, 0, 0, dtype=torch.float32)
    return DraftTree(tokens, positions, words, first, sibling, none)


def linked_tree(
    tokens: Tensor, first: Tensor, sibling: Tensor, draft_probs: Tensor | None = None
) -> DraftTree:
    """A tree as walks read it: positions, words and rows are poisoned."""
    none = poisoned_tree(*tokens.shape)
    probs = none.draft_probs if draft_probs is None else draft_probs
    return DraftTree(tokens, none.positions, none.words, first, sibling, probs)


def as_lists(tree: DraftTree) -> dict[str, list]:
    """What building a tree writes."""
    return {
        "tokens": tree.tokens.tolist(),
        "positions": tree.positions.tolist(),
        "words": tree.words.tolist(),
        "next_token": tree.retrieve_next_token.tolist(),
        "next_sibling": tree.retrieve_next_sibling.tolist(),
    }


def poisoned_path(batch: int, steps: int) -> AcceptResult:
    """Accepted paths of which nothing is written."""
    return AcceptResult(
        poisoned(batch, steps + 1, dtype=torch.int32),
        poisoned(batch, steps + 1),
        poisoned(batch, dtype=torch.int32),
        poisoned(batch),
    )


def to_word(bits: int) -> int:
    """A 64-bit pattern as the int64 that holds it."""
    return bits - 2**64 if bits >= 2**63 else bits


@dataclass
class Tree:
    """One request's tree: per node the flat index, parent, depth, ancestors and links."""

    flat: list[int]
    parent: list[int]

    def ancestors(self, node: int) -> list[int]:
        path = [node]
        while path[-1]:
            path.append(self.parent[path[-1]])
        return path

    def depths(self) -> list[int]:
        return [len(self.ancestors(node)) - 1 for node in range(len(self.parent))]

    def words(self, num_words: int) -> list[list[int]]:
        masks = [sum(1 << a for a in self.ancestors(node)) for node in range(len(self.parent))]
        return [[to_word(m >> 64 * w & 2**64 - 1) for w in range(num_words)] for m in masks]

    def children(self, node: int) -> list[int]:
        return [c for c in range(1, len(self.parent)) if self.parent[c] == node]

    def next_token(self) -> list[int]:
        return [(self.children(node) or [-1])[0] for node in range(len(self.parent))]

    def next_sibling(self) -> list[int]:
        link = [-1] * len(self.parent)
        for node in range(len(self.parent)):
            family = self.children(node)
            for older, younger in itertools.pairwise(family):
                link[older] = younger
        return link


def parent_candidate(flat: int, parents: list[int], topk: int) -> int | None:
    """Flat parent, -1 for the root, None for an orphan."""
    group = flat // topk
    if group == 0:
        return -1
    depth_start = topk + (group - 1) // topk * topk**2
    return parents[group] if 0 <= parents[group] < depth_start else None


def tree_of(scores: list[float], parents: list[int], topk: int, n: int) -> Tree:
    """Select and link by the definition: lowest score on the path, lower index at a tie."""

    def rank(flat: int) -> tuple[int, float]:
        worst = (1, math.inf)
        here: int | None = flat
        while here is not None and here >= 0:
            score = scores[here]
            worst = min(worst, (0, 0.0) if math.isnan(score) else (1, score))
            here = parent_candidate(here, parents, topk)
        return (0, 0.0) if here is None else worst

    order = sorted(range(len(scores)), key=lambda f: ([-x for x in rank(f)], f))
    kept = sorted(order[: n - 1])
    node_of = {flat: node for node, flat in enumerate(kept, 1)}
    parent = [-1]
    for flat in kept:
        above = parent_candidate(flat, parents, topk)
        parent.append(0 if above is None or above < 0 else node_of[above])
    return Tree([-1, *kept], parent)


def random_candidates(
    rng: random.Random, topk: int, steps: int, *, ties: bool = False, broken: bool = False
) -> tuple[list[float], list[int], list[int]]:
    """Scores, tokens and parents of one request, as a drafter makes them.

    ``ties`` draws few distinct scores, NaN and 1 among them, in no relation to the path;
    ``broken`` puts arbitrary numbers among the parents.
    """
    count = topk + (steps - 1) * topk**2
    parents = [-1] * ((steps - 1) * topk + 1)
    for step in range(steps - 1):
        start = topk + (step - 1) * topk**2 if step else 0
        width = topk**2 if step else topk
        # any beams of the step, in any order: they cross and collapse
        picks = rng.sample(range(start, start + width), topk)
        parents[1 + step * topk : 1 + (step + 1) * topk] = picks
    scores = [0.0] * count
    for flat in range(count):
        if ties:
            scores[flat] = rng.choice([0.0, -0.0, 0.25, 0.5, 1.0, 1.0, math.nan])
        else:
            above = parent_candidate(flat, parents, topk)
            scores[flat] = rng.random() * (1.0 if above in (-1, None) else scores[above])
    if broken:
        for group in range(len(parents)):
            if rng.random() < 0.3:
                parents[group] = rng.choice([-1, -5, 0, count - 1, count, 2**40, group * topk])
    return scores, [rng.randrange(1000) for _ in range(count)], parents


def random_tree(rng: random.Random, n: int, max_depth: int) -> Tree:
    """Any tree of n nodes, children after their parents."""
    parent = [-1]
    depth = [0]
    for node in range(1, n):
        options = [p for p in range(node) if depth[p] < max_depth]
        parent.append(rng.choice(options))
        depth.append(depth[parent[-1]] + 1)
    return Tree([-1] * n, parent)
