"""Requests for which slots run out wait for others to end; they neither fail nor lose a token."""

from __future__ import annotations

import pytest
import torch

from specattn.engine.engine import Engine, Request
from specattn.errors import CapacityError
from tests.books import check_books
from tests.engines import engine as tiny_engine
from tests.samples import half, on_cpu
from tests.tiny import TinyDraft, TinyTarget, dense_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT = 48
#: By its context alone it decodes plainly, a slot per step.
NEAR = Request([7 * i % 61 for i in range(44)], 99)
SHORT = Request([3, 1, 4, 15], 25)
# of the short one's first step
NEED = len(SHORT.prompt) + 9


@pytest.fixture(scope="module")
def models():
    return TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)


def engine(models, slots: int, rows: int = 2, page_size: int = 1) -> Engine:
    options = {"models": models, "slots": slots, "backend": "torch_native", "buckets": (rows,)}
    return tiny_engine((3, 4, 9), context=CONTEXT, rows=rows, page_size=page_size, **options)


@on_cpu(half, "order", "ahead", "slots")
@pytest.mark.parametrize("ahead", [False, True], ids=["waited", "ahead"])
@pytest.mark.parametrize("order", [(NEAR, SHORT), (SHORT, NEAR)], ids=["first", "last"])
@pytest.mark.parametrize(("slots", "page_size"), [(len(NEAR.prompt) + NEED, 1), (CONTEXT + 8, 8)])
def test_a_group_without_slots_sits_out_until_others_have_ended(
    models, order, ahead, slots, page_size
):
    run = engine(models, slots, page_size=page_size)
    results = run.add(order)
    told = [list(result.tokens) for result in results]
    waited = 0
    while run.num_running:
        gains = run.step(ahead=ahead)
        assert gains
        for result, new in gains:
            told[results.index(result)] += new
        check_books(run.table)
        waited += len(gains) == 1 and run.num_running == 2
    assert waited, "there were slots for both"
    for request, result, tokens in zip(order, results, told, strict=True):
        assert result.finish_reason == ("context" if request is NEAR else "length")
        assert tokens == result.tokens
        assert tokens == dense_greedy(models[0], request.prompt, len(tokens))
    run.clear()
    assert run.table.num_free_slots == slots


def test_where_no_group_has_slots_nothing_runs(models):
    run = engine(models, len(NEAR.prompt) + len(SHORT.prompt))
    results = run.add([NEAR, SHORT])
    before = [list(result.tokens) for result in results]
    for _ in range(2):
        with pytest.raises(CapacityError, match="more pages of 1 KV slots are needed"):
            run.step(ahead=True)
        assert [result.tokens for result in results] == before
        assert run.num_running == 2
        check_books(run.table)
    run.clear()
    (alone,) = run.generate([NEAR])
    assert alone.tokens == dense_greedy(models[0], NEAR.prompt, CONTEXT + 1 - len(NEAR.prompt))
