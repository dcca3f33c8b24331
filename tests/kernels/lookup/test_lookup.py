"""lookup_tree and append_text against searches of lists in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specattn.kernels.lookup import append_text, lookup_tree
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE, POISON, poisoned


def common_end(text, place, longest):
    """How many tokens up to ``place`` are those up to the end."""
    for size in range(longest, 0, -1):
        start = place - size + 1
        if start >= 0 and text[start : place + 1] == text[-size:]:
            return size
    return 0


def continuation(text, place, steps):
    """The tokens after ``place``, of a text that goes on as it did there."""
    grown = list(text)
    for step in range(steps):
        grown.append(grown[place + 1 + step])
    return grown[len(text) :]


def brute_force(text, nodes, *, matches, min_ngram, max_ngram, num_steps):
    """Tokens, parents and the first match's length, by the definition alone."""
    places = [(common_end(text, p, max_ngram), p) for p in range(len(text) - 1)]
    found = sorted((m for m in places if m[0] >= min_ngram), reverse=True)[:matches]
    tokens, parents, children = [text[-1]], [-1], {}
    for _, place in found:
        node = 0
        for token in continuation(text, place, num_steps):
            if (node, token) not in children:
                children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = children[node, token]
    rest = nodes - len(tokens)
    tokens, parents = tokens + [0] * rest, parents + [-1] * rest
    return tokens[:nodes], parents[:nodes], found[0][0] if found else 0


def table_of(texts, context, *, gap=0):
    """A table of all texts, in rows of another order, with poison behind their ends."""
    rows = list(range(1, len(texts) + 1))
    random.Random(len(texts)).shuffle(rows)
    table = poisoned(len(texts) + 1, context, dtype=torch.int32, gap=gap)
    for row, text in zip(rows, texts, strict=True):
        table[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    lens = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32, device=DEVICE)
    return table, torch.tensor(rows, device=DEVICE), lens


def look_up(texts, nodes, *, context, gap=0, **settings):
    table, rows, lens = table_of(texts, context, gap=gap)
    out = {
        "tokens_out": poisoned(len(texts), nodes),
        "parents_out": poisoned(len(texts), nodes),
        "ngrams_out": poisoned(len(texts), dtype=torch.int32),
    }
    lookup_tree(table, rows, lens, **settings, **out)
    return [out[name].tolist() for name in ("tokens_out", "parents_out", "ngrams_out")]


def check(texts, nodes, *, context=None, gap=0, **settings):
    context = context or max(len(text) for text in texts)
    got = look_up(texts, nodes, context=context, gap=gap, **settings)
    wanted = [brute_force(text, nodes, **settings) for text in texts]
    assert got == [list(column) for column in zip(*wanted, strict=True)]


def random_text(rng, length, alphabet):
    return [rng.randrange(alphabet) for _ in range(length)]


