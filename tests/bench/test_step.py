"""Whole steps at a tiny size: forced lengths, restored lengths, float64, and what is counted."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from bench import step, step_timing, timeline
from bench.random_models import random_target
from bench.step_forced import Watched, launch, twin
from bench.step_timing import Patience
from bench.step_world import PLAIN, Setting, Shape, World
from bench.suite import steps as report
from bench.suite.results import write
from specattn.batch import DraftTree

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "vocab_size": 97,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}


def tiny(kind=LlamaConfig) -> Shape:
    return Shape("tiny", kind(**SIZES), LlamaConfig(**SIZES), 61)


def world(kind=LlamaConfig) -> World:
    return World(tiny(kind), [40, 40, 23], CPU, torch.float32, "torch_native")


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_logits_over_a_tree_are_those_of_float64(kind):
    run = world(kind)
    for setting, length in ((PLAIN, 1), (Setting(1, 2, 3), 3), (Setting(2, 3, 5), 2)):
        assert step.check(run, setting, length) < 1e-5


def test_logits_of_another_model_are_noticed():
    run = world()
    run.model = random_target(LlamaConfig(**SIZES), dtype=torch.float32, device=CPU, seed=1)
    with pytest.raises(AssertionError, match="chain 1-2-3: logits are off by"):
        step.check(run, Setting(1, 2, 3), 2)


@pytest.fixture(scope="module")
def stepper():
    run = world()
    accept = run.forced(1)
    decoder = run.decoder(Setting(2, 3, 6), [1, 3], accept)
    return step.Stepper(decoder, run.admit(decoder, 3, 20), accept)


def test_steps_gain_what_is_forced_and_go_back(stepper):
    seen = {}
    for length in (1, 4, 2, 3):
        stepper.force(length)
        step.check_advance(stepper)
        stepper.both()
        stepper.finish()
        states = stepper.decoder.states
        seen[length] = [int(states.bonus_tokens[row]) for row in stepper.rows]
        stepper.reset()
    assert all(token >= 61 for tokens in seen.values() for token in tokens), "a draft's token"
    # requests of one batch may gain differently
    stepper.accept.lens.copy_(torch.tensor([4, 1, 2]))
    gained = stepper.decoder.step(stepper.rows)
    assert [len(tokens) for tokens in gained] == [4, 1, 2]
    assert all(max(tokens[:-1], default=0) < 61 <= tokens[-1] for tokens in gained)
    stepper.reset()


def test_the_kernel_chooses_what_its_twin_does():
    run = world()
    accept = run.forced(1, Watched)
    decoder = run.decoder(Setting(3, 3, 12), [3], accept)
    decoder.step(run.admit(decoder, 3, 20))
    tokens, positions, words, logits = accept.seen
    tree = DraftTree(tokens, positions, words, *[tokens] * 4)
    lens, found, counted = torch.tensor([4, 1, 3], dtype=torch.int32), [], []
    # of the last tree only what is one step deep
    near = positions[2] <= positions[2, 0] + 1
    positions[2] = torch.where(near, positions[2], positions[2, 0] + 1)
    for force in (launch, twin):
        found.append(logits.argmax(-1).to(DEVICE))
        on = DraftTree(*(part.to(DEVICE) for part in vars(tree).values()))
        counted.append(torch.tensor([7, 8, 9], dtype=torch.int32, device=DEVICE))
        force(found[-1], on, lens.to(DEVICE), counted[-1], 61, 3)
    assert torch.equal(*found)
    assert [int((row < 61).sum()) for row in found[0]] == [3, 0, 1]
    assert [one.tolist() for one in counted] == [[7, 8, 10]] * 2


def test_a_step_that_gains_something_else_is_noticed(stepper):
    stepper.force(2)
    stepper.length = 1
    stepper.both()
    with pytest.raises(AssertionError, match=r"\(1, \[2, 2, 2\]\)"):
        stepper.finish()
    stepper.length = 3
    stepper.both()
    assert stepper.finish() == [2, 2, 2]
    with pytest.raises(AssertionError, match=r"\[1, 1, 1\], \[0, 0, 0\]"):
        stepper.check()
    stepper.reset()


def test_a_tree_that_is_not_so_deep_may_gain_less():
    run = world()
    run.draft.model.lm_head.zero_()  # all tokens are equal: the tree is as wide as it can be
    accept = run.forced(4)
    decoder = run.decoder(Setting(2, 3, 6), [1, 3], accept)
    one = step.Stepper(decoder, run.admit(decoder, 2, 20), accept)
    one.force(4)
    step.check_advance(one)
    one.both()
    one.both()
    assert one.finish() == [3, 3]
    assert one.short == [3, 3]
    one.check()
    # another stepper counts its own
    one = step.Stepper(decoder, one.rows, accept)
    one.force(2)
    one.both()
    assert one.finish() == [2, 2]
    one.check()


def test_bytes_are_counted_once_per_forward():
    run = world()
    size, draft = 4, {"hidden": 32, "vocab": 61}
    block = 64 * 32 + 32 * 32 + 96 * 32 + 32 * 48
    kv = 2 * 2 * 8 * size
    found = run.read_bytes(Setting(2, 3, 6), 3, 20)
    assert found == {
        "target weights": (2 * block + 97 * 32) * size,
        "target KV": 2 * 3 * 20 * kv,
        # the qkv matrix of the head reads embeddings and hidden states
        "draft weights": 3 * (block + 64 * 32 + draft["vocab"] * 32) * size + 32 * 96 * size,
        "draft KV": 3 * 3 * 20 * kv,
    }
    assert set(run.read_bytes(PLAIN, 1, 20)) == {"target weights", "target KV"}
    target, head = 2 * block + 97 * 32, block + 64 * 32 + 61 * 32
    assert run.operations(PLAIN, 3) == 2 * 3 * target
    assert run.operations(Setting(2, 3, 6), 5) == 2 * 5 * (
        6 * target + 2 * 2 * head + 4 * (head - 61 * 32 + 32 * 96) + 61 * 32
    )


def test_a_whole_run_leaves_a_record(monkeypatch, tmp_path):
    monkeypatch.setattr(step_timing, "WARM", 0)
    monkeypatch.setattr(step_timing, "PAUSE", 0.0)
    monkeypatch.setattr(step, "SETTINGS", (Setting(1, 3, 4), Setting(2, 2, 7)))
    assert step.rooms(step.places([1, 4], [8, 64], fits=64)) == [64, 8, 8, 8]
    options = argparse.Namespace(
        places=step.places([1, 2], [8, 40], fits=60),
        rounds=2,
        length=4,
        settings="tree",
        seconds=1e6,
    )
    monkeypatch.setattr(step, "calm_loop", lambda: 0.0)  # a host that is never calm
    shape = Shape("tiny", LlamaConfig(**SIZES), LlamaConfig(**SIZES), 61)
    rooms = step.rooms(options.places)
    assert rooms == [40, 8]
    cells = list(
        step.run(
            {"tiny": shape},
            lambda shape: World(shape, rooms, CPU, torch.float32, "torch_native"),
            options,
            4.2,
        )
    )
    write({"format": 1, "cells": cells}, tmp_path / "cells.json")
    assert json.loads((tmp_path / "cells.json").read_text()) == {"format": 1, "cells": cells}
    assert [cell["setting"] for cell in cells] == ["plain"] * 4 + ["tree 2-2-7"] * 4
    skipped = [cell for cell in cells if "skipped" in cell]
    assert [(cell["batch"], cell["context"]) for cell in skipped] == [(2, 40)] * 2
    for cell in cells:
        if cell not in skipped:
            assert cell["host_idle_us"] > 0
            assert cell["length"] == (3 if cell["steps"] else 1)
            assert 0 < cell["p10_us"] <= cell["us"] <= cell["p90_us"]
            assert 0 < cell["host_p10_us"] <= cell["host_us"] <= cell["host_p90_us"]
            assert cell["loop_us"] > 0
            assert 1 < cell["tries"] <= step_timing.TRIES
            assert cell["floor_us"] == round(sum(cell["bytes"].values()) / 4.2e6, 2)
            assert cell["error"] < 1e-5
            assert cell["short"] == 0


def test_traces_are_kept_setting_by_setting(monkeypatch):
    """A run that is cut short has lost what comes after."""
    monkeypatch.setattr(step, "SETTINGS", (Setting(1, 3, 4), Setting(2, 2, 7)))
    monkeypatch.setattr(
        step,
        "trace",
        lambda world, setting, cells, options: [
            cell.update(trace=(world, setting.name)) for cell in cells
        ],
    )
    cells = [
        {"model": model, "setting": name}
        for model in ("a", "b")
        for name in ("plain", "tree 2-2-7")
    ]
    cells.append({"model": "a", "setting": "plain", "skipped": "no room"})
    options, left = argparse.Namespace(settings="tree"), []
    for _ in step.trace_all({"a": 1, "b": 2}, lambda shape: shape, options, cells):
        left.append(sum("trace" not in cell for cell in cells))
    assert left == [4, 3, 2, 1]
    assert [cell.get("trace") for cell in cells] == [
        (1, "plain"),
        (1, "tree 2-2-7"),
        (2, "plain"),
        (2, "tree 2-2-7"),
        None,
    ]


@pytest.mark.parametrize(
    ("tries", "kept"),
    [
        ([(11, 50, 45)], 50),
        ([(13, 60, 55), (12, 70, 66)], 60),
        ([(10, 60, 40), (10, 49, 40)], 49),
        ([(12, 99, 50), (20, 40, 39), (12, 70, 50), (12, 80, 40)] * 2, 40),
    ],
    ids=["calm", "slow", "uneven", "never"],
)
def test_steps_are_timed_again_while_the_host_is_held_up(monkeypatch, tries, kept):
    """A try is taken whole, and it is the one with the shortest launches."""
    found = iter(
        {"loop_us": loop, "host_us": host, "host_p10_us": least, "us": host + 1}
        for loop, host, least in tries
    )
    monkeypatch.setattr(step_timing, "PAUSE", 0.0)
    monkeypatch.setattr(step_timing, "timed", lambda stepper, rounds: next(found))
    kept_whole = Patience(9.0, 1, 10.0).calmest(None, 3)
    assert (kept_whole["host_us"], kept_whole["us"]) == (kept, kept + 1)
    assert kept_whole["tries"] == len(tries)
    assert not list(found)


def test_patience_is_shared_by_the_steps_of_a_run(monkeypatch):
    """Whoever needs less than a share leaves the rest to those that come later."""
    now = [0.0]
    monkeypatch.setattr(step_timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(step_timing.time, "sleep", lambda _: None)
    hosts = {"calm": 20, "held up": 50}

    def timed(stepper, rounds):
        now[0] += 1.0
        return {"loop_us": 10, "host_us": hosts[stepper], "host_p10_us": 20}

    monkeypatch.setattr(step_timing, "timed", timed)
    run = Patience(6.0, 3, 10.0)
    order = ["held up", "calm", "held up"]
    assert [run.calmest(step, 3)["tries"] for step in order] == [4, 1, 4]
    assert run.calmest("held up", 3)["tries"] == 1, "nothing is left"
    # one try is more than a share of 0.1 seconds
    many = Patience(10.0, 100, 10.0)
    assert [many.calmest("held up", 3)["tries"] for _ in range(5)] == [4, 4, 4, 2, 1]
    assert Patience(10.0, 1, 10.0).calmest("held up", 3)["tries"] == 8


def test_models_share_a_run_s_patience(monkeypatch):
    """Long steps, which come last, leave the next model's alone."""
    seen = []

    def measured(world, setting, name, options, copy_tb_s):
        seen.append((name, setting.name, options.patience.left))
        options.patience.left = 0.0
        return iter(())

    monkeypatch.setattr(step, "SETTINGS", (Setting(1, 3, 4),))
    monkeypatch.setattr(step, "calm_loop", lambda: 10.0)
    monkeypatch.setattr(step, "measured", measured)
    options = argparse.Namespace(places=step.places([1], [8]), settings="", seconds=60.0)
    assert not list(step.run({"a": None, "b": None}, lambda shape: shape, options, 4.2))
    assert seen == [
        ("a", "plain", 30.0),
        ("a", "chain 1-3-4", 0.0),
        ("b", "plain", 30.0),
        ("b", "chain 1-3-4", 0.0),
    ]


