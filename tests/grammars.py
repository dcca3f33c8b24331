"""A grammar over the tiny models' tokens, and texts decoded under it without trees."""

from __future__ import annotations

import math
from functools import cache

import torch

from tests.processors import dense_logits, processed

#: Remainders by 5 of the tokens that may follow one of each remainder.
FOLLOWING = {0: (1, 2), 1: (0, 3), 2: (4,), 3: (3, 1, 2), 4: (0, 4)}


@cache
def masks(vocab: int) -> list[list[int]]:
    """By the newest token's remainder: words whose bits are the tokens that may follow."""
    rows = []
    for remainder in range(5):
        words = [-1] * -(-vocab // 32)
        for token in range(vocab):
            if token % 5 not in FOLLOWING[remainder]:
                # as a signed number
                words[token // 32] -= 1 << token % 32 if token % 32 < 31 else -(1 << 31)
        rows.append(words)
    return rows


class Remainders:
    """Each token's remainder by 5 follows from that of the token before."""

    def __init__(self, prompt: list[int], vocab: int = 61) -> None:
        self.last, self.vocab, self.accepted = prompt[-1], vocab, 0

    def allowed(self, token: int) -> set[int]:
        return {t for t in range(self.vocab) if t % 5 in FOLLOWING[token % 5]}

    def fill(self, tokens, parents, bitmask) -> None:
        assert tokens[0] == self.last, "the root is the newest token"
        assert list(parents[:1]) == [-1]
        assert (bitmask == -1).all()
        assert all(0 <= parents[node] < node for node in range(1, len(tokens)))
        rows = masks(self.vocab)
        bitmask.copy_(torch.tensor([rows[token % 5] for token in tokens], dtype=torch.int32))

    def accept(self, tokens) -> None:
        for token in tokens:
            assert token in self.allowed(self.last)
            self.last = token
            self.accepted += 1


def constrained_text(target, prompt: list[int], count: int, params) -> list[int]:
    """What plain greedy decoding writes under params and the grammar above."""
    output: list[int] = []
    for _ in range(count):
        scores = constrained_logits(target, prompt, output, params)
        output.append(scores.index(max(scores)))
    return output


def constrained_logits(target, prompt: list[int], output: list[int], params) -> list[float]:
    """The logits after a text, by params and the grammar above."""
    scores = processed(dense_logits(target, [*prompt, *output]), prompt, output, params)
    allowed = Remainders(prompt).allowed([*prompt, *output][-1])
    return [x if t in allowed else -math.inf for t, x in enumerate(scores)]