# length of the text, alphabet, nodes, matches, shortest, longest, steps
CASES = [
    (1, 2, 4, 1, 1, 3, 3),
    (2, 1, 4, 1, 1, 3, 3),
    (2, 1, 1, 2, 1, 1, 1),
    (9, 1, 12, 3, 2, 4, 5),
    (60, 2, 6, 1, 1, 5, 5),
    (61, 3, 16, 4, 2, 3, 7),
    (63, 2, 65, 32, 1, 64, 6),
    (200, 3, 129, 13, 1, 4, 17),
    (200, 2, 256, 7, 3, 9, 50),
    (300, 4, 200, 1, 2, 4, 255),
    (300, 90, 8, 3, 2, 4, 5),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_shapes(implementation, case):
    length, alphabet, nodes, matches, shortest, longest, steps = case
    rng = random.Random(sum(case))
    lengths = (length, max(1, length - 7), length)
    check(
        [random_text(rng, size, alphabet) for size in lengths],
        nodes,
        matches=matches,
        min_ngram=shortest,
        max_ngram=longest,
        num_steps=steps,
        context=length + 5,
        gap=3,
    )


def test_a_longer_match_comes_before_a_later_one(implementation):
    """[1 2 3] is followed by 7, the later [2 3] by 8: both are there, 7 first."""
    text = [1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 5, 1, 2, 3]
    got = look_up([text], 5, context=20, matches=2, min_ngram=2, max_ngram=3, num_steps=2)
    assert got == [[[3, 7, 7, 8, 8]], [[-1, 0, 1, 0, 3]], [3]]


def test_the_later_match_comes_first_and_prefixes_are_shared(implementation):
    text = [5, 1, 2, 5, 1, 3, 5, 4, 4, 5]
    got = look_up([text], 8, context=10, matches=3, min_ngram=1, max_ngram=2, num_steps=2)
    assert got == [[[5, 4, 4, 1, 3, 2, 0, 0]], [[-1, 0, 1, 0, 3, 3, -1, -1]], [1]]


def test_a_text_that_repeats_itself_goes_on(implementation):
    got = look_up(
        [[9, 1, 2, 3, 1, 2, 3]], 9, context=7, matches=1, min_ngram=1, max_ngram=3, num_steps=8
    )
    assert got == [[[3, 1, 2, 3, 1, 2, 3, 1, 2]], [list(range(-1, 8))], [3]]


def test_no_match_leaves_the_root_alone(implementation):
    got = look_up([[1, 2, 3], [4]], 3, context=4, matches=2, min_ngram=1, max_ngram=2, num_steps=2)
    assert got == [[[3, 0, 0], [4, 0, 0]], [[-1] * 3, [-1] * 3], [0, 0]]


@pytest.mark.parametrize("alphabet", [1, 2, 30])
def test_matches_in_many_blocks(implementation, alphabet):
    """Texts of several blocks and an odd rest, of which every place or hardly one matches."""
    rng = random.Random(alphabet)
    texts = [random_text(rng, size, alphabet) for size in (3081, 1025, 2048)]
    check(texts, 20, matches=5, min_ngram=1, max_ngram=4, num_steps=6, context=4100)


def test_slices_take_several_blocks(implementation, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("specattn.kernels.lookup._SLICES", 2)
    rng = random.Random(5)
    texts = [random_text(rng, size, 9) for size in (5000, 1900)]
    check(texts, 20, matches=5, min_ngram=2, max_ngram=5, num_steps=6, context=6000)


@st.composite
def problems(draw):
    alphabet = draw(st.integers(1, 4))
    text = st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=40)
    texts = draw(st.lists(text, min_size=1, max_size=3))
    longest = draw(st.integers(1, 6))
    settings = {
        "matches": draw(st.integers(1, 6)),
        "min_ngram": draw(st.integers(1, longest)),
        "max_ngram": longest,
        "num_steps": draw(st.integers(1, 9)),
    }
    return texts, draw(st.integers(1, 40)), settings


@settings(max_examples=150)
@given(problems())
def test_fuzz_naive(problem):
    texts, nodes, numbers = problem
    with using("naive"):
        check(texts, nodes, **numbers)


@settings(max_examples=60)
@given(problems())
def test_fuzz_triton(problem):
    texts, nodes, numbers = problem
    with using("triton"):
        check(texts, nodes, **numbers)


@pytest.mark.parametrize("depth", [1, 5])
def test_tokens_are_appended_behind_the_newest(implementation, depth):
    context, batch = 23, 5
    # what lies behind a row is another's
    memory = torch.arange(7 * (context + 4), dtype=torch.int32, device=DEVICE).view(7, -1)
    wanted = memory.tolist()
    rows = [3, 0, 6, 0, 1]
    lens = [depth, 1, max(depth - 2, 0), depth, depth]
    # the last request is at the end of its context
    ends = [4, 0, 9, 7, context - 3]
    tokens = poisoned(batch, depth, gap=2)
    tokens.copy_(torch.arange(batch * depth).view(batch, depth) + 10_000)
    for row, end, count, new in zip(rows, ends, lens, tokens.tolist(), strict=True):
        if row:
            count = min(count, context - 1 - end)
            wanted[row][end + 1 : end + 1 + count] = new[:count]
    append_text(
        memory[:, :context],
        torch.tensor(rows, device=DEVICE),
        torch.tensor(ends, dtype=torch.int32, device=DEVICE),
        tokens,
        torch.tensor(lens, dtype=torch.int32, device=DEVICE),
    )
    assert memory.tolist() == wanted
    assert POISON not in memory.flatten().tolist()


def test_no_requests(implementation):
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    text = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
    tree = none.view(0, 4)
    lookup_tree(
        text,
        none,
        none.int(),
        matches=1,
        min_ngram=1,
        max_ngram=2,
        num_steps=3,
        tokens_out=tree,
        parents_out=tree,
        ngrams_out=none.int(),
    )
    append_text(text, none, none.int(), tree, none.int())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matches": 0}, "matches must be 1..32, got 0"),
        ({"min_ngram": 4}, "min_ngram must be 1..3, got 4"),
        ({"max_ngram": 65}, "max_ngram must be 1..64, got 65"),
        ({"num_steps": 256}, "num_steps must be 1..255, got 256"),
    ],
)
def test_numbers_outside_their_range_are_named(change, message):
    settings = {"matches": 2, "min_ngram": 1, "max_ngram": 3, "num_steps": 4} | change
    with pytest.raises(ValueError, match=message):
        look_up([[1, 2, 1]], 4, context=9, **settings)


