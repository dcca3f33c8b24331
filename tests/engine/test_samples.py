"""Samples of one prompt share its KV; each is what its seed gives by itself."""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import CapacityError
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.engines import engine as tiny_engine
from tests.samples import half, on_cpu

CONTEXT, ROWS, N, NEW, PAGE = 64, 4, 3, 20, 4
PROMPT = [7 * at % 61 for at in range(22)]
# of the prompt's 6 pages, the last is not full, and the token before it is run for its logits
SHARED = 5
TREES = {"plain": (0, 1, 1), "chain": (3, 1, 4), "tree": (3, 4, 9)}
DRAWN = Request(PROMPT, NEW, SamplingParams(0.9, seed=11))


@pytest.fixture(scope="module")
def want(models) -> list[list[int]]:
    return [result.tokens for result in engine(models).generate(DRAWN.samples(N))]


def engine(models, tree=(3, 4, 9), **options) -> Engine:
    options |= {"models": models, "backend": "torch_native", "buckets": (1, ROWS)}
    return tiny_engine(tree, context=CONTEXT, rows=ROWS, page_size=PAGE, **options)


def pages(run: Engine) -> list[tuple[int, ...]]:
    """The pages of whoever runs; the table is sound."""
    check_books(run.table)
    return [run.table.pages(one.row) for one in run.running]


def held(run: Engine) -> int:
    """Pages that somebody holds."""
    return run.table.num_pages - 1 - run.table.num_free_slots // PAGE


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_every_sample_is_what_its_seed_gives_alone(models, tree):
    alone = engine(models, tree)
    want = [
        alone.generate([Request(PROMPT, NEW, SamplingParams(0.9, seed=11 + at))])[0].tokens
        for at in range(6)
    ]
    assert len(set(map(tuple, want))) > 3, "the samples differ"
    # two of the six wait for a row
    got = engine(models, tree).generate(DRAWN.samples(6))
    assert [result.tokens for result in got] == want


def test_their_slots_are_counted_once(models):
    run = engine(models)
    run.add(DRAWN.samples(N))
    first, *others = pages(run)
    assert all(one[:SHARED] == first[:SHARED] for one in others)
    own = [set(one[SHARED:]) for one in (first, *others)]
    assert len(set().union(*own)) == sum(map(len, own)), "nothing else is shared"
    assert held(run) == SHARED + sum(map(len, own))
    while run.num_running:
        run.step(ahead=True)
        pages(run)
    assert held(run) == 0


@on_cpu(half, "end", "who")
@pytest.mark.parametrize("who", range(N), ids=["the donor", "the second", "the last"])
@pytest.mark.parametrize("end", ["dropped", "length"])
def test_whoever_ends_first_leaves_the_prompt_to_the_others(models, want, who, end):
    samples = DRAWN.samples(N)
    if end == "length":
        samples[who] = Request(PROMPT, 2, samples[who].sampling)
    run = engine(models)
    results = run.add(samples)
    own = pages(run)
    if end == "dropped":
        run.drop(results[who])
    while not results[who].finish_reason:
        run.step(ahead=True)
    assert run.num_running == N - 1
    now = pages(run)
    assert all(one[:SHARED] == own[who][:SHARED] for one in now)
    assert held(run) == len(set().union(*map(set, now)))
    while run.num_running:
        run.step(ahead=True)
        pages(run)
    assert held(run) == 0
    for result, tokens in zip(results, want, strict=True):
        assert result.tokens == tokens[: len(result.tokens)]
    assert [result.finish_reason for result in results].count("length") >= N - 1


def test_slots_for_one_prompt_hold_many_samples(models, want):
    """With a prompt each, a second one would not fit."""
    longest = -(-(len(PROMPT) + NEW - 2 + SpecConfig(3, 4, 9).reserve_len) // PAGE)
    slots = (1 + SHARED + N * (longest - SHARED)) * PAGE
    for fitting in (N, N - 1):
        run, most = engine(models, num_slots=slots - (N - fitting) * PAGE), []
        results = run.generate(DRAWN.samples(N), lambda *_, m=most, r=run: m.append(r.num_running))
        assert max(most) == fitting
        # a try to admit all of them leaves nothing behind
        assert [result.tokens for result in results] == want


def test_more_samples_than_rows_are_refused_where_none_waits(models):
    run = engine(models)
    with pytest.raises(CapacityError, match=r"requests must be at most 4, .*rows are free, got 5"):
        run.add(DRAWN.samples(5))
    run.add(DRAWN.samples(3))
    with pytest.raises(CapacityError, match=r"requests must be at most 1, .*rows are free, got 2"):
        run.add(DRAWN.samples(2))
    assert run.num_running == 3
    run.clear()
    assert len(run.generate(DRAWN.samples(5))) == 5


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_a_number_of_samples_is_at_least_one(n):
    with pytest.raises(ValueError, match="n must be"):
        DRAWN.samples(n)


def test_seeds_follow_the_requests_own():
    assert [one.sampling.seed for one in DRAWN.samples(3)] == [11, 12, 13]
    assert DRAWN.samples(1) == [DRAWN]
    last = Request(PROMPT, sampling=SamplingParams(1.0, seed=2**63 - 1))
    assert last.samples(1) == [last]
    named = f"seed must be at most {2**63 - 2} for n = 2 samples, got {2**63 - 1}"
    with pytest.raises(ValueError, match=named):
        last.samples(2)
