"""Steps of DFlash's blocks at a tiny size: float64, forced lengths, one graph, bytes, the table."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig

from bench import step, step_blocks, step_timing, timeline
from bench.random_models import random_target
from bench.step_blocks import BlockSetting, BlockWorld
from bench.step_oracle import check
from bench.step_timing import Stepper, check_advance
from bench.step_world import PLAIN, Setting, Shape
from bench.suite import blocks as report

CPU = torch.device("cpu")
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
NAMES = ("Llama-3.1-8B", "Qwen3-8B")
SHAPE = Shape("tiny", LlamaConfig(**SIZES), LlamaConfig(**SIZES), 61)
TREE = BlockSetting(1, 5, 9, 3)
ROOFS = {"copy_tb_s": 4.2, "matmul_tflops": 800.0}
SETTINGS = (PLAIN, Setting(2, 3, 6), TREE)


def world(shape=SHAPE, rooms=(40, 40, 23), device=CPU) -> BlockWorld:
    options = {"size": 6, "layers": 2, "states": 2}
    return BlockWorld(shape, rooms, CPU, torch.float32, "torch_native", **options)


@pytest.mark.parametrize(("setting", "length"), [(TREE, 6), (BlockSetting(1, 5, 70, 12), 3)])
def test_logits_over_a_blocks_tree_are_those_of_float64(setting, length):
    """Trees of more nodes than a word has bits, and paths as long as a block, too."""
    assert check(world(), setting, length) < 1e-5


def test_logits_of_another_model_are_noticed():
    run = world()
    run.model = random_target(LlamaConfig(**SIZES), dtype=torch.float32, device=CPU, seed=1)
    with pytest.raises(AssertionError, match="DFlash 5-9: logits are off by"):
        check(run, TREE, 2)


def test_steps_gain_what_is_forced_and_are_one_graph():
    run = world()
    accept = run.forced(1)
    decoder = run.decoder(TREE, [1, 3], accept)
    stepper = Stepper(decoder, run.admit(decoder, 3, 20), accept)
    for length in (1, 6, 3):
        stepper.force(length)
        check_advance(stepper)
    assert step_blocks.graphs_of(stepper) == 1
    stepper.check()
    assert stepper.short == [0, 0, 0]
    # the last token is one that no draft proposes
    assert [int(decoder.states.bonus_tokens[row]) for row in stepper.rows] == [96] * 3


def test_steps_that_are_no_graph_are_noticed():
    run = world()
    accept = run.forced(1)
    decoder = run.decoder(TREE, [1], accept)
    stepper = Stepper(decoder, run.admit(decoder, 3, 20), accept)
    with pytest.raises(AssertionError):
        step_blocks.graphs_of(stepper)


def test_bytes_of_a_block_are_counted_once():
    run = world()
    size, block, kv = 4, 64 * 32 + 32 * 32 + 96 * 32 + 32 * 48, 2 * 2 * 8
    # the context's: the mix of two states, and keys and values of two layers
    context = 32 * 64 + 2 * 32 * 32
    assert run.read_bytes(TREE, 3, 20) == {
        "target weights": (2 * block + 97 * 32) * size,
        "target KV": 2 * 3 * 20 * kv * size,
        "draft weights": (2 * block + 97 * 32) * size,
        "context weights": context * size,
        "draft KV": 2 * 3 * 20 * kv * size,
    }
    assert run.operations(TREE, 3) == 2 * 3 * (
        9 * (2 * block + 97 * 32) + 6 * 2 * block + 5 * 97 * 32 + 6 * context
    )
    assert set(run.read_bytes(PLAIN, 1, 20)) == {"target weights", "target KV"}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(step_timing, "WARM", 0)
    monkeypatch.setattr(step_blocks, "TURNS", 2)
    monkeypatch.setattr(step_blocks, "SETTINGS", SETTINGS)
    monkeypatch.setattr(step_blocks, "PLACES", ((1, 20), (1, 40), (3, 20)))
    monkeypatch.setattr(step_blocks, "BlockWorld", world)
    monkeypatch.setattr(step, "shapes", lambda *_, **__: dict.fromkeys(NAMES, SHAPE))
    monkeypatch.setattr(step, "machine", lambda commit: {"device": "A GPU", "commit": commit})
    monkeypatch.setattr("bench.suite.roofs.measure", lambda rounds: ROOFS)


def test_a_run_leaves_a_record_after_every_cell(monkeypatch, tmp_path, tiny):
    out, seen = tmp_path / "cells.json", []
    honest = step.write

    def write(record, path):
        honest(record, path)
        found = json.loads(path.read_text())["cells"]
        seen.append((len(found), sum("trace" in cell for cell in found)))

    monkeypatch.setattr(step, "write", write)
    monkeypatch.setattr(step, "traced", lambda stepper: {"kernels": 7})
    argv = ["bench.step", "--dflash", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", [*argv, "--commit", "abc", "--out", str(out)])
    step.main()
    assert seen == [*((count, 0) for count in range(1, 10)), (9, 1), (9, 2), (9, 3)]
    record = json.loads(out.read_text())
    assert (record["model"], record["machine"]["commit"]) == ("Llama-3.1-8B", "abc")
    for cell in record["cells"]:
        assert cell["error"] < 1e-5
        assert (cell["graphs"], cell["short"]) == (1, 0)
        assert len(cell["turns_us"]) == 2
        assert cell["us"] > 0
        assert (cell["tree_us"] is not None) == ("DFlash" in cell["setting"])
        assert cell["floor_us"] == round(sum(cell["bytes"].values()) / 4.2e6, 2)
    out.rename(tmp_path / report.RECORD)
    assert "| DFlash 5-9 |" in report.shown(tmp_path)


@pytest.mark.parametrize("share", ["0/2", "1/2"])
def test_shares_of_the_settings_are_compiled(monkeypatch, tiny, share):
    found = []
    monkeypatch.setattr(step, "_compile", lambda world, jobs: found.extend(jobs))
    monkeypatch.setattr(step_blocks, "BlockWorld", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["bench.step", "--dflash", "--compile", share])
    step.main()
    assert len(found) == 3
    assert all(batch in (1, 3) for _, _, batch in found)


def test_the_table_says_what_the_record_says(tmp_path):
    def cell(setting, batch, us, **more):
        found = {"setting": setting, "batch": batch, "context": 4096, "us": us, "graphs": 1}
        return found | {"floor_us": 4000.0, "operations": 2e12, "tree_us": None} | more

    cells = [
        cell("plain", 1, 4000.0),
        cell("tree 4-5-16", 1, 5000.0),
        cell("DFlash 15-32", 1, 4400.0, tree_us=11.0, trace={"kernels": 345}),
        # a run that was cut short
        cell("plain", 4, 4800.0),
        cell("DFlash 15-32", 4, 6000.0, tree_us=12.0, operations=4e12),
    ]
    machine = {"device": "A GPU", "torch": "2.11.0"}
    record = {"model": "Llama", "machine": machine, "cells": cells}
    record["roofs"] = {"matmul_tflops": 800.0}
    (tmp_path / report.RECORD).write_text(json.dumps(record))
    text = report.shown(tmp_path)
    assert text.startswith("A GPU: torch 2.11.0.\n\n")
    assert "| 1 x 4k | 4.00, 1.00x | 5.00, 1.25x | 4.40, 1.10x |" in text
    assert "| 4 x 4k | 4.80, 1.20x | - | 6.00, 1.20x * |" in text
    assert "| 1 x 4k | DFlash 15-32 | 11.00 | 0.25% | 345 | 1 | 1.10 | 0.88 |" in text
    assert "| 4 x 4k | DFlash 15-32 | 12.00 | 0.20% | - | 1 | 1.25 | - |" in text


def test_a_best_first_tree_parts_draft_and_target_of_a_trace():
    names = ["begin_step_kernel", "gemm", "best_first_kernel", "gemm", "accept_greedy", "end_step"]
    kernels = [timeline.Kernel(name, 10.0 * at, 10.0, 1) for at, name in enumerate(names)]
    phases = timeline.phases_of(kernels)
    assert phases == ["metadata", "draft", "tree", "verify", "accept", "extend"]
