"""Requests and slots that cannot be had are refused, and a failed call leaves all as it was."""

from __future__ import annotations

import pytest
import torch

from specattn import Engine, Request, SlotTable, SpecConfig
from specattn.errors import CapacityError
from tests.books import check_books
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.validation.steps import Failing, same
from tests.worlds import DEVICE

BAD_BOOKS = {
    "context": (lambda t, r: t.reserve([r], [65]), CapacityError, "65 tokens .* context of 64"),
    "pages": (
        lambda t, r: t.reserve([r, r + 1], [64, 30]),
        CapacityError,
        r"16 more pages of 4 KV slots are needed, \d+ are free",
    ),
    "rows": (lambda t, r: t.allocate(), CapacityError, "all 2 request rows are taken"),
    "negative": (
        lambda t, r: t.reserve([r], [-1]),
        ValueError,
        r"lens must be 0 or more, got \[-1\]",
    ),
    "unknown": (lambda t, r: t.reserve([7], [1]), ValueError, r"row must be allocated .* got 7"),
    "twice": (lambda t, r: t.reserve([r, r], [9, 9]), ValueError, "rows must differ, got"),
    "free": (lambda t, r: t.free(7), ValueError, "row must be allocated .* got 7"),
    "commit_negative": (lambda t, r: t.commit(r, -1), ValueError, r"0\.\.\d+ tokens, not for -1"),
    "commit_long": (lambda t, r: t.commit(r, 65), ValueError, r"0\.\.\d+ tokens, not for 65"),
    "commit_unknown": (lambda t, r: t.commit(7, 1), ValueError, "row must be allocated .* got 7"),
    "committed": (lambda t, r: t.committed(7), ValueError, "row must be allocated .* got 7"),
    "share": (lambda t, r: t.allocate(share=r, share_len=8), CapacityError, "rows are taken"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD_BOOKS.values(), ids=BAD_BOOKS)
def test_the_slot_table_refuses_and_stays_as_it_was(call, error, message):
    table = SlotTable(max_num_reqs=2, max_context_len=64, num_slots=72, page_size=4, device=DEVICE)
    row, other = sorted([table.allocate(), table.allocate()])
    table.reserve([row, other], [9, 20])
    before, free = table.req_to_token.clone(), table.num_free_slots
    with pytest.raises(error, match=message):
        call(table, row)
    assert torch.equal(table.req_to_token, before)
    assert (table.num_free_slots, table.committed(row)) == (free, 0)
    check_books(table)
    table.commit(row, 9)
    table.free(other)
    table.reserve([row], [33])
    check_books(table)


def test_an_engine_short_of_slots_says_so_and_goes_on():
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    config = SpecConfig(3, 2, 6, max_context_len=64, max_num_reqs=2)
    engine = Engine(target, draft, config, num_slots=50)
    free = engine.table.num_free_slots
    long, short = list(range(1, 40)), [5, 6, 7]
    with pytest.raises(CapacityError, match=r"more pages of 1 KV slots are needed, .* are free"):
        engine.generate([Request(long), Request([9, *long])])
    assert (engine.table.num_free_slots, engine.table.num_free_rows) == (free, 2)
    check_books(engine.table)
    (result,) = engine.generate([Request(short, max_new_tokens=9)])
    assert result.tokens == dense_greedy(target, short, 9)


BAD_REQUESTS = {
    "empty": (Request([]), "the prompt is empty"),
    "long": (Request([1] * 65), "the prompt has 65 tokens, the context holds 64"),
    "none": (Request([1], max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    "stop": (Request([1], stop=("x",)), "stop strings need detokenize"),
}


@pytest.fixture(scope="module")
def engine():
    config = SpecConfig(3, 2, 6, max_context_len=64, max_num_reqs=2)
    return Engine(TinyTarget(device=DEVICE), TinyDraft(device=DEVICE), config, backend=Failing)


@pytest.mark.parametrize(("request_", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_request_is_refused_before_anything_runs(engine, request_, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([Request([3]), request_])
    assert not Failing.ran
    assert engine.table.num_free_rows == 2
    (result,) = engine.generate([Request([5, 6], max_new_tokens=5)])
    assert len(result.tokens) == 5


@pytest.mark.parametrize("call", ["schedule", "fill", "run"])
@pytest.mark.parametrize("at", ["prompt", "step"])
def test_a_call_that_failed_leaves_an_engine_usable(engine, call, at):
    if at == "step":
        engine.add([Request([5, 6, 7], max_new_tokens=9)])
    Failing.fails = call
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        engine.step() if at == "step" else engine.generate([Request([5, 6, 7])])
    Failing.fails = None
    if at == "prompt":
        assert engine.table.num_free_rows == 2
        engine.add([Request([5, 6, 7], max_new_tokens=9)])
    result = engine.running[0].result
    while engine.num_running:  # the very step that failed, again
        engine.step()
    assert result.tokens == dense_greedy(TinyTarget(device=DEVICE), [5, 6, 7], 9)
    check_books(engine.table)
    assert engine.table.num_free_rows == 2


def test_a_group_that_fails_costs_the_others_no_tokens(engine, monkeypatch):
    """Near its context a request steps in a group of its own, and the other group may fail."""
    prompt = [9] * 60
    near, far = engine.add([Request(prompt, max_new_tokens=30), Request([5, 6, 7])])
    whole, told = engine._flight._launch_group, list(near.tokens)

    def far_fails(config, group):
        if config == engine.config:
            raise RuntimeError("no more")
        return whole(config, group)

    monkeypatch.setattr(engine._flight, "_launch_group", far_fails)
    while not near.finish_reason:
        with pytest.raises(RuntimeError, match="no more"):
            engine.step()
        ((result, new),) = engine.step()
        assert result is near
        told += new
    assert told == near.tokens == dense_greedy(TinyTarget(device=DEVICE), prompt, len(told))
    assert engine.num_running == len(far.tokens) == 1
    engine.clear()
    check_books(engine.table)
    assert engine.table.num_free_rows == 2


@pytest.mark.parametrize("call", ["schedule", "fill", "run"])
def test_a_call_that_failed_leaves_a_decoder_usable(step, wanted, call):
    Failing.fails = call
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        step.run()
    Failing.fails = None
    same(step.outcome(), wanted)
