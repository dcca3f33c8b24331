"""A short run of `bench.steady` at a tiny size, and what it refuses."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch

from bench import steady
from bench.step_world import PLAIN, Setting, World
from bench.suite import records
from specattn.cache.slot_table import SlotTable
from specattn.speculative.host_buffers import PendingStep
from tests.bench.test_step import tiny

NEW = 40
TREE = Setting(2, 3, 6)


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(steady, "WARM", 3)
    shape, device = tiny(), torch.device("cpu")
    return steady.emptied(World(shape, [20 + NEW] * 5, device, torch.float32, "torch_native"))


def churn(world, setting=TREE, batch=5, length=3, rehearses=False) -> steady.Churn:
    return steady.Churn(world, setting, batch, 20, NEW, length, rehearses=rehearses)


def test_requests_grow_end_and_join(world, tmp_path):
    cells = []
    for setting, batch, length, rehearses in (
        (TREE, 5, 3, False),
        (TREE, 5, 3, True),
        (PLAIN, 3, 1, True),
        (TREE, 1, 4, False),
    ):
        one = churn(world, setting, batch, length, rehearses)
        free = world.table.num_free_slots
        found = steady.run(one, 60, 1e9)
        assert world.table.num_free_slots == free, "slots were lost"
        assert found["joined"] >= found["ended"] > 60 * length * batch // (2 * NEW) - batch
        assert found["sizes"][-1] == batch
        assert min(found["host_us"].values()) > 0
        calm = found["calm"]
        assert calm.pop("share") == 1.0, "the loop takes less than a billion microseconds"
        assert calm == {**found["host_us"], "within": found["within"]}
        calm["share"] = 0.25
        cells.append(
            {
                "setting": setting.name,
                "batch": batch,
                "length": length,
                "rehearsed": rehearses,
                **found,
            }
        )
    assert len(cells[0]["sizes"]) > 1
    record = {
        "machine": {"device": "made up", "commit": "abc"},
        "model": "tiny",
        "context": 20,
        "calm_loop_us": 10.0,
        "cells": cells,
    }
    (tmp_path / steady.OUT.name).write_text(json.dumps(record))
    text = records.blocks(tmp_path)["steady"]
    assert f"| tree 2-3-6 | {cells[0]['sizes'][0]} to 5 | no |" in text
    assert f"| tree 2-3-6 | {cells[1]['sizes'][0]} to 5 | yes |" in text
    assert f"| 60 | {cells[2]['joined']} | {cells[2]['ended']} | 0 |" in text
    assert text.count(" | 25.0 % | ") == len(cells)
    assert "tiny, 20 tokens when a request joins; made up, commit `abc`." in text


def test_counters_are_read_where_requests_may_join(world, monkeypatch):
    read, joined = [], []
    monkeypatch.setattr(steady, "watched", lambda counts: nullcontext(read.append(len(joined))))
    one = churn(world)
    join = one.join
    monkeypatch.setattr(one, "join", lambda: joined.append(1) or join())
    found = steady.run(one, 40, 0.0)
    assert found["steps"] == 40
    assert found["calm"] == {"share": 0.0}
    assert read == list(range(1, len(joined) + 1))
    assert len(read) < 40 / steady.JOIN_EVERY + one.ended


@pytest.mark.parametrize("rehearses", [True, False])
def test_the_next_launch_is_rehearsed_while_the_host_waits(world, monkeypatch, rehearses):
    """Of the requests that are to take part, as far as they are known, and not if told not to."""
    one, rehearsed, live, wait = churn(world, rehearses=rehearses), [], [], PendingStep.wait
    reserved, reserve = [], SlotTable.reserve

    def waits(step, meanwhile=None):
        live.append([each.row for each in one.live])
        if meanwhile is not None:
            meanwhile()
        return wait(step)

    monkeypatch.setattr(PendingStep, "wait", waits)
    monkeypatch.setattr(one.decoder, "rehearse", lambda rows: rehearsed.append(rows) or True)
    monkeypatch.setattr(
        SlotTable,
        "reserve",
        lambda table, rows, lens: reserved.append(rows) or reserve(table, rows, lens),
    )
    one.join()
    for _ in range(3):
        one.step()
    one.finish()
    assert len(live) == 3
    # nothing is to come after the last one
    assert rehearsed == (live[:2] if rehearses else [])
    assert len(reserved) == one.batch + 3 + len(rehearsed), "joining, and every step"


def test_a_length_that_the_host_did_not_count_is_noticed(world):
    one = churn(world)
    one.join()
    for _ in range(3):
        one.step()
    one.decoder.states.seq_lens[one.live[1].row] += 1
    with pytest.raises(AssertionError, match=f"row {one.live[1].row}: "):
        one.check()


def test_tokens_of_a_request_that_has_ended_are_not_the_next_ones(world):
    """A row may be somebody else's when the step that the last one rode along in is read."""
    one = churn(world, batch=2)
    one.join()
    first = one.live[0]
    one.step()
    first.length = first.end
    world.table.free(first.row)
    one.live.remove(first)
    one.join()
    assert one.live[-1].row == first.row
    one.step()
    assert one.live[-1].length == 20
    one.check()


def test_a_step_that_gains_something_else_is_noticed(world, monkeypatch):
    one = churn(world)
    one.join()
    wait = PendingStep.wait
    monkeypatch.setattr(PendingStep, "wait", lambda step, _: [[5, *new] for new in wait(step)])
    one.step()
    with pytest.raises(AssertionError, match="gained 4"):
        one.step()


def test_paths_that_are_often_shorter_are_noticed(world):
    one = churn(world)
    one.decoder.accept.lens.fill_(2)
    one.join()
    one.step()
    one.step()
    with pytest.raises(AssertionError, match="10 of 10 paths were shorter"):
        one.check()


def test_every_step_has_room_for_the_one_in_flight(world, monkeypatch):
    asked, reserve = [], SlotTable.reserve
    monkeypatch.setattr(
        SlotTable,
        "reserve",
        lambda table, rows, lens: asked.append(lens) or reserve(table, rows, lens),
    )
    one = churn(world, batch=1, length=4)
    one.join()
    asked.clear()
    one.step()
    config = one.decoder.config
    assert asked == [[20 + config.reserve_len + config.num_steps + 1]]
    one.check()


@pytest.mark.gpu
def test_a_wait_is_an_error_and_allocations_are_counted():
    number, counts = torch.zeros(1, device="cuda"), {}
    with pytest.raises(RuntimeError, match="synchronizing"), steady.watched(counts):
        number.item()
    with steady.watched(counts):
        kept = number + 1
    assert kept.is_cuda
    assert counts["allocation.all.allocated"] == 1
    number.item()
