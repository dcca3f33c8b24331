"""build_tree against its definition in plain Python, and against published vectors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specattn.batch import Candidates
from specattn.kernels.tree import build_tree
from tests.implementations import EXAMPLES, by_each, using
from tests.kernels.tree_oracle import (
    DEVICE,
    as_lists,
    poisoned_tree,
    random_candidates,
    tree_of,
)


def build(scores, tokens, parents, bonus, seq_lens, *, topk, n):
    batch = len(bonus)
    out = poisoned_tree(batch, n)
    candidates = Candidates(
        torch.tensor(scores, dtype=torch.float32, device=DEVICE).reshape(batch, -1),
        torch.tensor(tokens, dtype=torch.int64, device=DEVICE).reshape(batch, -1),
        torch.tensor(parents, device=DEVICE).reshape(batch, -1),
        out.draft_probs,
    )
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    build_tree(candidates, torch.tensor(bonus, device=DEVICE), lens, topk=topk, out=out)
    return as_lists(out)


def check_against_definition(cases, topk, n):
    """Cases are (scores, tokens, parents) per request."""
    scores, tokens, parents = zip(*cases, strict=True)
    bonus = [5000 + i for i in range(len(cases))]
    seq_lens = [10 * i for i in range(len(cases))]
    got = build(scores, tokens, parents, bonus, seq_lens, topk=topk, n=n)
    for i, (score, token, parent) in enumerate(cases):
        tree = tree_of(torch.tensor(score, dtype=torch.float32).tolist(), parent, topk, n)
        assert got["tokens"][i] == [bonus[i], *(token[f] for f in tree.flat[1:])]
        assert got["positions"][i] == [seq_lens[i] + d for d in tree.depths()]
        assert got["words"][i] == tree.words(-(-n // 64))
        assert got["next_token"][i] == tree.next_token()
        assert got["next_sibling"][i] == tree.next_sibling()


def test_golden_collapse_and_cross(implementation):
    keep = [[0, 1, 2, 3, 6], [0, 1, 2, 4, 6]]
    scores = [[1.0 - 0.01 * f if f in row else 0.1 for f in range(10)] for row in keep]
    got = build(
        scores,
        [list(range(10)), list(range(10, 20))],
        [[-1, 0, 1, 2, 3], [-1, 0, 1, 4, 2]],
        [90, 91],
        [3, 5],
        topk=2,
        n=6,
    )
    assert got["tokens"] == [[90, 0, 1, 2, 3, 6], [91, 10, 11, 12, 14, 16]]
    assert got["positions"] == [[3, 4, 4, 5, 5, 6], [5, 6, 6, 7, 7, 8]]
    assert got["next_token"] == [[1, 3, -1, 5, -1, -1], [1, 3, 4, -1, 5, -1]]
    assert got["next_sibling"] == [[-1, 2, -1, 4, -1, -1], [-1, 2, -1, -1, -1, -1]]
    assert torch.tensor(got["words"]).squeeze(2).tolist() == [
        [1, 3, 5, 11, 19, 43],
        [1, 3, 5, 11, 21, 53],
    ]


# The candidates of sglang#3373's unit test, in our layout: scores, tokens, parents.
PUBLISHED = [
    (
        """
        7.1127e-01 2.8292e-01 2.2995e-03 1.7357e-03 6.9142e-01 1.2863e-02 1.6873e-03 1.1871e-03
        2.4787e-01 1.8818e-02 1.4204e-02 9.2235e-04 2.2971e-03 1.6700e-06 1.8737e-07 8.3146e-08
        1.2771e-03 2.4374e-04 1.7832e-04 1.1947e-05 6.6438e-01 2.6997e-02 2.4236e-05 4.0821e-06
        2.4402e-01 2.8409e-03 5.0935e-04 2.9022e-04 1.6178e-02 2.0567e-03 4.5892e-04 3.0034e-05
        1.3023e-02 5.0497e-04 3.6371e-04 8.7750e-05 6.6420e-01 1.0525e-04 6.5864e-05 1.2253e-06
        1.3019e-01 1.0461e-01 5.2083e-03 1.6777e-03 2.0103e-02 6.7335e-03 1.2625e-04 1.0364e-05
        1.5142e-02 7.0819e-04 9.6595e-05 8.7951e-05
        """,
        {0: 29896, 1: 29906, 4: 29889, 8: 29974, 20: 29946, 24: 29896, 36: 29946},
        [-1, 0, 1, 2, 3, 4, 8, 9, 10, 20, 24, 21, 28],
    ),
    (
        """
        9.7476e-01 2.2219e-02 6.5031e-04 1.3212e-04 8.4832e-02 6.6068e-02 5.8304e-02 5.7851e-02
        2.3616e-03 1.1243e-03 5.4368e-04 2.7768e-04 2.5286e-04 1.5578e-04 2.8817e-05 1.2888e-05
        1.2834e-04 2.5417e-06 1.1279e-06 1.6088e-08 2.3263e-02 2.0054e-02 9.3990e-03 2.7783e-03
        6.4156e-02 5.5506e-04 1.0429e-04 9.7211e-05 4.9950e-02 5.0630e-03 9.0068e-04 3.3656e-04
        7.5817e-03 8.5731e-04 6.9972e-04 6.0793e-04 5.8608e-02 1.8840e-03 7.8535e-04 4.4400e-04
        1.2185e-02 2.0684e-03 1.7418e-03 1.4327e-03 6.2455e-03 6.1487e-03 2.6862e-03 1.8034e-03
        1.8590e-03 1.6151e-03 1.2481e-03 3.6038e-04
        """,
        {0: 13, 4: 22550, 5: 4136, 6: 16492, 7: 8439, 24: 29871, 36: 29941},
        [-1, 0, 1, 2, 3, 4, 5, 6, 7, 24, 28, 20, 21],
    ),
]


def test_golden_published_by_sglang(implementation):
    scores, tokens, parents = zip(*PUBLISHED, strict=True)
    scores = [[float(score) for score in row.split()] for row in scores]
    tokens = [[row.get(f, -1) for f in range(52)] for row in tokens]
    got = build(scores, tokens, parents, [29974, 13], [5, 10], topk=4, n=8)
    assert got["positions"] == [
        [5, 6, 6, 7, 7, 8, 8, 9],
        [10, 11, 12, 12, 12, 12, 13, 14],
    ]
    assert got["next_token"] == [[1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1]]
    assert got["next_sibling"] == [
        [-1, 2, -1, -1, -1, -1, -1, -1],
        [-1, -1, 3, 4, 5, -1, -1, -1],
    ]
    assert got["tokens"] == [
        [29974, 29896, 29906, 29889, 29974, 29946, 29896, 29946],
        [13, 13, 22550, 4136, 16492, 8439, 29871, 29941],
    ]


# topk, steps, nodes: R38 (no power of two), R54 (word edges), whole tables, single rows
SHAPES = [
    (1, 1, 2),
    (1, 3, 4),
    (1, 64, 65),
    (2, 1, 3),
    (2, 3, 2),
    (3, 3, 13),
    (3, 4, 31),
    (4, 3, 32),
    (5, 3, 33),
    (7, 2, 19),
    (8, 3, 63),
    (8, 3, 64),
    (9, 2, 65),
    (10, 4, 129),
    (16, 8, 256),
]


@pytest.mark.parametrize(("topk", "steps", "n"), SHAPES)
def test_shapes(implementation, topk, steps, n):
    rng = random.Random(topk * 1000 + n)
    styles = [{}, {"ties": True}, {"broken": True, "ties": True}]
    check_against_definition(
        [random_candidates(rng, topk, steps, **style) for style in styles], topk, n
    )


@settings(max_examples=EXAMPLES)
@given(st.data(), st.integers(1, 10), st.integers(1, 4), st.booleans(), st.booleans())
@by_each
def test_any_tree(data, topk, steps, ties, broken):
    n = 1 + data.draw(st.integers(1, min(topk + (steps - 1) * topk**2, 79)), "nodes")
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    case = random_candidates(rng, topk, steps, ties=ties, broken=broken)
    check_against_definition([case], topk, n)


def test_plain_decoding_is_the_root_alone(implementation):
    got = build([[], []], [[], []], [[-1], [-1]], [8, 9], [4, 7], topk=1, n=1)
    assert got == {
        "tokens": [[8], [9]],
        "positions": [[4], [7]],
        "words": [[[1]], [[1]]],
        "next_token": [[-1], [-1]],
        "next_sibling": [[-1], [-1]],
    }


def test_scores_of_one_keep_parents(implementation):
    """With p = 1 a child scores like its parent; the selection stays closed under ancestors."""
    rng = random.Random(0)
    _, tokens, parents = random_candidates(rng, 3, 4)
    for n in (2, 5, 9, 17):
        check_against_definition([([1.0] * 30, tokens, parents)], 3, n)


def test_children_of_nan_are_kept_last(implementation):
    scores = [math.nan, 0.1, 0.9, 0.9, 0.05, 0.01]
    got = build([scores], [[0, 1, 2, 3, 4, 5]], [[-1, 0, 1]], [9], [0], topk=2, n=4)
    assert got["tokens"] == [[9, 1, 4, 5]]


def test_batch_rows_are_independent(implementation):
    rng = random.Random(3)
    cases = [random_candidates(rng, 3, 3, ties=i % 2 > 0) for i in range(5)]
    check_against_definition(cases, 3, 11)
    check_against_definition(cases[::-1], 3, 11)


def test_strided_candidates(implementation):
    """A bucket's candidates may be views of wider storage, full of NaN beyond them."""
    rng = random.Random(4)
    scores, tokens, parents = random_candidates(rng, 3, 2)
    wide = torch.full((1, 40), math.nan, device=DEVICE)
    wide[:, : len(scores)] = torch.tensor(scores)
    expect = build([scores], [tokens], [parents], [1], [0], topk=3, n=6)
    out = poisoned_tree(1, 6)
    named = torch.tensor([tokens], device=DEVICE), torch.tensor([parents], device=DEVICE)
    candidates = Candidates(wide[:, : len(scores)], *named, out.draft_probs)
    lens = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    build_tree(candidates, torch.tensor([1], device=DEVICE), lens, topk=3, out=out)
    assert as_lists(out) == expect


def test_wide_tables_take_the_sort(monkeypatch):
    monkeypatch.setattr("specattn.kernels.tree.build.MAX_CANDIDATES", 4)
    rng = random.Random(5)
    with using("triton"):
        check_against_definition([random_candidates(rng, 3, 3, ties=True)], 3, 9)


@pytest.mark.parametrize(
    ("scores", "parents", "n", "match"),
    [
        (6, 3, 8, r"nodes must be 1\.\.7"),
        (6, 2, 3, "not the candidates"),
        (5, 3, 3, "not the candidates"),
    ],
)
def test_impossible_shapes_are_named(implementation, scores, parents, n, match):
    with pytest.raises(ValueError, match=match):
        build(
            [[0.0] * scores],
            [[0] * scores],
            [[-1] * parents],
            [0],
            [0],
            topk=2,
            n=n,
        )
