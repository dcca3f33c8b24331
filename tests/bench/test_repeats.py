"""`bench.repeats` at a tiny size: the same bits from the same states, and what it refuses."""

from __future__ import annotations

import argparse

import pytest
import torch
from transformers import LlamaConfig

from bench import repeats
from bench.step_world import Setting, Shape, World
from tests.bench.test_step import tiny

TREE = Setting(2, 3, 6)


def world() -> World:
    return World(tiny(), [40, 40, 23], torch.device("cpu"), torch.float32, "torch_native")


def of(run: World, setting: Setting = TREE) -> repeats.Repeats:
    decoder = run.decoder(setting, [1, 3], run.forced(2))
    return repeats.Repeats(decoder, run.admit(decoder, 3, 20))


def test_replays_leave_the_same_bits():
    options = argparse.Namespace(context=20, steps=16, seconds=0.0)
    cells = repeats.measured(world(), TREE, [1, 3], options)
    assert [(cell["batch"], cell["replays"], cell["different"]) for cell in cells] == [
        (1, 6, 0),
        (3, 6, 0),
    ]
    for cell in cells:
        assert sum(cell["depths"].values()) == 16 * cell["batch"]
        assert set(cell["depths"]) <= {"1", "2", "3"}


def test_states_are_of_different_steps_in_either_order():
    one = of(world())
    starts = one.draft(14)
    assert [start.rows for start in starts] == [one.rows, one.rows[::-1], one.rows]
    tokens = [start.before["bonus_tokens"].tolist() for start in starts]
    hidden = [start.before["hidden_states"] for start in starts]
    assert not torch.equal(hidden[0], hidden[1]), tokens
    for start in starts:
        assert start.before["seq_lens"].tolist() == one.lens.tolist()
        moved = start.after["seq_lens"] - start.before["seq_lens"]
        assert moved[one.rows].tolist() == [2, 2, 2]


def test_a_bit_that_another_step_has_left_is_noticed():
    one = of(world())
    starts = one.draft(14)
    assert int(one.replay(starts[1])) == 0
    starts[1].before["bonus_tokens"][one.rows[2]] += 1
    assert int(one.replay(starts[1])) >= 1
    assert int(one.replay(starts[2])) == 0
    starts[2].after["topk_probs"][one.rows[0]] += 1e-7
    one.draft = lambda steps: starts[2:]
    with pytest.raises(AssertionError, match="'different': "):
        repeats.run(one, 14, 0.0)


def test_how_deep_trees_are_is_counted():
    run = world()
    run.draft.model.lm_head.zero_()  # all tokens are equal: trees are as wide as they can be
    one = of(run)
    one.draft(14)
    assert one.depths.tolist()[:3] == [0, 0, 14 * 3]


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [Setting(1, 3, 4), Setting(4, 5, 16)], ids=lambda s: s.name)
def test_recorded_steps_leave_the_same_bits(setting):
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "vocab_size": 2048,
        "intermediate_size": 1024,
    }
    shape = Shape("small", LlamaConfig(**sizes, num_hidden_layers=3), LlamaConfig(**sizes), 1024)
    run = World(shape, [700] * 5, torch.device("cuda"))
    options = argparse.Namespace(context=700, steps=40, seconds=1.0)
    cells = repeats.measured(run, setting, [2, 5], options)
    assert min(cell["replays"] for cell in cells) > 50
    assert not any(cell["different"] for cell in cells)
