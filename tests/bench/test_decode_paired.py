"""Telling one graph from three: the intervals, and both over the same memory."""

from __future__ import annotations

import json
import math
import random
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bench import decode, decode_paired
from bench.suite import records, seams
from bench.suite.decode import ONE, THREE
from specattn.config import SpecConfig
from tests.tiny import TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[5, 9, 31, 2, 8], [7, 7, 3, 30, 12]]
CELLS, SPREAD = 400, 0.01


def observed(rng: random.Random, mean: float, count: int) -> list[float]:
    return [mean * math.exp(rng.gauss(0.0, SPREAD)) for _ in range(count)]


@pytest.mark.parametrize("count", [3, 7])
def test_intervals_hold_what_is_true_19_times_in_20(count):
    rng = random.Random(count)
    found = [seams.Interval.of(observed(rng, 1.004, count)) for _ in range(CELLS)]
    held = sum(one.low <= 1.004 <= one.high for one in found) / CELLS
    assert held == pytest.approx(0.95, abs=0.03)


def test_what_is_slower_is_flagged_and_what_is_equal_is_not():
    rng = random.Random(1)
    share = {
        mean: sum(seams.Interval.of(observed(rng, mean, 7)).below for _ in range(CELLS)) / CELLS
        for mean in (0.97, 1.0, 1.03)
    }
    assert share[0.97] > 0.99
    assert share[1.0] == pytest.approx(0.025, abs=0.02)
    assert share[1.03] == 0
    assert seams.Interval.of([1.03, 1.031, 1.032]).faster


def test_an_interval_is_students():
    found = seams.Interval.of([math.exp(at / 100) for at in (-1, 0, 4)])
    assert math.log(found.mean) == pytest.approx(0.01)
    # the deviation of -1, 0 and 4 is the root of 7
    half = 4.303 * math.sqrt(7) / math.sqrt(3) / 100
    assert math.log(found.high) == pytest.approx(0.01 + half)
    assert math.log(found.low) == pytest.approx(0.01 - half)
    many = seams.Interval.of([0.99, 1.01] * 50)
    assert many.high - many.low < 0.01
    alone = seams.Interval.of([0.5])
    assert not alone.below
    assert str(alone) == "0.5000x"


def test_turns_favour_nobody():
    assert list(decode_paired.turns(ONE, 2)) == [
        ONE,
        THREE,
        THREE,
        ONE,
        THREE,
        ONE,
        ONE,
        THREE,
    ]
    places = [nth for nth, way in enumerate(decode_paired.turns(THREE, 1)) if way == THREE]
    assert sum(places) == 3


TWIN = decode_paired.Twin


@pytest.fixture
def run(monkeypatch, tmp_path):
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    models[0].tokenizer = None
    monkeypatch.setattr(decode, "pair", lambda *_, fused: models)
    monkeypatch.setattr(decode, "held_out_prompts", lambda count, _: PROMPTS[:count])
    monkeypatch.setattr(decode, "CONTEXT", 64)
    monkeypatch.setitem(decode.TREES, "chain of 5", (2, 1, 3))
    monkeypatch.setattr(
        decode_paired, "Plan", partial(decode_paired.Plan, steps=2, rounds=1, places=2)
    )
    out = tmp_path / seams.RECORD

    def run(times: int, *more: str) -> dict:
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "decode",
                "--paired",
                str(times),
                "--batch",
                "2",
                "--dtype",
                "float32",
                "--settings",
                "plain",
                "chain of 5",
                "--workers",
                "0",
                "--out",
                str(out),
                *more,
            ],
        )
        decode.main()
        return json.loads(out.read_text())

    return run


def test_both_take_the_same_steps_over_the_same_memory(run, tmp_path, capsys):
    found = run(2)
    assert [cell["name"] for cell in found["cells"]] == [
        "batch 2, greedy, chain of 5",
        "batch 2, drawn, chain of 5",
    ]
    for cell in found["cells"]:
        assert [seen["captured_first"] for seen in cell["rebuilds"]] == [ONE, THREE]
        for seen in cell["rebuilds"]:
            assert seen["us"].keys() == {seams.AHEAD, seams.DEVICE, seams.WAITED}
            assert (seen["turns"], seen["apart"]) == (16, 0)
            for timed, us in seen["us"].items():
                placed = seen["placed_us"][timed]
                for way in (ONE, THREE):
                    assert len(placed[way]) == 2
                    assert us[way] == pytest.approx(sum(placed[way]) / 2, abs=0.01)
    text = records.blocks(tmp_path)["pair-seams"]
    assert "Graphs made anew 2 times, instantiated 2 times each, 2 steps a turn" in text
    assert text.startswith("Models of `FusedTarget` and `FusedEagle3`. ")
    assert "Of 64 turns, 0 gained other tokens" in text
    assert "one graph slower than three: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "wanted"),
    [([], {"full", "piecewise"}), (["--control"], {"full"})],
)
def test_a_control_records_the_same_twice(run, monkeypatch, more, wanted):
    made = []
    monkeypatch.setattr(
        decode_paired, "Twin", lambda owner, seams: made.append(seams) or TWIN(owner, seams)
    )
    found = run(2, *more)
    assert set(made) == wanted
    assert len(made) == 4
    assert ("recorded like it" in found["title"]) == bool(more)