def test_a_calm_loop_is_the_least_of_medians(monkeypatch):
    times = iter([5.0, 11.0, 12.0, 1.0, 14.0, 15.0, 30.0, 31.0, 32.0])
    monkeypatch.setattr(step_timing, "PROBES", 3)
    monkeypatch.setattr(step_timing, "calm_core", nullcontext)
    monkeypatch.setattr(step_timing, "loop", lambda: next(times))
    assert step_timing.calm_loop() == 11.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins threads on Linux only")
def test_steps_are_timed_on_the_calmest_core(monkeypatch):
    pinned, allowed = [], {3, 5, 7}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(set(cores)))
    monkeypatch.setattr(step_timing, "loop", lambda: {3: 20.0, 5: 10.0, 7: 11.0}[min(pinned[-1])])

    @step_timing.calm_core()
    def fails():
        assert pinned == [{3}, {5}, {7}, {5}]
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert pinned[-1] == allowed, "whatever happens, all cores may be used again"


def test_a_step_is_divided_by_model_and_kind():
    rows = {phase: dict.fromkeys(timeline.CLASSES, 0.0) for phase in timeline.PHASES}
    rows["verify"] |= {"target GEMM": 10.0, "glue": 2.0, "attention": 3.0, "idle": 1.0}
    rows["draft"] |= {"draft GEMM": 20.0, "attention": 4.0, "other": 5.0}
    rows["extend"] |= {"draft GEMM": 30.0, "glue": 6.0}
    rows["accept"] |= {"glue": 7.0, "other": 8.0}
    assert step.divided({"phases": rows}) == {
        "target": 12.0,
        "draft": 56.0,
        "attention": 7.0,
        "other": 20.0,
        "idle": 1.0,
    }


