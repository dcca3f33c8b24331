"""best_first_tree against every prefix of the block, sorted in plain Python."""

from __future__ import annotations

import functools
import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specattn.batch import Marginals
from specattn.kernels.tree import best_first_tree
from tests.implementations import EXAMPLES, by_each, using
from tests.kernels.tree_oracle import DEVICE, Tree, as_lists, poisoned, poisoned_tree


def score_of(block, prefix):
    """The float32 sum of a prefix's log-probabilities, from the root down."""
    total = np.float32(0)
    for position, rank in enumerate(prefix):
        log_prob = np.float32(block[position][rank])
        lost = np.isnan(log_prob) or log_prob < -1e30
        total += np.float32(-1e30) if lost else min(log_prob, np.float32(0))
    return total


def every_prefix(block, n):
    """The n - 1 best of all prefixes, by the definition of the order alone."""
    ranks = range(len(block[0]))
    scores = {
        prefix: score_of(block, prefix)
        for length in range(1, len(block) + 1)
        for prefix in itertools.product(ranks, repeat=length)
    }
    scores[()] = np.float32(0)

    @functools.cache
    def order(a, b):
        if a == b:
            return 0
        if scores[a] != scores[b]:
            return -1 if scores[a] > scores[b] else 1
        if len(a) != len(b):
            return len(a) - len(b)
        return order(a[:-1], b[:-1]) or a[-1] - b[-1]

    return sorted(scores, key=functools.cmp_to_key(order))[:n]


def block(log_probs, tokens):
    """Marginals that nothing was drawn from."""
    return Marginals(log_probs, tokens, log_probs[:, :, :0])


def build(log_probs, tokens, bonus, seq_lens, n, *, gap=0):
    """Run the operation over poisoned outputs, with ``gap`` columns between blocks."""
    batch = len(log_probs)
    found = torch.tensor(log_probs, dtype=torch.float32, device=DEVICE)
    length, ranks = found.shape[1:]
    wide = poisoned(batch, length * ranks, dtype=torch.float32, gap=gap)
    wide.copy_(found.flatten(1))
    named = poisoned(batch, length * ranks, gap=gap)
    named.copy_(torch.tensor(tokens, device=DEVICE).flatten(1))
    out = poisoned_tree(batch, n)
    best_first_tree(
        block(wide.unflatten(1, (length, ranks)), named.unflatten(1, (length, ranks))),
        torch.tensor(bonus, device=DEVICE),
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        out=out,
    )
    return as_lists(out)


def random_block(rng, length, ranks, *, style):
    """Descending log-probabilities and tokens of one request's positions."""
    choices = [0.0, -0.0, -0.25, -0.5, -0.5, -1.0, -math.inf, 1e-7]
    block = []
    for _ in range(length):
        if style == "ties":
            row = [rng.choice(choices) for _ in range(ranks)]
        elif style == "peaked":
            row = [-0.01 * rng.random(), *(-5.0 * rng.random() for _ in range(ranks - 1))]
        else:
            weights = [rng.random() for _ in range(ranks + 3)]
            row = [math.log(w / sum(weights)) for w in weights][:ranks]
        block.append(sorted(row, reverse=True))
    if style == "ties" and length > 2:
        block[2] = [math.nan] * ranks
    return block, [[rng.randrange(1000) for _ in range(ranks)] for _ in range(length)]


