"""Acceptance walks against plain-Python walks over the tree itself."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch

from specattn.kernels import tree as operations
from specattn.kernels.tree import accept_greedy, accept_sampled
from tests.implementations import IMPLEMENTATIONS, using
from tests.kernels.tree_oracle import DEVICE, Tree, linked_tree, poisoned_path, random_tree

# the largest coin a 24-bit generator makes
LAST_COIN = 1 - 2.0**-24


def call(name, *args, steps, **options):
    """Tokens come first, then links, or what a chain was drawn from."""
    tokens, first, *args = [torch.as_tensor(arg).to(DEVICE) for arg in args]
    if name == "accept_rejection":
        tree = linked_tree(tokens, tokens, tokens, first)
    else:
        sibling, *args = args
        tree = linked_tree(tokens, first, sibling)
    out = poisoned_path(len(tokens), steps)
    getattr(operations, name)(tree, *args, **options, out=out)
    found = out.accept_index, out.accept_tokens, out.accept_lens, out.bonus_tokens
    return [value.tolist() for value in found]


def both(*args, **options):
    """What each implementation gives."""
    results = []
    for implementation in IMPLEMENTATIONS:
        with using(implementation):
            results.append(call(*args, **options))
    return results


def expected(paths, tokens, steps):
    """Outputs from (path, emitted tokens) per request."""
    pad = [[0] * (steps + 1 - len(path)) for path in paths]
    return [
        [path + [-1] * len(p) for path, p in zip(paths, pad, strict=True)],
        [row + p for row, p in zip(tokens, pad, strict=True)],
        [len(path) for path in paths],
        [row[-1] for row in tokens],
    ]


def links(trees):
    return [t.next_token() for t in trees], [t.next_sibling() for t in trees]


def relink(rng, tree):
    """The tree's links with every family in another order."""
    next_token, next_sibling = [-1] * len(tree.parent), [-1] * len(tree.parent)
    for node in range(len(tree.parent)):
        family = tree.children(node)
        rng.shuffle(family)
        if family:
            next_token[node] = family[0]
        for older, younger in itertools.pairwise(family):
            next_sibling[older] = younger
    return next_token, next_sibling


def greedy_walk(tree, tokens, argmax, steps):
    path = [0]
    while len(path) <= steps:
        match = [c for c in tree.children(path[-1]) if tokens[c] == argmax[path[-1]]]
        if not match:
            break
        path.append(match[0])
    return path, [argmax[node] for node in path]


@pytest.mark.parametrize(("n", "steps"), [(1, 0), (2, 1), (3, 5), (8, 3), (33, 4), (65, 64)])
def test_greedy_walk(implementation, n, steps):
    rng = random.Random(n)
    trees = [random_tree(rng, n, max(steps, 1)) for _ in range(5)]
    # a chain is the deepest tree there is
    trees.append(Tree([-1] * n, [-1, *range(min(n - 1, steps)), *[0] * (n - 1 - steps)]))
    tokens = [[rng.randrange(3) for _ in range(n)] for _ in trees]
    argmax = [[rng.randrange(3) for _ in range(n)] for _ in trees]
    tokens[-1], argmax[-1] = [1] * n, [1] * n
    walks = [greedy_walk(*row, steps) for row in zip(trees, tokens, argmax, strict=True)]
    got = call("accept_greedy", tokens, *links(trees), argmax, steps=steps)
    assert got == expected(*zip(*walks, strict=True), steps)


def test_greedy_follows_links_in_any_order(implementation):
    rng = random.Random(1)
    trees = [random_tree(rng, 9, 4) for _ in range(6)]
    # distinct tokens: the order of siblings cannot change the path
    tokens = [rng.sample(range(12), 9) for _ in trees]
    argmax = [[rng.choice(row) for _ in row] for row in tokens]
    shuffled = zip(*(relink(rng, tree) for tree in trees), strict=True)
    plain = call("accept_greedy", tokens, *links(trees), argmax, steps=4)
    assert call("accept_greedy", tokens, *shuffled, argmax, steps=4) == plain


