"""A run's files, from the first check to the table, with time and the libraries made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.suite import cases, matrix, roofs, run, tables, timing
from bench.suite.batch import Arena
from bench.suite.peers.flashinfer import Workspace
from bench.suite.results import read
from tests.bench import fakes, made_up

SHAPE = {"heads": (4, 2), "head_dim": 16, "dtype": "float16"}


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """A runner whose every replay takes 10 us, and every plan 2."""
    fakes.install(monkeypatch)
    monkeypatch.setattr(Workspace, "_held", {torch.device("cpu"): torch.zeros(1)})
    monkeypatch.setattr("bench.suite.peers.xqa.SEMAPHORES", 16)
    monkeypatch.setattr("bench.suite.peers.fa3.BUILT", {(16, "float16")})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "once", lambda call: call() or 1e6)
    monkeypatch.setattr(timing, "median_of", lambda recorded, rounds: 2.0)

    def record(calls, count=1):
        calls()
        return timing.Recorded(None, count)

    def replay(graphs, rounds, budget_us):
        for graph in graphs:
            graph.times += [10.0] * rounds

    monkeypatch.setattr(timing, "record", record)
    monkeypatch.setattr(timing, "replay_in_turn", replay)
    measured = {"copy_tb_s": 4.0, "matmul_tflops": 700.0}
    monkeypatch.setattr(roofs, "measure", lambda rounds: measured)
    monkeypatch.setattr("bench.suite.batch.CYCLED", 1)
    monkeypatch.setattr("bench.suite.entry.PLANS", 1)
    found = run.Runner(tmp_path, rounds=5, log=lambda line: None)
    found.arena = Arena(torch.device("cpu"))
    return found


def test_a_run_becomes_a_table(runner, tmp_path):
    base = cases.make("20 + 33 tree 4-3-8", page_size=16, **SHAPE)
    part = cases.Part(
        "pages",
        "Pages",
        [
            cases.Cell(base, (("page 1", replace(base, page_size=1)),)),
            cases.Cell(cases.float8(base), (("float16", base),), title="float8"),
            cases.Cell(base, (("deterministic", cases.fixed(base)),), peers=False, title="fixed"),
        ],
    )
    runner.skip = {f"FlashInfer mask@{base.name}"}
    cells = runner.part(part)["cells"]
    (found,) = read(tmp_path)
    paged, small, fixed = found.cells
    assert paged.own.case["page_size"] == 16
    assert paged.variants["page 1"].case["page_size"] == 1
    assert paged.refused["FlashInfer mask"] == "left out"
    assert {"FA3 tree, schedule ahead", "FlashInfer XQA"} <= set(paged.peers)
    assert paged.against() == 1
    assert small.own.case["stored"] == "float8_e4m3fn"
    assert small.variants["float16"].moved > 1.5 * small.own.moved
    assert small.refused["FA3 tree, schedule ahead"] == "float8 keys need float8 queries"
    assert "FlashInfer mask" in small.peers
    assert "lack a symbol" in small.refused["FlashInfer XQA"]
    assert fixed.variants["deterministic"].case["fixed"]
    lines = [line for cell in cells for line in cell["contestants"] if "us" in line]
    assert len(lines) > 6
    for line in lines:
        assert line["us"] == 10
        assert 0 < line["error"] < 3e-3
    first = (line for line in cells[0]["contestants"] if "us" in line)
    plans = {line["name"]: line["plan_us"] for line in first}
    assert (plans["specattn"], plans["FlashInfer XQA"]) == (2, None)
    assert f"| {paged.name} | **10.0** |" in tables.cells(found.cells)
    assert "| fixed | 10.0 | deterministic | 10.0 |" in tables.variants(found.cells)


def test_made_up_files_are_like_those_of_a_run(runner, tmp_path):
    runner.part(cases.Part("trees", "Trees", [cases.Cell(cases.make("20 tree 4-3-8", **SHAPE))]))
    real = run.json.loads((tmp_path / "trees.json").read_text())
    made_up.write(tmp_path, ["drafts"])
    fake = run.json.loads((tmp_path / "drafts.json").read_text())
    assert fake.keys() <= real.keys()
    assert fake["cells"][0].keys() <= real["cells"][0].keys()
    assert fake["cells"][0]["case"].keys() == real["cells"][0]["case"].keys()
    own = [one["cells"][0]["contestants"][0] for one in (fake, real)]
    assert own[0].keys() <= own[1].keys()


def test_cells_of_a_run_are_kept(runner, tmp_path):
    case = cases.make("20 tree 4-3-8", **SHAPE)
    part = cases.Part("trees", "Trees", [cases.Cell(case, peers=False)])
    runner.part(part)
    runner.resume = True
    runner.cell = lambda *_: pytest.fail("the cell is there already")
    again = runner.part(part)
    assert [cell["name"] for cell in again["cells"]] == [case.name]
    assert matrix.only(part, "nothing").cells == []
