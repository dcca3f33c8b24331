"""Whole steps at a tiny size: forced lengths, restored lengths, float64, and what is counted."""

from __future__ import annotations

import json
import os

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, Qwen3Config

from bench import step, step_timing
from bench.random_models import random_target
from bench.step_forced import Watched, launch, twin
from bench.step_world import PLAIN, Setting, Shape, World, shapes
from bench.suite import steps as report
from bench.suite.results import write
from specattn.batch import DraftTree
from specattn.cache.state_pool import StatePool

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
    shape = kind() if kind is hybrid else tiny(kind)
    return World(shape, [40, 40, 23], CPU, torch.float32, "torch_native")


def hybrid(states="float32") -> Shape:
    """Two layers that attend, and two with states."""
    if "qwen3_5_text" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no qwen3_5_text")
    sizes = SIZES | {"head_dim": 32, "num_hidden_layers": 4, "mamba_ssm_dtype": states}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
    layers = ["linear_attention", "full_attention"] * 2
    return Shape("tiny", AutoConfig.for_model("qwen3_5_text", layer_types=layers, **sizes), None)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, hybrid])
def test_logits_over_a_tree_are_those_of_float64(kind):
    run = world(kind)
    for setting, length in ((PLAIN, 1), (Setting(1, 2, 3), 3), (Setting(2, 3, 5), 2)):
        assert step.check(run, setting, length) < 1e-5


@pytest.mark.parametrize(
    ("way", "most"), [("fp8", 0.1), ("fp8-channel", 0.1), ("fp8-weights", 3e-3)]
)
def test_logits_of_quantised_weights(way, most):
    ways = {"weights": way, "draft_weights": way}
    run = World(tiny(), [40, 40, 23], CPU, torch.float32, "torch_native", **ways)
    assert step.check(run, Setting(2, 3, 5), 2) < most
    plain = world()
    bytes_of = [one.read_bytes(Setting(2, 3, 5), 1, 20)["target weights"] for one in (run, plain)]
    assert bytes_of[0] < bytes_of[1] / 2
    found = [one.operations(Setting(2, 3, 5), 2) for one in (run, plain)]
    assert found[0] == found[1]


def test_requests_may_begin_alike():
    run = world()
    run.share(16)
    for row in run.rows:
        slots = run.table.req_to_token[row]
        assert slots[:16].tolist() == run.table.req_to_token[run.rows[0], :16].tolist()
        assert slots[16] not in slots[:16]
    assert step.check(run, Setting(2, 3, 5), 2) < 1e-5


def test_logits_of_another_model_are_noticed():
    run = world()
    run.model = random_target(LlamaConfig(**SIZES), dtype=torch.float32, device=CPU, seed=1)
    with pytest.raises(AssertionError, match="chain 1-2-3: logits are off by"):
        step.check(run, Setting(1, 2, 3), 2)


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_states_are_of_the_dtype_that_the_checkpoint_says(states):
    run = World(hybrid(states), [40, 23], CPU, torch.float32, "torch_native")
    kept = run.target.by_row()["states"]
    assert str(kept.dtype) == f"torch.{states}"
    assert float(kept.float().std()) == pytest.approx(1, abs=0.1), "requests are in mid-decode"
    # a state in bfloat16 rounds what it adds, and nothing of it is in these logits
    assert step.check(run, Setting(2, 3, 5), 3) < 1e-5


@pytest.mark.parametrize("what", ["states", "windows"])
def test_commits_of_something_else_are_noticed(monkeypatch, what):
    run, setting, commit = world(hybrid), Setting(2, 3, 5), StatePool.commit

    def wrong(pool, nodes, accept_index, rows):
        if what == "states":
            accept_index = accept_index[:, :1].contiguous()
        commit(pool, nodes, accept_index, rows)
        if what == "windows":
            pool.windows[:, rows] = pool.windows[:, rows].flip(-1)

    monkeypatch.setattr(StatePool, "commit", wrong)
    with pytest.raises(AssertionError, match=f"{what} of layer 0 are off by"):
        step.check(run, setting, 3)


def test_steps_of_a_hybrid_gain_what_is_forced_and_are_one_graph():
    run = world(hybrid)
    accept = run.forced(1)
    decoder = run.decoder(Setting(3, 3, 8), [1, 3], accept)
    one = step.Stepper(decoder, run.admit(decoder, 3, 20), accept)
    for length in (1, 4, 3):
        one.force(length)
        step.check_advance(one)
    one.check()
    assert one.short == [0, 0, 0]
    # the last token is one that no draft proposes
    assert [int(decoder.states.bonus_tokens[row]) for row in one.rows] == [96] * 3
    assert all(bool(kept.isfinite().all()) for kept in run.target.by_row().values())


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
    tree = DraftTree(tokens, positions, words, *[tokens] * 3)
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
    run.draft.model.lm_head.weight.zero_()  # all tokens are equal: the tree is as wide as it can be
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