def test_the_report_says_what_the_record_says(tmp_path):
    def cell(setting, batch, context, us, **more):
        return {
            "model": report.MODEL,
            "setting": setting,
            "batch": batch,
            "context": context,
            "us": us,
            "floor_us": 4000.0,
            "operations": 2e12,
            **more,
        }

    cells = [
        cell("plain", 1, 4096, 4000.0),
        cell("tree 4-5-16", 1, 4096, 4800.0),
        cell("plain", 4, 4096, 5000.0),
        cell("plain", 64, 4096, 9000.0, operations=6e12),
        cell("tree 8-7-64", 64, 32768, 0.0, skipped="too large"),
    ]
    assert not any(ratio.points for ratio in report.ratios(tmp_path))
    (tmp_path / report.RECORD).write_text(
        json.dumps({"cells": cells, "roofs": {"matmul_tflops": 800.0}})
    )
    faster, held = report.ratios(tmp_path)
    assert held.worst.value == 1.2
    assert faster.worst.value == pytest.approx(4.68 * 4000 / 4800)
    text = report.shown(tmp_path)
    assert "| 1 x 4k | 4.00, 1.00x | 4.80, 1.20x | 1.20 |" in text
    assert "| 4 x 4k | 5.00, 1.25x | - | - |" in text
    assert "| 64 x 4k | 9.00, 1.20x * | - | - |" in text
    assert "| 250 | 975 | 3.90x |" in report.gains(report.read(tmp_path))
    assert "975" not in text, "the page shows the shortest and the longest context"


@pytest.mark.parametrize("more", [[], ["--compile", "0/1"]])
def test_unknown_models_are_refused_with_the_known_names(monkeypatch, capsys, more):
    monkeypatch.setattr("sys.argv", ["bench.step", "--models", "Qwen3-8B,Llama", *more])
    with pytest.raises(SystemExit) as ended:
        step.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("error: --models: 'Llama' is none of Llama-3.1-8B, Qwen3-8B")
