"""A request that is dropped leaves at once; nobody else loses a token, a row or a slot by it."""

from __future__ import annotations

import random

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.request import RequestOutput
from specattn.errors import CapacityError
from tests.books import check_books
from tests.churn import Dice
from tests.samples import half, sampled
from tests.speculative.test_host_plans import PlanningBackend
from tests.tiny import dense_greedy

CONTEXT = 64
SHARED = [7 * i % 61 for i in range(20)]
# three share a prefix; the last comes to its context's end
KINDS = [
    Request([*SHARED, 5], 20),
    Request([*SHARED, 9, 2], 12),
    Request([*SHARED, 9], 25),
    Request([3, 14, 15], 30),
    Request([35], 9),
    Request([8] * 40, 99),
]
OPTIONS = {
    "one": {},
    "piecewise": {"cudagraph": "piecewise"},
    "tbo": {"tbo": True},
    "host plans": {"backend": PlanningBackend},
}


@pytest.fixture(scope="module")
def greedy(models):
    counts = [min(kind.max_new_tokens, CONTEXT + 1 - len(kind.prompt)) for kind in KINDS]
    return [
        dense_greedy(models[0], kind.prompt, count)
        for kind, count in zip(KINDS, counts, strict=True)
    ]


def engine(models, *trees, page_size=1, **options) -> Engine:
    config, *more = (SpecConfig(*tree, CONTEXT, 4, page_size) for tree in ((3, 4, 9), *trees))
    settings = {"backend": "torch_native", "buckets": (1, 4)} | options
    return Engine(*models, config, configs=more, **settings)


@sampled(
    half,
    options=OPTIONS,
    switching={"one setting": False, "switching": True},
    ahead={"waited": False, "ahead": True},
)
def test_whoever_is_dropped_the_others_texts_stay_exact(models, greedy, options, switching, ahead):
    """At random, also between the launch of a step and its reading, and in mid-prefix."""
    more = {"policy": Dice(2)} if switching else {}
    trees = [(2, 1, 3), (0, 1, 1)] if switching else []
    page_size = 4 if ahead else 1
    run, rng = engine(models, *trees, page_size=page_size, **more, **options), random.Random(5)
    slots = run.table.num_free_slots
    running: list[tuple[int, RequestOutput]] = []
    ended: list[tuple[int, RequestOutput, list[int]]] = []
    riding = dropped = 0
    for _ in range(50):
        if len(running) < 4 and rng.random() < 0.5:
            kinds = rng.sample(range(len(KINDS)), rng.randint(1, 4 - len(running)))
            running += zip(kinds, run.add([KINDS[at] for at in kinds]), strict=True)
        gained = [result for result, _ in run.step(ahead=ahead)]
        assert not any(result is gone for result in gained for _, gone, _ in ended)
        for item in list(running):
            live = not item[1].finish_reason
            if live and rng.random() < 0.1:
                riding += any(
                    one.result is item[1] for step in run._flight.steps for one in step.group
                )
                run.drop(item[1])
                dropped += 1
                assert item[1].finish_reason == "dropped"
                assert item[1].finished_at >= item[1].first_token_at
            if item[1].finish_reason:
                running.remove(item)
                ended.append((*item, list(item[1].tokens)))
        assert run.num_running == len(running) == 4 - run.table.num_free_rows
        check_books(run.table)
    assert dropped > 3
    assert bool(riding) == (ahead and options.get("backend") is None)
    for at, result, tokens in ended:
        assert result.tokens == tokens, "it gained something after its end"
        want = greedy[at]
        if result.finish_reason != "dropped":
            assert len(tokens) == len(want)
        assert tokens == want[: len(tokens)]
    for _, result in running:
        run.drop(result)
    assert run.num_running == 0
    assert run.table.num_free_slots == slots


def test_who_is_dropped_lets_others_go_on_that_lack_slots(models):
    """Two requests have grown until neither has slots for a step."""
    config = SpecConfig(3, 4, 9, 96, 2)
    run = Engine(*models, config, backend="torch_native", buckets=(2,), num_slots=61)
    first, second = run.add([Request([3, 14], 45), Request([5], 45)])
    with pytest.raises(CapacityError):  # noqa: PT012
        while run.num_running == 2:
            run.step(ahead=True)
    assert run.num_running == 2
    kept = list(second.tokens)
    run.drop(second)
    check_books(run.table)
    while run.num_running:
        run.step(ahead=True)
    assert (first.finish_reason, second.finish_reason) == ("length", "dropped")
    assert first.tokens == dense_greedy(models[0], [3, 14], 45)
    assert second.tokens == kept == dense_greedy(models[0], [5], len(kept))
    assert run.table.num_free_slots == 60


def test_who_does_not_run_cannot_be_dropped(models):
    run, other = engine(models), engine(models)
    ended, dropped, live = run.add([Request([35], 1), *(Request([3, 1], 9) for _ in range(2))])
    run.drop(dropped)
    for bad in (ended, dropped, RequestOutput(), *other.add([Request([3], 9)])):
        reason = bad.finish_reason
        with pytest.raises(ValueError, match="which runs in this engine"):
            run.drop(bad)
        assert bad.finish_reason == reason
    assert run.num_running == other.num_running == 1
    while run.num_running:
        run.step()
    assert live.tokens == dense_greedy(models[0], [3, 1], 9)
    check_books(run.table)


def test_clear_drops_them_all(models):
    run = engine(models)
    results = run.add([Request([35], 1), Request([3], 9), Request([9], 9)])
    run.clear()
    assert [result.finish_reason for result in results] == ["length", "dropped", "dropped"]
    assert run.table.num_free_rows == 4


def test_a_drop_that_is_refused_leaves_the_request_running(models):
    """Between the parts of a step of its row, which keeps it."""
    run, refused = engine(models, cudagraph="piecewise"), []
    result, other = run.add([Request([3, 14], 9), Request([5], 9)])
    row = run.running[0].row

    def drop(_part) -> None:
        with pytest.raises(ValueError, match=f"row {row} takes part in a step"):
            run.drop(result)
        refused.append((result.finish_reason, result.finished_at, run.num_running))

    run.decoder(run.config).step_async([row], between=drop)
    assert refused == [("", 0.0, 2)] * 2
    run.drop(result)
    run.drop(other)
    check_books(run.table)
    assert run.table.num_free_rows == 4