def test_states_and_nodes_are_counted_among_the_bytes():
    run, size, logits = world(hybrid), 4, 97 * 32
    # queries and gates, keys and values of heads of 32
    attends = (2 * 128 + 2 * 64) * 32 + 32 * 128
    channels = 2 * 2 * 16 + 4 * 32
    mixes = (channels + 4 * 32 + 2 * 4) * 32 + 32 * 4 * 32
    feed, kv, fc = 3 * 32 * 48, 2 * 2 * 32, 2 * 32 * 32
    target, head = 2 * (attends + mixes + 2 * feed) + logits, attends + feed + logits
    held = 2 * (4 * 32 * 16 + channels * 3)
    node = 2 * (channels + 2 * 16 + 4 * 32 + 2 * 4)
    assert run.read_bytes(PLAIN, 3, 20) == {
        "target weights": target * size,
        "target KV": 2 * 3 * 20 * kv * size,
        "states": 2 * 3 * held * size,
    }
    assert run.read_bytes(Setting(3, 3, 8), 3, 20) == {
        "target weights": target * size,
        "target KV": 2 * 3 * 20 * kv * size,
        "states": 3 * 3 * held * size,
        "nodes": (8 + 4) * 3 * node * size,
        "draft weights": 3 * (head + fc) * size,
        "draft KV": 3 * 3 * 20 * kv * size,
    }
    assert run.operations(PLAIN, 3) == 2 * 3 * target
    assert run.operations(Setting(3, 3, 8), 5) == 2 * 5 * (
        8 * target + 2 * 3 * (head + fc) + 4 * (head - logits + fc) + logits
    )


def test_the_hybrid_is_the_published_one():
    hybrid()
    config = shapes(4096)["Qwen3.5-9B"].target
    assert config.layer_types.count("linear_attention") == 24
    assert config.layer_types.count("full_attention") == 8
    assert config.max_position_embeddings == 4096
    assert config.layer_types[3::4] == ["full_attention"] * 8
    short = shapes(64, 4, "bfloat16")["Qwen3.5-9B"].target
    assert len(short.layer_types) == 4
    assert short.mamba_ssm_dtype == "bfloat16"


