"""Steps whose trees the host hands over: float64, round trips, the table."""

from __future__ import annotations

import json

import pytest
import torch

from bench import step_host, step_timing
from bench.step_host import HostSetting, HostWorld
from bench.suite import host_trees
from tests.bench.test_step_blocks import SHAPE

SETTING = HostSetting(2, 3, 8)


def world() -> HostWorld:
    return HostWorld(SHAPE, (40, 40, 23), torch.device("cpu"), torch.float32, "torch_native")


def test_settings_can_be_made():
    for setting in step_host.SETTINGS:
        assert setting.config(4096, 1).num_draft_tokens == setting.nodes


def test_trees_are_whole():
    tokens, parents = SETTING.tree(61)
    assert len(tokens) == 7
    assert max(tokens) < 61
    assert parents == [-1, -1, 0, 0, 1, 1, 2]


def test_cells_are_checked_and_both_times_are_there(monkeypatch):
    monkeypatch.setattr(step_timing, "WARM", 0)
    cells = list(step_host.measure(world(), [SETTING], [1, 3], 20, rounds=2))
    assert [(cell["setting"], cell["batch"]) for cell in cells] == [("host 8", 1), ("host 8", 3)]
    for cell in cells:
        assert cell["error"] < 1e-5
        assert cell["round_trip_us"] > 0
        assert cell["device_us"] > 0


def test_a_round_trip_that_gains_something_else_is_noticed():
    run = world()
    accept = run.forced(2)
    decoder = run.decoder(SETTING, [1], accept)
    trees = [SETTING.tree(run.lowest)]
    stepper = step_timing.Stepper(decoder, run.admit(decoder, 1, 20), accept, trees=trees)
    stepper.force(2)
    stepper.length = 3
    with pytest.raises(AssertionError):
        step_host.round_trip(stepper, 1)


def test_the_table_says_how_long_the_device_waits(tmp_path):
    cell = {"batch": 16, "nodes": 64, "context": 4096}
    cell |= {"device_us": 8000.0, "launch_us": 400.0, "round_trip_us": 8600.0}
    machine = {"device": "A GPU", "torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0"}
    record = {"machine": machine, "model": "Llama-3.1-8B", "cells": [cell]}
    (tmp_path / host_trees.RECORD).write_text(json.dumps(record))
    assert "| 16 x 4k | 64 | 8.00 | 8.60 | 0.60 | 7.0 % |" in host_trees.shown(tmp_path)