def test_a_slower_one_is_found(run, monkeypatch):
    launch, now, rng = decode_paired.Twin.step_async, [1.0], random.Random(0)

    def timed(self, *args, **more):
        now[0] += 2e-3 * (1.02 if self.cudagraph == "full" else 1) * rng.gauss(1, 1e-3)
        return launch(self, *args, **more)

    monkeypatch.setattr(decode_paired.Twin, "step_async", timed)
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(decode_paired, "time", clock)
    found = run(3)["slower"]
    assert len(found) == 4, found
    assert found[0].startswith("batch 2, greedy, chain of 5, a step ahead: 0.9")


def test_time_is_kept_to_when_either_was_recorded_first_as_often(run):
    found = run(50, "--limit", "0")
    for cell in found["cells"]:
        first = [rebuild["captured_first"] for rebuild in cell["rebuilds"]]
        assert sorted(first) == sorted(decode_paired.SEAMS)


def test_other_tokens_are_no_result():
    config = SpecConfig(2, 1, 3, 64, 2)
    rebuild = decode_paired.Rebuild(
        (TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)), PROMPTS, config, 0
    )
    rebuild.admit(0.0)
    take, answers = rebuild.turn, iter(range(100))

    def turn(way, steps, *, ahead):
        found = take(way, steps, ahead=ahead)
        return SimpleNamespace(us=found.us, gained=[[[next(answers)]]] * 2)

    rebuild.turn = turn
    plan = decode_paired.Plan({}, [2], [0.0], 64, 1, steps=1, rounds=1, places=1)
    assert decode_paired.observe(rebuild, plan, exact=False)["apart"] == 7
    with pytest.raises(ArithmeticError, match="7 of 8 turns gained other tokens"):
        decode_paired.observe(rebuild, plan, exact=True)
    rebuild.engine.clear()


def test_noise_excuses_no_mean():
    noisy, near, far = (
        seams.Interval.of([mean * (1 + off) for off in (-spread, 0, spread)])
        for mean, spread in ((0.985, 0.05), (0.995, 0.001), (0.995, 0.05))
    )
    assert noisy.high > 1
    assert (noisy.below, noisy.slower) == (False, True)
    assert (near.below, near.slower) == (True, True)
    assert (far.below, far.slower) == (False, False)


def cell(name: str, *ratios: float) -> dict:
    us = [{ONE: 2000.0, THREE: 2000.0 * ratio} for ratio in ratios]
    rebuilds = [
        {
            "us": dict.fromkeys(seams.TIMED, by_way),
            "turns": 12,
            "apart": nth,
            # every recording has been 2 % slower in one of two places
            "placed_us": {seams.DEVICE: {way: [at, 1.02 * at] for way, at in by_way.items()}},
        }
        for nth, by_way in enumerate(us)
    ]
    return {
        "name": name,
        "batch": 8,
        "temperature": 0.0,
        "setting": "chain of 5",
        "rebuilds": rebuilds,
    }


def test_one_graph_is_held_to_three(tmp_path):
    (before,) = seams.asked(tmp_path)
    assert before.regime == "the shipped pair, one graph against three"
    good, late = cell("good", 0.999, 1.001, 1.003), cell("late", 0.989, 0.99, 0.991)
    record = {"models": "fused", "steps": 6, "places": 2, "cells": [good]}
    (tmp_path / seams.RECORD).write_text(json.dumps(record))
    (target,) = seams.asked(tmp_path)
    assert target.verdict == "aim"
    assert target.row()[1:4] == ["not slower", "not slower", "1.0010x"]
    text = records.blocks(tmp_path)["pair-seams"]
    assert "Of 2 means (a step ahead, and waited for), 0 lie below 1; the lowest is 1.0010x" in text
    assert "0 lie wholly below 1, 0 wholly above" in text
    assert "One graph counts as slower in 0. Over" in text
    wide = cell("wide", 0.937, 0.987, 1.04)
    (tmp_path / seams.RECORD).write_text(json.dumps(record | {"cells": [good, wide]}))
    (target,) = seams.asked(tmp_path)
    assert target.verdict == "**below**", "whose intervals reach beyond 1"
    (tmp_path / seams.RECORD).write_text(json.dumps(record | {"cells": [good, late]}))
    (target,) = seams.asked(tmp_path)
    assert target.verdict == "**below**"
    assert target.worst.where == "late, a step ahead"
    assert target.row()[3:5] == [
        "0.9900x",
        "late, a step ahead (4 measured, geomean 0.9955x); 2 means are below 1, 2 intervals wholly",
    ]
    text = records.blocks(tmp_path)["pair-seams"]
    row = next(line for line in text.splitlines() if "0.9900x" in line)
    assert row.startswith(
        "| 8 | greedy | chain of 5 | 2,000 | 1,980 | 0.9900x (0.9875 to 0.9925) |"
    )
    assert row.endswith("| 1.020x |")
    assert "waited for), 2 lie below 1; the lowest is 0.9900x (late, a step ahead)" in text
    assert "2 lie wholly below 1, 0 wholly above; of equal speeds, 0.1 would lie below" in text
    assert "slower in 2 (late, a step ahead: 0.9900x (0.9875 to 0.9925); late, waited for" in text
    assert "Over all cells, it is 0.9955x" in text
    modules = record | {"models": "transformers", "cells": [late]}
    (tmp_path / seams.MODULES).write_text(json.dumps(modules))
    assert seams.asked(tmp_path) == [target], "which is about the fused ones"
    text = records.blocks(tmp_path)["pair-seams-modules"]
    assert text.startswith("Models of transformers' modules. ")
    assert "2 lie wholly below 1" in text