def check(blocks, n, *, gap=0):
    """Compare a batch of (log-probabilities, tokens) with the definition."""
    bonus = [5000 + i for i in range(len(blocks))]
    seq_lens = [10 * i for i in range(len(blocks))]
    log_probs, tokens = zip(*blocks, strict=True)
    got = build(log_probs, tokens, bonus, seq_lens, n, gap=gap)
    for i, (block, named) in enumerate(blocks):
        kept = every_prefix(block, n)
        node_of = {prefix: node for node, prefix in enumerate(kept)}
        tree = Tree([], [-1, *(node_of[prefix[:-1]] for prefix in kept[1:])])
        assert got["tokens"][i] == [
            bonus[i],
            *(named[len(prefix) - 1][prefix[-1]] for prefix in kept[1:]),
        ]
        assert got["positions"][i] == [seq_lens[i] + len(prefix) for prefix in kept]
        assert got["words"][i] == tree.words(-(-n // 64))
        assert got["next_token"][i] == tree.next_token()
        assert got["next_sibling"][i] == tree.next_sibling()


# positions, ranks, nodes: a chain, one position, no power of two, edges of words, all prefixes
SHAPES = [
    (1, 1, 1),
    (1, 1, 2),
    (5, 1, 6),
    (9, 1, 4),
    (1, 7, 8),
    (3, 4, 19),
    (4, 3, 64),
    (6, 3, 65),
    (3, 5, 129),
    (2, 15, 241),
    (4, 6, 256),
]


@pytest.mark.parametrize(("length", "ranks", "n"), SHAPES)
def test_shapes(implementation, length, ranks, n):
    rng = random.Random(length * 1000 + n)
    styles = ("plain", "peaked", "ties")
    check([random_block(rng, length, ranks, style=style) for style in styles], n)


def test_a_block_of_fifteen_takes_the_deepest_chain(implementation):
    """With p = 1 at every first rank the best tree of 16 is the chain; ties go to the shorter."""
    block = [[0.0, -1.0]] * 15
    named = [[depth, 100 + depth] for depth in range(15)]
    got = build([block], [named], [9], [3], 16)
    assert got["tokens"] == [[9, *range(15)]]
    assert got["positions"] == [list(range(3, 19))]
    assert got["next_token"] == [[*range(1, 16), -1]]


def test_a_prefix_of_the_nodes_is_the_smaller_tree(implementation):
    rng = random.Random(7)
    block, named = random_block(rng, 15, 8, style="plain")
    large = build([block], [named], [1], [0], 96)
    small = build([block], [named], [1], [0], 32)
    for name in ("tokens", "positions"):
        assert large[name][0][:32] == small[name][0]
    assert [row[:1] for row in large["words"][0][:32]] == small["words"][0]


def test_rows_with_a_stride(implementation):
    rng = random.Random(3)
    blocks = [random_block(rng, 4, 5, style=style) for style in ("plain", "ties", "plain")]
    check(blocks, 40, gap=13)
    check(blocks[::-1], 40)


SHAPE = st.sampled_from([(1, 3), (2, 2), (2, 9), (3, 3), (4, 2), (5, 3), (7, 2)])
STYLE = st.sampled_from(["plain", "peaked", "ties"])


@settings(max_examples=EXAMPLES)
@given(SHAPE, st.integers(0, 2**32), STYLE, st.integers(1, 80))
@by_each
def test_any_block(shape, seed, style, n):
    length, ranks = shape
    prefixes = sum(ranks**depth for depth in range(length + 1))
    check([random_block(random.Random(seed), length, ranks, style=style)], min(n, prefixes, 256))


def test_no_requests(implementation):
    empty = torch.empty(0, 3, 2, device=DEVICE)
    lens = torch.empty(0, dtype=torch.int32, device=DEVICE)
    best_first_tree(block(empty, empty.long()), lens.long(), lens, out=poisoned_tree(0, 4))


@pytest.mark.parametrize(
    ("shape", "n", "match"),
    [
        ((2, 2), 8, r"nodes must be 1\.\.7, got 8"),
        ((2, 2), 0, r"nodes must be 1\.\.7, got 0"),
        ((9, 9), 257, r"nodes must be 1\.\.256, got 257"),
        ((256, 2), 4, r"positions must be 0\.\.255, got 256"),
        ((2, 256), 4, r"ranks must be 0\.\.255, got 256"),
    ],
)
def test_impossible_shapes_are_named(implementation, shape, n, match):
    row = [[-1.0] * shape[1]] * shape[0]
    with pytest.raises(ValueError, match=match):
        build([row], [[[0] * shape[1]] * shape[0]], [0], [0], n)


def test_tensors_of_another_kind_are_named(implementation):
    log_probs = torch.zeros(1, 2, 2, device=DEVICE)
    tokens = torch.zeros(1, 2, 2, dtype=torch.int64, device=DEVICE)
    bonus, lens = tokens[:, 0, 0], torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = poisoned_tree(1, 4)
    with pytest.raises(ValueError, match="log_probs must be"):
        best_first_tree(block(log_probs.double(), tokens), bonus, lens, out=out)
    with pytest.raises(ValueError, match="tokens must be"):
        best_first_tree(block(log_probs, tokens[:, :, :1]), bonus, lens, out=out)
    with pytest.raises(ValueError, match="log_probs must be contiguous"):
        best_first_tree(block(log_probs.transpose(1, 2), tokens), bonus, lens, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "ranks", "n"), [(15, 8, 128), (15, 16, 256), (7, 4, 16)])
def test_kernel_and_torch_agree_where_no_brute_force_goes(length, ranks, n):
    generator = torch.Generator(DEVICE).manual_seed(n)
    logits = 3 * torch.randn(16, length, 500, device=DEVICE, generator=generator)
    logits[::3] = logits[::3].round()
    log_probs, tokens = logits.log_softmax(-1).topk(ranks)
    lens = torch.arange(16, dtype=torch.int32, device=DEVICE)
    results = []
    for implementation in ("naive", "triton"):
        out = poisoned_tree(16, n)
        marginals = block(log_probs, tokens)
        with using(implementation):
            best_first_tree(marginals, lens.long(), lens, out=out)
        results.append(as_lists(out))
    assert results[0] == results[1]


@pytest.mark.gpu
def test_a_replay_reads_what_is_there_then():
    log_probs = torch.zeros(2, 7, 4, device="cuda")
    tokens = torch.arange(56, device="cuda").view(2, 7, 4)
    lens = torch.zeros(2, dtype=torch.int32, device="cuda")
    out, marginals = poisoned_tree(2, 32), block(log_probs, tokens)
    best_first_tree(marginals, lens.long(), lens, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best_first_tree(marginals, lens.long(), lens, out=out)
    for seed in range(5):
        torch.manual_seed(seed)
        logits = torch.randn(2, 7, 4, device="cuda") * 2
        log_probs.copy_(logits.log_softmax(-1).sort(-1, descending=True).values)
        graph.replay()
        replayed = as_lists(out)
        with using("naive"):
            best_first_tree(marginals, lens.long(), lens, out=out)
        assert replayed == as_lists(out)
