"""Requests that do not fit into the slots together are decoded a few at a time, none dropped."""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import CapacityError
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.churn import Dice
from tests.engines import engine as tiny_engine
from tests.samples import half, sampled, star
from tests.tiny import dense_greedy

CONTEXT, ROWS = 64, 4
TREE, NEW = (3, 4, 9), 25
RESERVE = SpecConfig(*TREE).reserve_len
PROMPTS = [[(7 * at + 3 * step) % 61 for step in range(20)] for at in range(6)]
# slots that a request of them may need to its end
WHOLE = 20 + NEW - 2 + RESERVE


@pytest.fixture(scope="module")
def greedy(models):
    return [dense_greedy(models[0], prompt, CONTEXT + 1 - 20) for prompt in PROMPTS]


def engine(models, slots: int, *trees, **options) -> Engine:
    options |= {"models": models, "slots": slots, "backend": "torch_native"}
    return tiny_engine(TREE, *trees, context=CONTEXT, rows=ROWS, buckets=(1, ROWS), **options)


def generate(run: Engine, requests, want) -> int:
    """Decode requests; returns how many ran at once at most."""
    told: dict[int, list[int]] = {}
    most = 0

    def note(index: int, new: list[int]) -> None:
        nonlocal most
        told.setdefault(index, []).extend(new)
        most = max(most, run.num_running)

    free = run.table.num_free_slots
    results = run.generate(requests, note)
    for at, (request, result) in enumerate(zip(requests, results, strict=True)):
        count = min(request.max_new_tokens, CONTEXT + 1 - len(request.prompt))
        assert result.tokens == told[at] == want[at][:count]
        assert result.finish_reason == ("context" if count < request.max_new_tokens else "length")
    check_books(run.table)
    assert run.table.num_free_slots == free
    return most


