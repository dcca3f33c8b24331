"""What riding prompts could gain: measured at a tiny size, and worked out."""

from __future__ import annotations

import json

import pytest
import torch

from bench.load.cells import DRAFTS
from bench.step_world import World
from bench.tools import riding
from tests.bench.test_step import CPU, tiny

LINE = {"model": "1.5b", "nodes": 1, "rows": 32, "chunk": 128, "saved_us": 500.0}
CELL = {"cell": "1.5b-32", "draft": "plain", "seconds": 2.0, "tokens_per_s": 9000.0}
CELL |= {"prompt_calls": 100, "steps": 400}


def test_a_whole_run_leaves_lines(monkeypatch, tmp_path, capsys):
    def made(shape, rooms, device):
        assert (shape.name, rooms) == ("tiny", [riding.CONTEXT] * riding.ROWS)
        return World(shape, rooms, CPU, torch.float32, "torch_native")

    monkeypatch.setattr(riding, "World", made)
    monkeypatch.setattr(riding, "shape_of", lambda model: tiny())
    monkeypatch.setattr(riding, "WARM", 1)
    for name, value in (("CHUNKS", (13, 24)), ("ROWS", 3), ("CONTEXT", 40)):
        monkeypatch.setattr(riding, name, value)
    cells, out = tmp_path / "load.jsonl", tmp_path / "riding.jsonl"
    cells.write_text(json.dumps(CELL) + "\n")
    argv = ["riding", "--models", "1.5b", "--rounds", "2", "--lines", str(cells), "--out", str(out)]
    monkeypatch.setattr("sys.argv", argv)
    riding.main()
    *lines, won = map(json.loads, out.read_text().splitlines())
    assert [(one["nodes"], one["chunk"]) for one in lines] == [
        (nodes, chunk) for nodes in (1, 4, 16) for chunk in (13, 24)
    ]
    for one in lines:
        assert one["rows"] == 3
        assert min(one["step_us"], one["chunk_us"], one["both_us"]) > 0
        over = one["step_us"] + one["chunk_us"] - one["both_us"]
        assert one["saved_us"] == max(over, 0)
    assert won["saved_us"] == max(one["saved_us"] for one in lines if one["nodes"] == 1)
    assert len(capsys.readouterr().out.splitlines()) == len(lines) + 1


def test_a_chunk_that_is_no_graph_is_noticed(monkeypatch):
    world = World(tiny(), [40] * 3, CPU, torch.float32, "torch_native")
    of = riding.PromptRunner.of

    class Cut:
        of = staticmethod(lambda setup, **options: of(setup, **options | {"buckets": [16]}))

    monkeypatch.setattr(riding, "PromptRunner", Cut)
    with pytest.raises(AssertionError):
        list(riding.measured(world, "1.5b", 1, (24,)))


def test_the_most_that_a_cell_could_win():
    lines = [LINE, LINE | {"chunk": 256, "saved_us": 800.0}, LINE | {"nodes": 4, "saved_us": 9e3}]
    cells = [CELL, CELL | {"prompt_calls": 500}, CELL | {"draft": "lookup"}, CELL | {"cell": "x"}]
    found, more = riding.most(lines, cells)
    # 100 chunks save 0.8 ms each of 2 s
    assert found["at_most"] == pytest.approx(2 / 1.92)
    assert (found["chunks_per_step"], found["saved_us"]) == (0.25, 800.0)
    assert more["at_most"] == pytest.approx(2 / 1.68), "in each of 400 steps rides one"


def test_trees_are_those_of_the_loads():
    nodes = {DRAFTS[name].setting.shape[2] for name in ("plain", "eagle3", "eagle3-tree")}
    assert {one.nodes for one in riding.TREES} == nodes