# next_token, next_sibling of four nodes: cycles, and links out of the row
BROKEN = {
    "child_of_itself": ([0, -1, -1, -1], [-1, -1, -1, -1]),
    "sibling_cycle": ([1, -1, -1, -1], [-1, 2, 1, -1]),
    "sibling_of_itself": ([1, -1, -1, -1], [-1, 1, -1, -1]),
    "beyond_the_row": ([4, 9, 2**40, 7], [4, 4, -3, 2**33]),
    "back_to_the_root": ([1, 2, 0, -1], [-1, -1, -1, -1]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_links_end_the_walk(name):
    next_token, next_sibling = BROKEN[name]
    # neighbours whose rows a stray read would show
    rows = ([[-1] * 4, next_token, [-1] * 4], [[-1] * 4, next_sibling, [-1] * 4])
    tokens, argmax = [[1] * 4] * 3, [[1] * 4, [1, 1, 1, 1], [1] * 4]
    missing = [[9] * 4, [2, 2, 2, 2], [9] * 4]
    for choice in (argmax, missing):
        results = both("accept_greedy", tokens, *rows, choice, steps=3)
        assert results[0] == results[1]
        assert all(0 <= node < 4 or node == -1 for node in results[0][0][1])
    probs = torch.full((3, 4, 5), 0.2)
    coins = [torch.full((3, 4), 0.5), torch.full((3, 4), 0.9)]
    results = both("accept_sampled", tokens, *rows, probs, *coins, steps=3)
    assert results[0] == results[1]


def inverse_cdf(weights, coin):
    """First token of positive weight whose cumulative weight exceeds coin * total."""
    total, reached = sum(weights), Fraction(0)
    for token, weight in enumerate(weights):
        reached += weight
        if weight > 0 and reached > coin * total:
            return token
    return None


def sampled_walk(tree, tokens, probs, coins, final_coins, steps):
    """The definition's own words, in exact fractions."""
    path, emitted = [0], []
    while True:
        weights = [Fraction(p) for p in probs[path[-1]]]
        family = tree.children(path[-1]) if len(path) <= steps else []
        coin, reached, dropped, took = Fraction(coins[len(path) - 1]), Fraction(0), [], None
        for child in family:
            token = tokens[child]
            p = Fraction(0) if token in dropped or not 0 <= token < len(weights) else weights[token]
            reached += p
            if p > 0 and coin < reached:
                took = child
                break
            dropped.append(token)
        if took is None:
            rest = [Fraction(0) if t in dropped else p for t, p in enumerate(weights)]
            final = Fraction(final_coins[len(path) - 1])
            return path, [*emitted, inverse_cdf(rest if sum(rest) else weights, final)]
        path.append(took)
        emitted.append(tokens[took])


def dyadic_rows(rng, n, vocab):
    """Distributions in 32nds: sums are exact in float32 in any order."""
    rows = []
    for _ in range(n):
        marks = sorted(rng.randrange(33) for _ in range(vocab - 1))
        rows.append([(b - a) / 32 for a, b in zip([0, *marks], [*marks, 32], strict=True)])
    return rows


@pytest.mark.parametrize(
    ("n", "steps", "vocab"), [(1, 0, 5), (7, 3, 5), (12, 4, 9), (12, 2, 9), (34, 5, 37)]
)
def test_sampled_walk(implementation, n, steps, vocab):
    rng = random.Random(vocab)
    batch = 12
    trees = [random_tree(rng, n, max(steps, 1)) for _ in range(batch)]
    # tokens repeat among siblings, and one in a while is none at all
    tokens = [[rng.choice([*range(vocab), vocab + 3, -2]) for _ in range(n)] for _ in trees]
    probs = [dyadic_rows(rng, n, vocab) for _ in trees]
    coins, final_coins = (
        [[some_coin(rng) for _ in range(steps + 1)] for _ in trees] for _ in range(2)
    )
    walks = [
        sampled_walk(*row, steps)
        for row in zip(trees, tokens, probs, coins, final_coins, strict=True)
    ]
    got = call(
        "accept_sampled",
        tokens,
        *links(trees),
        probs,
        coins,
        final_coins,
        steps=steps,
    )
    assert got == expected(*zip(*walks, strict=True), steps)


def some_coin(rng):
    return rng.choice([0.0, LAST_COIN, rng.randrange(32) / 32, rng.randrange(2**24) / 2**24])


# Node 0 has children 1, 2, 3 of tokens 0, 1, 2; the vocabulary is 0..4.
FAMILY = Tree([-1] * 4, [-1, 0, 0, 0])


def one_step(probs, coin, final_coin, tokens=(7, 0, 1, 2)):
    got = call(
        "accept_sampled",
        [list(tokens)],
        *links([FAMILY]),
        [[probs] * 4],
        [[coin, 0.0]],
        [[final_coin, final_coin]],
        steps=1,
    )
    index, emitted, length, _ = (row[0] for row in got)
    return index[:length], emitted[:length]


def test_r18_half_open_coins(implementation):
    """sglang#35771: a token of probability 0 is never emitted, whatever the coin."""
    probs = [0.0, 0.25, 0.0, 0.75, 0.0]
    # children 1 and 3 have probability 0; child 2 owns [0, 0.25)
    assert one_step(probs, 0.0, 0.0)[0] == [0, 2]
    assert one_step(probs, 0.25 - 2.0**-24, 0.0)[0] == [0, 2]
    for coin in (0.25, 0.5, LAST_COIN):
        for final in (0.0, 0.5, LAST_COIN):
            assert one_step(probs, coin, final) == ([0], [3])
    # at a leaf: the boundary coin belongs to the next bucket, the ends to the outer tokens
    emitted = [one_step(probs, 0.0, final)[1] for final in (0.0, 0.25, LAST_COIN)]
    assert emitted == [[1, 1], [1, 3], [1, 3]]


def test_twice_listed_token_counts_once(implementation):
    probs = [0.25, 0.25, 0.0, 0.25, 0.25]
    assert one_step(probs, 0.3, 0.0, tokens=(7, 0, 0, 1))[0] == [0, 3]
    assert one_step(probs, 0.5, 0.0, tokens=(7, 0, 0, 1)) == ([0], [3])


def test_siblings_passed_over_may_be_drawn_after_the_next_node(implementation):
    """They are refused at their parent, not below the sibling that was taken."""
    tree = Tree([-1] * 3, [-1, 0, 0])
    probs = [[[0.0, 0.25, 0.75, 0.0], [0.0] * 4, [0.0, 0.5, 0.0, 0.5]]]
    for steps in (1, 2):
        coins, final = [[0.5] * (steps + 1)], [[0.25] * (steps + 1)]
        got = call("accept_sampled", [[9, 1, 2]], *links([tree]), probs, coins, final, steps=steps)
        assert got[0][0][:2] == [0, 2]
        assert got[3] == [1]


def test_rounded_mass_still_emits_a_possible_token(implementation):
    """All mass is on the children, but sums to less than 1: the coin falls past it."""
    short = 1 / 3 - 2.0**-20
    index, emitted = one_step([short, short, short, 0.0, 0.0], LAST_COIN, LAST_COIN)
    assert (index, emitted) == ([0], [2])


def test_rows_without_mass_give_no_token(implementation):
    """What may be embedded is token 0; padding rows have probabilities 0 and links -1."""
    nothing = [[-1, -1]]
    for value in (0.0, float("nan")):
        probs = torch.full((1, 2, 5), value)
        got = call(
            "accept_sampled",
            [[0, 0]],
            nothing,
            nothing,
            probs,
            [[0.0, 0.0]],
            [[0.5, 0.5]],
            steps=1,
        )
        assert got == [[[0, -1]], [[0, 0]], [1], [-1]]


def test_a_choice_of_none_ends_the_greedy_walk(implementation):
    """Wherever on the path it is, a child that holds token -1 included."""
    chain = Tree([-1] * 3, [-1, 0, 1])
    tokens = [[9, 4, 5], [9, 4, 5], [9, -1, 5], [9, 4, 5]]
    argmax = [[-1, 5, 6], [4, -1, 6], [-1, 5, 6], [4, 5, -1]]
    got = call("accept_greedy", tokens, *links([chain] * 4), argmax, steps=2)
    assert got == [
        [[0, -1, -1], [0, 1, -1], [0, -1, -1], [0, 1, 2]],
        [[0, 0, 0], [4, 0, 0], [0, 0, 0], [4, 5, 0]],
        [1, 2, 1, 3],
        [-1] * 4,
    ]


# what a row of the target holds where its logits were not finite, or may hold otherwise
UNSOUND = {
    "marked": lambda row: [math.nan] * len(row),
    "empty": lambda row: [0.0] * len(row),
    "one NaN": lambda row: [*row[:-1], math.nan],
    "infinite": lambda row: [*row[:-1], math.inf],
}


@pytest.mark.parametrize("name", UNSOUND)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_sampled_walk_ends_where_the_target_has_no_distribution(implementation, name, depth):
    """In a tree whose first children are taken; the token before is accepted as ever."""
    tree, probs = Tree([-1] * 5, [-1, 0, 0, 1, 1]), [[0.0, 0.5, 0.5, 0.0]] * 5
    tokens = [[0, 1, 2, 1, 2]]
    if depth < 2 and name in ("one NaN", "infinite"):
        # a child of a known probability would be taken before the whole row is read
        tokens = [[0, 1, 0, 0, 0]] if depth else [[0] * 5]
    path = [0, 1, 3][: depth + 1]
    probs = [UNSOUND[name](row) if node == path[-1] else row for node, row in enumerate(probs)]
    coins, final = [[0.0] * 3], [[0.5] * 3]
    got = call("accept_sampled", tokens, *links([tree]), [probs], coins, final, steps=2)
    taken = [tokens[0][node] for node in path[1:]]
    pad = [0] * (2 - depth)
    assert got == [[path + [-1] * (2 - depth)], [[*taken, 0, *pad]], [depth + 1], [-1]]


@pytest.mark.parametrize("name", UNSOUND)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_rejection_ends_where_the_target_has_no_distribution(implementation, name, depth):
    target = [[0.0, 0.5, 0.5, 0.0] for _ in range(3)]
    draft = [[[0.0, 0.5, 0.5, 0.0]] * 2]
    tokens = [[0, 1, 1]]
    if depth < 2 and name in ("one NaN", "infinite"):
        # a token of a known probability would be taken before the whole row is read
        tokens[0][depth + 1] = 0
    target[depth] = UNSOUND[name](target[depth])
    got = call("accept_rejection", tokens, draft, [target], [[0.5] * 3], [[0.5] * 3], steps=2)
    path, pad = list(range(depth + 1)), [0] * (2 - depth)
    assert got == [[path + [-1] * (2 - depth)], [[1] * depth + [0, *pad]], [depth + 1], [-1]]


def test_a_draft_without_a_distribution_is_refused_for_the_target_s_own(implementation):
    target = [[[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]] * 2
    draft = [[[math.nan] * 3]] * 2
    got = call(
        "accept_rejection",
        [[0, 1]] * 2,
        draft,
        target,
        [[0.0] * 2] * 2,
        [[0.2] * 2, [0.3] * 2],
        steps=1,
    )
    assert got[2:] == [[1, 1], [1, 2]]


@pytest.mark.parametrize("vocab", [4095, 4097, 9001])
def test_final_draw_over_many_blocks(implementation, vocab):
    """Mass in few places of a large vocabulary, at block edges; NaN in rows not visited."""
    places = [0, 4094, min(4096, vocab - 1), vocab - 1]
    probs = torch.full((8, 3, vocab), float("nan"))
    probs[:, 0] = 0
    probs[:, 0, places] = 0.25
    tree = Tree([-1] * 3, [-1, 0, 0])
    tokens = [[0, 4094, 1]] * 8
    coins = [[LAST_COIN, 0.0]] * 8
    final = [[i / 8, 0.5] for i in range(8)]
    got = call("accept_sampled", tokens, *links([tree] * 8), probs, coins, final, steps=1)
    left = sorted({p for p in places if p != 4094})
    assert got[3] == [left[i * len(left) // 8] for i in range(8)]


def test_strided_target_probs(implementation):
    rng = random.Random(6)
    tree, vocab = random_tree(rng, 5, 3), 6
    tokens = [[rng.randrange(vocab) for _ in range(5)]]
    probs = torch.tensor([dyadic_rows(rng, 5, vocab)])
    wide = torch.full((1, 5, vocab + 3), float("nan"))
    wide[:, :, :vocab] = probs
    coins = [[rng.random() for _ in range(4)]], [[rng.random() for _ in range(4)]]
    results = [
        call(
            "accept_sampled",
            tokens,
            *links([tree]),
            p.to(DEVICE)[:, :, :vocab],
            *coins,
            steps=3,
        )
        for p in (probs, wide)
    ]
    assert results[0] == results[1]


def rejection_walk(tokens, draft, target, coins, final_coins):
    steps, path, emitted = len(draft), [0], []
    for depth in range(steps):
        token = tokens[depth + 1]
        p, q = Fraction(target[depth][token]), Fraction(draft[depth][token])
        if not Fraction(coins[depth]) * q < p:
            break
        path.append(depth + 1)
        emitted.append(token)
    last = len(path) - 1
    weights = [Fraction(p) for p in target[last]]
    if last < steps:
        rest = [
            max(p - Fraction(q), Fraction(0)) for p, q in zip(weights, draft[last], strict=True)
        ]
        weights = rest if sum(rest) else weights
    return path, [*emitted, inverse_cdf(weights, Fraction(final_coins[last]))]


@pytest.mark.parametrize(("steps", "vocab"), [(0, 4), (1, 3), (4, 7), (7, 33)])
def test_rejection_walk(implementation, steps, vocab):
    rng = random.Random(steps)
    batch = 20
    tokens = [[rng.randrange(vocab) for _ in range(steps + 1)] for _ in range(batch)]
    target = [dyadic_rows(rng, steps + 1, vocab) for _ in range(batch)]
    draft = [dyadic_rows(rng, steps, vocab) for _ in range(batch)]
    draft[1], draft[2] = target[1][:steps], target[2][:steps]
    coins, final = ([[some_coin(rng) for _ in range(steps + 1)] for _ in tokens] for _ in range(2))
    walks = [rejection_walk(*row) for row in zip(tokens, draft, target, coins, final, strict=True)]
    draft = torch.tensor(draft, dtype=torch.float32).reshape(batch, steps, vocab)
    got = call("accept_rejection", tokens, draft, target, coins, final, steps=steps)
    assert got == expected(*zip(*walks, strict=True), steps)


def test_rejection_at_the_edges(implementation):
    """Coin 0 takes nothing impossible; p = q is always taken; an unknown token never."""
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]).expand(4, 2, 2)
    draft = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.5, 0.5]], [[0.0, 1.0]]])
    tokens = [[0, 0], [0, 1], [0, 0], [0, 7]]
    coins = [[0.0, 0.0], [LAST_COIN, 0.0], [0.0, 0.0], [0.0, 0.0]]
    got = call("accept_rejection", tokens, draft, target, coins, [[0.0, 0.75]] * 4, steps=1)
    assert got[1] == [[1, 0], [1, 1], [1, 0], [1, 0]]
    assert got[2] == [1, 2, 1, 1]


