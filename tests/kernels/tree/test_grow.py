"""Ancestor words that grow as others choose branches, against paths in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from specattn.kernels.tree import grow_words
from tests.kernels.tree_oracle import DEVICE, POISON, poisoned, to_word
from tests.recordings import recorded

SIZES = [(1, 1, 1), (3, 3, 4), (2, 5, 8), (4, 6, 16), (2, 4, 3), (3, 70, 1)]


def drawn(rng: random.Random, batch: int, steps: int, topk: int) -> list[list[list[int]]]:
    """Parents of every step's branches, ``[steps][batch][topk]``; those of step 0 mean nothing."""
    return [
        [[rng.randrange(topk) for _ in range(topk)] for _ in range(batch)] for _ in range(steps)
    ]


def paths(parents: list[list[list[int]]], topk: int, count: int) -> list:
    """Words of every node, ``[batch][steps][topk][count]``: bit s * topk + k is branch k of s."""
    found = []
    for request in range(len(parents[0])):
        above, rows = [0] * topk, []
        for step, of_step in enumerate(parents):
            seen = [above[parent] if step else 0 for parent in of_step[request]]
            above = [bits | 1 << step * topk + k for k, bits in enumerate(seen)]
            words = [[to_word(b >> 64 * w & 2**64 - 1) for w in range(count)] for b in above]
            rows.append(words)
        found.append(rows)
    return found


@pytest.mark.parametrize(("batch", "steps", "topk"), SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_words_are_paths(implementation, batch, steps, topk, dtype):
    count = -(-steps * topk // 64)
    parents = drawn(random.Random(steps), batch, steps, topk)
    words = poisoned(batch, steps + 1, topk, count)[:, :steps]  # a stride between requests
    for step, of_step in enumerate(parents):
        # branch by branch in memory, as a transposed tensor has them
        given = torch.tensor(of_step, dtype=dtype, device=DEVICE).T.contiguous().T
        grow_words(words, step, given if step else None)
        assert (words[:, step + 1 :] == POISON).all()
    assert words.tolist() == paths(parents, topk, count)
    assert (words._base[:, steps] == POISON).all()


@pytest.mark.parametrize(("batch", "steps", "topk"), SIZES[1:4])
def test_flat_candidates_name_their_parents(implementation, batch, steps, topk):
    """As EAGLE counts them: step s > 0 has topk groups of topk children, after those before."""
    rng = random.Random(topk)
    parents = drawn(rng, batch, steps, topk)
    words = poisoned(batch, steps, topk, -(-steps * topk // 64))
    for step, of_step in enumerate(parents):
        first = topk + (step - 1) * topk**2
        flat = [[first + up * topk + rng.randrange(topk) for up in row] for row in of_step]
        grow_words(words, step, torch.tensor(flat, device=DEVICE), flat=True)
    assert words.tolist() == paths(parents, topk, words.shape[3])


def test_parents_out_of_range_are_cut(implementation):
    """Those of padding may be anything."""
    words = poisoned(1, 2, 3, 1)
    grow_words(words, 0, None)
    grow_words(words, 1, torch.tensor([[-9, 2**40, 1]], device=DEVICE))
    assert words[0, 1].flatten().tolist() == [0b001001, 0b010100, 0b100010]


def test_a_recorded_step_follows_the_parents():
    words, parents = poisoned(2, 2, 3, 1), torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)

    def grow() -> None:
        grow_words(words, 0, None)
        grow_words(words, 1, parents)

    replay = recorded(grow)
    for seed in range(3):
        drawn_now = drawn(random.Random(seed), 2, 2, 3)
        parents.copy_(torch.tensor(drawn_now[1]))
        words.fill_(POISON)
        replay()
        assert words.tolist() == paths(drawn_now, 3, 1)


def test_nobody_has_no_words(implementation):
    grow_words(poisoned(0, 2, 3, 1), 1, torch.zeros(0, 3, dtype=torch.int64, device=DEVICE))


def test_other_shapes_are_refused_by_name(implementation):
    words, parents = poisoned(2, 3, 4, 1), torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    for message, *arguments in (
        ("words must be", words.int(), 1, parents),
        ("words must be", words[0], 1, parents),
        ("words must be contiguous", words.transpose(1, 2), 1, parents),
        ("step must be 0..2, got 3", words, 3, parents),
        ("parents must be a tensor after step 0", words, 1, None),
        ("parents must be", words, 1, parents[:1]),
        ("parents must be", words, 1, parents.float()),
    ):
        with pytest.raises(ValueError, match=message):
            grow_words(*arguments)
    assert (words == POISON).all()
