"""select_beams against a sort in plain Python, and a whole drafting against build_tree."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specattn.batch import Candidates
from specattn.kernels.tree import Beams, build_tree, select_beams
from tests.kernels.tree_oracle import DEVICE, POISON, poisoned_tree, to_word


class Drafting:
    """Candidates of one batch, grown step by step."""

    def __init__(self, batch, topk, steps):
        self.topk = topk
        self.words_wide = -(-max(steps - 1, 1) * topk // 64)
        count = topk + (steps - 1) * topk**2
        full = {"device": DEVICE}
        self.candidates = Candidates(
            torch.full((batch, count), math.nan, **full),
            torch.full((batch, count), POISON, **full),
            torch.full((batch, (steps - 1) * topk + 1), POISON, **full),
            torch.empty(batch, 0, 0, **full),
        )
        self.words = torch.full((batch, max(steps - 1, 1), topk, self.words_wide), POISON, **full)

    def select(self, step, probs, tokens, beams):
        batch = len(probs)
        out = Beams(
            torch.full((batch, self.topk), math.nan, device=DEVICE),
            torch.full((batch, self.topk), POISON, device=DEVICE),
            torch.full((batch, self.topk), POISON, device=DEVICE),
            self.words[:, step],
        )
        select_beams(step, probs, tokens, beams, candidates=self.candidates, out=out)
        return out

    def append(self, step, probs, tokens, beams):
        select_beams(step, probs, tokens, beams, candidates=self.candidates, out=None)


def random_children(rng, batch, beams, topk, ties):
    def prob():
        return rng.choice([0.0, 0.5, 1.0, math.nan]) if ties else rng.random()

    probs = [[[prob() for _ in range(topk)] for _ in range(beams)] for _ in range(batch)]
    tokens = [[[rng.randrange(999) for _ in range(topk)] for _ in range(beams)] for _ in probs]
    return torch.tensor(probs, device=DEVICE), torch.tensor(tokens, device=DEVICE)


def best(scores, topk):
    """Flat indices, best first; NaN last, the lower index at a tie."""
    keys = [(math.isnan(s), 0.0 if math.isnan(s) else -s, i) for i, s in enumerate(scores)]
    return [key[2] for key in sorted(keys)[:topk]]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("batch", "topk", "steps"), [(2, 1, 1), (3, 1, 5), (2, 3, 4), (1, 7, 3), (2, 10, 8), (1, 17, 3)]
)
def test_drafting(implementation, batch, topk, steps, ties):
    rng = random.Random(topk)
    draft = Drafting(batch, topk, steps)
    picked = None
    expect_parents = [[-1] for _ in range(batch)]
    expect_scores, expect_tokens = [[] for _ in range(batch)], [[] for _ in range(batch)]
    masks = [[0] for _ in range(batch)]
    for step in range(steps):
        probs, tokens = random_children(rng, batch, topk if step else 1, topk, ties)
        paths = (probs * picked.scores[:, :, None] if step else probs).flatten(1)
        for b in range(batch):
            expect_scores[b] += paths[b].tolist()
            expect_tokens[b] += tokens[b].flatten().tolist()
        if step == steps - 1:
            draft.append(step, probs, tokens, picked)
            break
        picked = draft.select(step, probs, tokens, picked)
        start = len(expect_scores[0]) - paths.shape[1]
        for b in range(batch):
            picks = best(paths[b].tolist(), topk)
            expect_parents[b] += [start + pick for pick in picks]
            masks[b] = [
                masks[b][pick // topk] | 1 << step * topk + k for k, pick in enumerate(picks)
            ]
            beams = topk if step else 1
            assert picked.rows[b].tolist() == [b * beams + pick // topk for pick in picks]
            assert picked.tokens[b].tolist() == [expect_tokens[b][start + pick] for pick in picks]
            want = paths[b][picks].tolist()
            assert [repr(x) for x in picked.scores[b].tolist()] == [repr(x) for x in want]
            assert draft.words[b, step].tolist() == [
                [to_word(m >> 64 * w & 2**64 - 1) for w in range(draft.words_wide)]
                for m in masks[b]
            ]
    assert repr(draft.candidates.scores.tolist()) == repr(expect_scores)
    assert draft.candidates.tokens.tolist() == expect_tokens
    assert draft.candidates.parents.tolist() == expect_parents


def test_golden_parents_cross_and_collapse(implementation):
    """K = 2, S = 3: the parents of the golden vectors come out of a drafting."""
    draft = Drafting(2, 2, 3)
    tokens = torch.zeros(2, 1, 2, dtype=torch.int64, device=DEVICE)
    root = torch.tensor([[[0.6, 0.4]]] * 2, device=DEVICE)
    beams = draft.select(0, root, tokens, None)
    # request 0 continues from beam 0 alone, request 1 first from beam 1, then from beam 0
    probs = torch.tensor([[[0.5, 0.4], [0.1, 0.1]], [[0.3, 0.1], [0.9, 0.1]]], device=DEVICE)
    beams = draft.select(1, probs, tokens.expand(2, 2, 2).contiguous(), beams)
    assert beams.rows.tolist() == [[0, 0], [3, 2]]
    assert draft.candidates.parents.tolist() == [[-1, 0, 1, 2, 3], [-1, 0, 1, 4, 2]]
    assert draft.words[:, 1, :, 0].tolist() == [[0b0101, 0b1001], [0b0110, 0b1001]]


def test_drafted_tree_follows_its_paths(implementation):
    """Candidates of a drafting, built into a tree, are its most probable prefix-closed paths."""
    rng = random.Random(9)
    draft = Drafting(1, 3, 3)
    beams = None
    for step in range(3):
        probs, tokens = random_children(rng, 1, 3 if step else 1, 3, ties=False)
        if step == 2:
            draft.append(step, probs, tokens, beams)
        else:
            beams = draft.select(step, probs, tokens, beams)
    tree, root = poisoned_tree(1, 22), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    build_tree(draft.candidates, root, root.int(), topk=3, out=tree)
    assert tree.tokens[0, 1:].tolist() == draft.candidates.tokens[0].tolist()
    assert tree.positions[0].tolist() == [0] + [1] * 3 + [2] * 9 + [3] * 9


def test_wrong_steps_are_named(implementation):
    draft = Drafting(1, 2, 2)
    probs, tokens = random_children(random.Random(0), 1, 2, 2, ties=False)
    scores, rows = torch.ones(1, 2, device=DEVICE), torch.zeros_like(tokens[:, 0])
    beams = Beams(scores, rows, rows, draft.words[:, 0])
    with pytest.raises(ValueError, match="1 beams at step 0, got 2"):
        draft.append(0, probs, tokens, beams)
    with pytest.raises(ValueError, match="before those of step 2"):
        draft.append(2, probs, tokens, beams)
    with pytest.raises(ValueError, match="candidates must have 5 groups to pick beams, got 3"):
        select_beams(1, probs, tokens, beams, candidates=draft.candidates, out=beams)