def test_kernel_and_twin_agree_on_arbitrary_links():
    """Links full of cycles, shared children and strays: the same bounded walk in both."""
    rng = random.Random(11)
    n, steps, batch, vocab = 6, 4, 50, 3
    rows = [[[rng.randrange(-2, n + 2) for _ in range(n)] for _ in range(batch)] for _ in range(2)]
    tokens = [[rng.randrange(vocab) for _ in range(n)] for _ in range(batch)]
    argmax = [[rng.randrange(vocab) for _ in range(n)] for _ in range(batch)]
    probs = [dyadic_rows(rng, n, vocab) for _ in range(batch)]
    coins = [[[some_coin(rng) for _ in range(steps + 1)] for _ in range(batch)] for _ in range(2)]
    greedy = both("accept_greedy", tokens, *rows, argmax, steps=steps)
    assert greedy[0] == greedy[1]
    assert max(greedy[0][2]) == steps + 1
    sampled = both("accept_sampled", tokens, *rows, probs, *coins, steps=steps)
    assert sampled[0] == sampled[1]


def test_coins_of_another_depth_are_refused():
    dense = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"final_coins must be \[2, 3\], got \[2, 4\]"):
        accept_sampled(
            linked_tree(dense, dense, dense),
            torch.zeros(2, 3, 5),
            torch.zeros(2, 3),
            torch.zeros(2, 4),
            out=poisoned_path(2, 2),
        )


def test_launchers_name_what_is_not_dense():
    wide = torch.zeros(2, 6, dtype=torch.int64, device=DEVICE)
    dense = wide[:, :3].contiguous()
    with pytest.raises(ValueError, match="target_argmax must be contiguous"):
        accept_greedy(linked_tree(dense, dense, dense), wide[:, :3], out=poisoned_path(2, 2))
