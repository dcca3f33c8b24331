"""A request that is dropped leaves at once; nobody else loses a token, a row or a slot by it."""

from __future__ import annotations

from functools import partial

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.request import RequestOutput
from specattn.errors import CapacityError
from tests.books import check_books
from tests.engines import engine as tiny_engine
from tests.tiny import dense_greedy

CONTEXT = 64


engine = partial(tiny_engine, (3, 4, 9), backend="torch_native")


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
    run, other = engine(models=models), engine(models=models)
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
    run = engine(models=models)
    results = run.add([Request([35], 1), Request([3], 9), Request([9], 9)])
    run.clear()
    assert [result.finish_reason for result in results] == ["length", "dropped", "dropped"]
    assert run.table.num_free_rows == 4


def test_a_drop_that_is_refused_leaves_the_request_running(models):
    """Between the parts of a step of its row, which keeps it."""
    run, refused = engine(models=models, cudagraph="piecewise"), []
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