@sampled(half, fitting=[1, 2, 3, 4], page_size=[1, 4])
def test_as_many_run_as_reach_their_ends_together(models, greedy, fitting, page_size):
    """To a slot: one less, and one less of them runs."""
    slots = fitting * -(-WHOLE // page_size) * page_size
    requests = [Request(prompt, NEW) for prompt in PROMPTS]
    assert generate(engine(models, slots, page_size=page_size), requests, greedy) == fitting
    if fitting > 1:
        run = engine(models, slots - page_size, page_size=page_size)
        assert generate(run, requests, greedy) == fitting - 1


@sampled(star, switching={"switching": True, "one setting": False}, slots=[97, 64, 79, 150])
def test_requests_of_all_lengths_end_exactly(models, greedy, switching, slots):
    """Some at once, some at their contexts' ends; prompts alone would fill the pool to the brim."""
    more = {"policy": Dice(3)} if switching else {}
    trees = [(2, 1, 3), (0, 1, 1)] if switching else []
    new = [1, 99, 7, 2, 40, 12]
    requests = [Request(prompt, count) for prompt, count in zip(PROMPTS, new, strict=True)]
    generate(engine(models, slots, *trees, **more), requests, greedy)
    ones = [Request(prompt, 1) for prompt in PROMPTS]
    generate(engine(models, 30, *trees, **more), ones, greedy)


def test_prefixes_that_are_shared_take_their_slots_once(models):
    shared = PROMPTS[0]
    requests = [Request([*shared, last], 8) for last in (5, 7, 9, 11)]
    want = [dense_greedy(models[0], request.prompt, 8) for request in requests]
    own = 1 + 8 - 2 + RESERVE
    # one holds the prefix; all but its last token are shared
    run = engine(models, len(shared) - 1 + ROWS * (own + 1))
    assert generate(run, requests, want) == ROWS


def test_one_that_does_not_fit_by_itself_is_an_error(models, greedy):
    """Be it the prompt, or what it grows into; whoever came before it has ended by then."""
    for slots in (19, 40):
        run, told = engine(models, slots), []
        with pytest.raises(CapacityError, match="more pages of 1 KV slots are needed"):
            run.generate(
                [Request(PROMPTS[0][:5], 3), Request(PROMPTS[1], 40)],
                lambda index, new, told=told: told.append(index),
            )
        assert told.count(0) >= 2
        assert run.num_running == 0
        assert run.table.num_free_slots == slots


def test_one_that_may_not_fit_runs_by_itself(models, greedy):
    """It ends before its slots do; the next one would have taken them."""
    end = 15
    run = engine(models, 20 + end - 2 + RESERVE, detokenize=lambda tokens: "x" * len(tokens))
    requests = [
        Request(PROMPTS[0][:5], 3),
        Request(PROMPTS[1], 99, stop=("x" * end,)),
        Request(PROMPTS[2][:5], 3),
    ]
    together = []
    results = run.generate(requests, lambda index, _: together.append((index, run.num_running)))
    assert results[1].tokens == greedy[1][:end]
    assert results[1].finish_reason == "stop"
    assert {live for index, live in together if index == 1} <= {0, 1}
    for at in (0, 2):
        assert results[at].tokens == dense_greedy(models[0], PROMPTS[at][:5], 3)


def test_who_waits_is_looked_at_again_when_somebody_has_ended(models, greedy, monkeypatch):
    run, tries = engine(models, 2 * WHOLE), []
    admit = run._admission.admit

    def noted(requests, **how):
        tries.append(len(requests))
        return admit(requests, **how)

    monkeypatch.setattr(run._admission, "admit", noted)
    generate(run, [Request(prompt, NEW) for prompt in PROMPTS], greedy)
    # 4 rows are free, but slots for 2; then one row more for each that ends
    assert tries[:3] == [4, 2, 2]
    assert len(tries) < 5 * len(PROMPTS)


def test_drawn_tokens_do_not_depend_on_who_waits(models):
    requests = [
        Request(prompt, NEW, SamplingParams(0.9, seed=at)) for at, prompt in enumerate(PROMPTS)
    ]
    want = engine(models, ROWS * CONTEXT).generate(requests)
    for slots in (WHOLE, 2 * WHOLE + 5):
        got = engine(models, slots).generate(requests)
        assert [one.tokens for one in got] == [one.tokens for one in want]


def test_who_runs_before_gets_to_its_end_first(models, greedy):
    """Requests of `generate` do not take what one that was added before will grow into."""
    run, prompt = engine(models, WHOLE), PROMPTS[1][:2]
    for pending in (False, True):
        (before,) = run.add([Request(PROMPTS[0], NEW)])
        if pending:
            run.step(ahead=True)
        # the prompt's slots are free, and those of its text are now
        results = run.generate([Request(prompt, 15)] * 2)
        assert before.tokens == greedy[0][:NEW]
        assert before.finish_reason == "length"
        for result in results:
            assert result.tokens == dense_greedy(models[0], prompt, 15)
        assert run.table.num_free_slots == WHOLE


def test_who_ended_at_once_is_told_before_the_next_one_is_an_error(models):
    run, told = engine(models, 12), []
    with pytest.raises(CapacityError, match="more pages of 1 KV slots are needed"):
        run.generate(
            [Request([3], 1), Request(PROMPTS[1], 5)], lambda index, new: told.append((index, new))
        )
    assert told == [(0, dense_greedy(models[0], [3], 1))]


def test_who_waits_may_be_dropped_and_lets_others_by(models, greedy):
    small = Request(PROMPTS[2][:5], 3)
    run = engine(models, WHOLE + 5 + 3 - 2 + RESERVE)
    (running,) = run.add([Request(PROMPTS[0], NEW)])
    large, next_one = run.scheduler.wait([Request(PROMPTS[1], NEW), small])
    for _ in range(2):
        assert run._admission.admit_waiting() == [], "the first one that waits does not fit"
    run.drop(large)
    assert (large.tokens, large.finish_reason) == ([], "dropped")
    with pytest.raises(ValueError, match="which runs in this engine, or waits"):
        run.drop(large)
    assert run._admission.admit_waiting() == [], "its first token comes with the steps"
    assert run.num_running == 2
    while run.num_running:
        run.step(ahead=True)
    assert running.tokens == greedy[0][:NEW]
    assert next_one.tokens == dense_greedy(models[0], small.prompt, 3)
    check_books(run.table)
    assert run.table.num_free_rows == ROWS