def test_tensors_of_another_kind_are_named():
    table, rows, lens = table_of([[1, 2, 1]], 9)
    numbers = {"matches": 2, "min_ngram": 1, "max_ngram": 3, "num_steps": 4}
    out = {"tokens_out": poisoned(1, 4), "parents_out": poisoned(1, 4), "ngrams_out": lens.clone()}
    with pytest.raises(ValueError, match="text must be"):
        lookup_tree(table.long(), rows, lens, **numbers, **out)
    with pytest.raises(ValueError, match="seq_lens must be"):
        lookup_tree(table, rows, lens.long(), **numbers, **out)
    with pytest.raises(ValueError, match=r"nodes must be 1\.\.256, got 257"):
        lookup_tree(table, rows, lens, **numbers, **out | {"tokens_out": poisoned(1, 257)})
    with pytest.raises(ValueError, match=r"parents_out must be \[1, 4\]"):
        lookup_tree(table, rows, lens, **numbers, **out | {"parents_out": poisoned(1, 5)})
    with pytest.raises(ValueError, match="lens must be"):
        append_text(table, rows, lens, poisoned(1, 4), lens.long())


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "batch"), [(131_072, 1), (32_768, 16), (4_097, 64)])
def test_kernel_and_torch_agree_where_no_brute_force_goes(length, batch):
    generator = torch.Generator(DEVICE).manual_seed(length)
    text = torch.randint(40, (batch + 1, length), device=DEVICE, generator=generator).int()
    # one text is a loop, one has no match
    text[1] = torch.arange(length, device=DEVICE) % 7
    text[-1] = torch.arange(length, device=DEVICE)
    rows = torch.arange(1, batch + 1, device=DEVICE)
    lens = torch.full((batch,), length - 1, dtype=torch.int32, device=DEVICE)
    lens -= torch.arange(batch, dtype=torch.int32, device=DEVICE) * 50
    results = []
    for implementation in ("naive", "triton"):
        out = [torch.full((batch, 64), POISON, device=DEVICE) for _ in range(2)]
        out.append(lens.clone())
        with using(implementation):
            lookup_tree(
                text,
                rows,
                lens,
                matches=8,
                min_ngram=2,
                max_ngram=8,
                num_steps=15,
                tokens_out=out[0],
                parents_out=out[1],
                ngrams_out=out[2],
            )
        results.append(out)
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_a_replay_reads_what_is_there_then():
    rng = random.Random(1)
    text = torch.zeros(3, 5000, dtype=torch.int32, device="cuda")
    rows = torch.tensor([2, 1], device="cuda")
    lens = torch.tensor([4000, 200], dtype=torch.int32, device="cuda")
    new, counts = torch.ones(2, 4, dtype=torch.int64, device="cuda"), torch.zeros_like(lens)
    out = {name: torch.empty(2, 20, dtype=torch.int64, device="cuda") for name in ("a", "b")}
    ngrams = torch.empty_like(lens)

    def step():
        lookup_tree(
            text,
            rows,
            lens,
            matches=4,
            min_ngram=1,
            max_ngram=4,
            num_steps=7,
            tokens_out=out["a"],
            parents_out=out["b"],
            ngrams_out=ngrams,
        )
        append_text(text, rows, lens, new, counts)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for length in (30, 700, 4900):
        texts = [random_text(rng, size, 5) for size in (length, length // 2)]
        for row, tokens in zip((2, 1), texts, strict=True):
            text[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        lens.copy_(torch.tensor([len(tokens) - 1 for tokens in texts]))
        counts.fill_(3)
        graph.replay()
        numbers = {"matches": 4, "min_ngram": 1, "max_ngram": 4, "num_steps": 7}
        wanted = [brute_force(tokens, 20, **numbers) for tokens in texts]
        assert out["a"].tolist() == [tokens for tokens, _, _ in wanted]
        assert out["b"].tolist() == [parents for _, parents, _ in wanted]
        assert text[2, length : length + 3].tolist() == [1, 1, 1]
