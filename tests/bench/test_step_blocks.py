"""Steps of DFlash's blocks at a tiny size: float64, forced lengths, one graph, bytes, the table."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig

from bench.random_models import random_target
from bench.step_blocks import BlockWorld
from bench.step_oracle import check
from bench.step_timing import Stepper, check_advance
from bench.step_world import PLAIN, Setting, Shape
from bench.suite import blocks as report
from bench.suite import steps

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
SHAPE = Shape("tiny", LlamaConfig(**SIZES), LlamaConfig(**SIZES), 61)
TREE = Setting(1, 5, 9, "dflash", 3)


def world(shape=SHAPE, rooms=(40, 40, 23), device=CPU) -> BlockWorld:
    options = {"size": 6, "layers": 2, "states": 2}
    return BlockWorld(shape, rooms, CPU, torch.float32, "torch_native", **options)


@pytest.mark.parametrize(("setting", "length"), [(TREE, 6), (Setting(1, 5, 70, "dflash", 12), 3)])
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
    stepper.check()
    assert stepper.short == [0, 0, 0]
    # the last token is one that no draft proposes
    assert [int(decoder.states.bonus_tokens[row]) for row in stepper.rows] == [96] * 3


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


def test_the_table_says_what_the_record_says(tmp_path):
    def cell(setting, batch, us, **more):
        found = {"setting": setting, "batch": batch, "context": 4096, "us": us}
        return found | {"floor_us": 4000.0, "operations": 2e12} | more

    cells = [
        cell("plain", 1, 4000.0),
        cell("tree 4-5-16", 1, 5000.0),
        cell("DFlash 15-32", 1, 4400.0, tree_us=11.0, trace={"kernels": 345}),
        # a run that was cut short
        cell("plain", 4, 4800.0),
        cell("DFlash 15-32", 4, 6000.0, operations=4e12),
    ]
    machine = {"device": "A GPU", "torch": "2.11.0"}
    record = {"model": "Llama", "machine": machine, "cells": cells}
    record["roofs"] = {"matmul_tflops": 800.0}
    (tmp_path / report.RECORD).write_text(json.dumps(record))
    text = report.shown(tmp_path)
    assert text.startswith("A GPU: torch 2.11.0.\n\n")
    assert "| 1 x 4k | 4.00, 1.00x | 5.00, 1.25x | 4.40, 1.10x |" in text
    assert "| 4 x 4k | 4.80, 1.20x | - | 6.00, 1.20x * |" in text
    assert "| 1 x 4k | DFlash 15-32 | 11.00 | 0.25% | 345 | 1.10 | 0.88 |" in text
    assert "| 4 x 4k | DFlash 15-32 | - | - | - | 1.25 | - |" in text


def test_the_table_says_how_long_the_device_waits(tmp_path):
    """Of steps whose trees the host hands over."""
    cell = {"batch": 16, "nodes": 64, "context": 4096, "steps": 7}
    cell |= {"us": 8000.0, "host_us": 400.0, "round_trip_us": 8600.0}
    machine = {"device": "A GPU", "torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0"}
    cells = [cell, cell | {"steps": 0, "nodes": 1}]
    record = {"machine": machine, "model": "Llama-3.1-8B", "cells": cells}
    (tmp_path / steps.HOST_RECORD).write_text(json.dumps(record))
    text = steps.shown_host(tmp_path)
    assert "| 16 x 4k | 64 | 8.00 | 8.60 | 0.60 | 7.0 % |" in text
    assert "| 1 |" not in text