KINDS = {
    "eagle3": [PLAIN, Setting(2, 2, 7)],
    "dflash": [PLAIN, Setting(1, 3, 4), Setting(1, 5, 9, "dflash", 3)],
    "mtp": [PLAIN, Setting(1, 3, 4), Setting(3, 3, 8)],
    "host": [PLAIN, Setting(2, 3, 8, "host")],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run_leaves_a_record(monkeypatch, tmp_path, kind):
    out, seen, settings = tmp_path / "cells.json", [], KINDS[kind]
    block = {"size": 6, "layers": 2, "states": 2} if kind == "dflash" else {}
    owner, name, made = {
        "eagle3": (step, "SETTINGS", World),
        "dflash": (step.step_blocks, "SETTINGS", step.step_blocks.BlockWorld),
        "mtp": (step, "MTP", World),
        "host": (step, "HOST", World),
    }[kind]
    left_out = [Setting(1, 3, 4)] if kind == "eagle3" else []
    monkeypatch.setattr(owner, name, (*left_out, *settings[1:]))
    shape = hybrid() if kind == "mtp" else tiny()
    monkeypatch.setattr(
        step if kind != "dflash" else step.step_blocks,
        made.__name__,
        lambda *given, **named: made(shape, [40, 8], CPU, torch.float32, "torch_native", **block),
    )
    monkeypatch.setattr(step, "shapes", lambda *_: {"tiny": shape})
    monkeypatch.setattr(step, "machine", lambda commit: {"device": "A GPU", "commit": commit})
    monkeypatch.setattr(step.roofs, "measure", lambda _: {"copy_tb_s": 4.2, "matmul_tflops": 800})
    monkeypatch.setattr(step_timing, "WARM", 0)
    kernels = [{"name": name, "count": 1, "us": us} for name, us in (("best_first_", 3), ("b", 2))]
    monkeypatch.setattr(step, "traced", lambda _: {"kernels": 7, "by_name": kernels})
    monkeypatch.setitem(step.KINDS[kind], "fits", 60)

    def note(record, path):
        seen.append([len(record["cells"]), sum("trace" in cell for cell in record["cells"])])
        write(record, path)

    monkeypatch.setattr(step, "write", note)
    flags = [] if kind == "eagle3" else [f"--{kind}"]
    options = ["--models", "tiny", "--batch", "1,2", "--context", "8,40", "--rounds", "2"]
    names = [setting.name for setting in settings]
    only = ["--settings", names[-1]] if kind == "eagle3" else []
    argv = ["bench.step", *flags, *options, *only, "--commit", "abc", "--out", str(out)]
    monkeypatch.setattr("sys.argv", argv)
    step.main()
    record = json.loads(out.read_text())
    assert (record["model"], record["machine"]["commit"]) == ("tiny", "abc")
    cells = record["cells"]
    assert [cell["setting"] for cell in cells] == [name for name in names for _ in range(4)]
    count = 4 * len(names)
    # what is known is written after every cell, and traces come after everything was timed
    assert seen[:count] == [[at + 1, 0] for at in range(count)]
    assert seen[count:] == [[count, 3 * (at + 1)] for at in range(len(names))]
    skipped = [cell for cell in cells if "skipped" in cell]
    assert {(cell["batch"], cell["context"]) for cell in skipped} == {(2, 40)}
    for cell in cells:
        if cell not in skipped:
            assert 0 < cell["host_idle_us"] < cell["round_trip_us"]
            assert 1 <= cell["length"] <= 4
            assert 0 < cell["p10_us"] <= cell["us"] <= cell["p90_us"]
            assert 0 < cell["host_p10_us"] <= cell["host_us"] <= cell["host_p90_us"]
            assert cell["floor_us"] == round(sum(cell["bytes"].values()) / 4.2e6, 2)
            assert cell["error"] < 1e-5
            assert cell["short"] == 0
            assert cell["trace"]["kernels"] == 7
            assert cell.get("tree_us") == (3 if cell["setting"].startswith("DFlash") else None)


def test_kernels_of_a_step_are_counted(stepper):
    stepper.force(2)
    found = step.traced(stepper)
    calls = {one["name"]: one["count"] for one in found["by_name"]}
    assert found["kernels"] >= sum(calls.values()) > len(calls)
    assert all(count % 1 == 0 for count in calls.values()), "of one step"


@pytest.mark.parametrize("share", ["0/2", "1/2"])
def test_shares_of_the_settings_are_compiled(monkeypatch, share):
    found, settings = [], (Setting(1, 3, 4), Setting(2, 2, 7))

    def noting(*given):
        run = world()
        honest = run.decoder

        def decoder(setting, buckets, accept, *, record):
            found.append((setting.name, *buckets, record))
            return honest(setting, buckets, accept, record=record)

        monkeypatch.setattr(run, "decoder", decoder)
        monkeypatch.setattr(run, "rooms", [2000] * 3)
        return run

    monkeypatch.setattr(step, "SETTINGS", settings)
    monkeypatch.setattr(step, "World", noting)
    monkeypatch.setattr(World, "put", lambda run, decoder, rows, context: None)
    monkeypatch.setattr(step, "shapes", lambda *_, **__: {"tiny": tiny()})
    options = ["--models", "tiny", "--batch", "1,2", "--compile", share]
    monkeypatch.setattr("sys.argv", ["bench.step", *options])
    step.main()
    jobs = [(one.name, batch, False) for one in (*settings[::-1], PLAIN) for batch in (1, 2)]
    assert found == jobs[int(share[0]) :: 2]


def test_steps_that_are_no_graph_are_noticed():
    run = world()
    accept = run.forced(1)
    decoder = run.decoder(Setting(2, 3, 6), [1], accept)
    stepper = step.Stepper(decoder, run.admit(decoder, 3, 20), accept)
    with pytest.raises(AssertionError):
        step.check_advance(stepper)


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


def test_a_hybrid_has_no_eagle_head_here(monkeypatch, capsys):
    hybrid()
    for flags, name, known in (
        ([], "Qwen3.5-9B", "Llama-3.1-8B, Qwen3-8B"),
        (["--mtp"], "Qwen3-8B", "Qwen3.5-9B"),
    ):
        monkeypatch.setattr("sys.argv", ["bench.step", *flags, "--models", name])
        with pytest.raises(SystemExit):
            step.main()
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.endswith(f"error: --models: {name!r} is none of {known}")


@pytest.mark.parametrize("more", [[], ["--compile", "0/1"]])
def test_unknown_models_are_refused_with_the_known_names(monkeypatch, capsys, more):
    monkeypatch.setattr("sys.argv", ["bench.step", "--models", "Qwen3-8B,Llama", *more])
    with pytest.raises(SystemExit) as ended:
        step.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("error: --models: 'Llama' is none of Llama-3.1-8B, Qwen3-8B")
