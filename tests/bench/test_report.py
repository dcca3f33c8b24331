"""Tables and pictures say what the result files say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.suite import growth, matrix, plots, records, report, summary, targets
from bench.suite.results import read
from specattn.cli import bench as command
from specattn.cli.app import app
from tests.bench import made_up

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench" / "results" / "attention"
PAGE = "# Speed\n\n<!-- results: {} -->\nold\n<!-- end -->\n\nafter\n"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "attention"
    made_up.write(folder, matrix.parts())
    return read(folder)


@pytest.fixture(scope="module")
def cells(parts):
    return [cell for part in parts for cell in part.cells]


def asked(found, regime):
    return next(target for target in found if target.regime == regime)


def test_the_page_is_what_the_results_say():
    page = (ROOT / "docs" / report.PAGE).read_text()
    parts = read(RESULTS)
    again = report.rendered(page, RESULTS, parts)
    assert again == page, "see `specattn bench --report`"
    for part in parts:
        if part.name in report.SHOWN:
            assert plots.stamp(report.picture(ROOT / "docs", part.name)) == plots.digest(part)
    if parts:
        latency = report.picture(ROOT / "docs", "latency")
        assert plots.stamp(latency) == plots.digest_of(parts)


def test_every_block_is_on_the_page_once_and_made():
    page = (ROOT / "docs" / report.PAGE).read_text()
    named = [name for _, name, _ in re.findall(report.MARKED, page)]
    assert sorted(named) == sorted(report.blocks(RESULTS, read(RESULTS)))


def test_shown_cells_are_those_of_the_matrix():
    parts = matrix.parts()
    for name, (_, names) in report.SHOWN.items():
        assert set(names) <= {cell.name for cell in parts[name].cells}, name


def test_the_summary_has_its_lines():
    page = (ROOT / "docs" / report.PAGE).read_text()
    assert [words for words, _, _ in summary.LINES if f"| [{words}](#" not in page] == []


def test_parts_come_in_the_matrix_order(parts):
    assert [part.name for part in parts] == list(matrix.parts())


def test_a_quick_set_counts_where_nothing_else_is(tmp_path):
    made_up.write(tmp_path, ["trees"])
    (tmp_path / "trees.json").rename(tmp_path / "quick.json")
    assert [part.name for part in read(tmp_path)] == ["trees"]
    made_up.write(tmp_path, ["pages"])
    assert [part.name for part in read(tmp_path)] == ["pages"]


def test_lines_are_told_apart(cells):
    cell = next(cell for cell in cells if cell.part == "pages" and cell.variants)
    assert cell.own.case["page_size"] == 16
    assert cell.variants["page 1"].case["page_size"] == 1
    assert set(cell.peers) == {"FA3 tree", "FlashInfer mask"}
    assert cell.refused == {"FlashInfer XQA": "pages of 16 only"}
    assert cell.best.name == "FA3 tree"
    assert cell.against() == pytest.approx(2)
    assert cell.against("FlashInfer mask", "nobody") == pytest.approx(3)
    assert cell.against("nobody") is None


def test_ratios_are_those_of_the_fixture(cells):
    found = targets.ratios(cells)
    for regime, value, verdict in [
        ("trees against the best peer, geomean", 2, "aim"),
        ("trees against the best peer, worst", 2, "aim"),
        ("chains and decode against FA3, >= 64k tokens", 1.25, "aim"),
        ("chains and decode against FA3, < 16k tokens", 1.25, "must"),
        ("draft decode, topk 8, against FlashInfer per branch", 2.5, "must"),
        ("draft decode, topk 8, against SGLang per branch", 6, "must"),
        ("prompts over a cached prefix against FA3", 0.75, "**below**"),
        ("prompts over a cached prefix against FlashInfer", 1.5, "aim"),
    ]:
        target = asked(found, regime)
        assert target.value == pytest.approx(value, rel=1e-3), regime
        assert target.verdict == verdict, regime


def test_speeds_are_those_of_the_fixture(cells):
    found = targets.speeds(cells)
    for regime in (
        "trees, batch x context >= 256k tokens",
        "trees, 128k tokens, equal lengths",
        "trees, 64k tokens, equal lengths",
        "trees, ragged lengths",
    ):
        assert asked(found, regime).value == pytest.approx(0.5, rel=0.01), regime
    assert asked(found, "trees, 1 x 100").value == pytest.approx(0.2, rel=0.05)
    nodes = asked(found, "64 nodes, 8 x 8k, pages of 16 and 64")
    assert len(nodes.points) == 2
    # 128 operations per byte, at 2 TB/s
    assert nodes.value == pytest.approx(4 * 32 * 128 * 64 / (2 * 8 * 128 * 2) * 2, rel=1e-3)


def test_growth_is_that_of_the_fixture(cells):
    found = growth.shapes(cells)
    for regime, value, verdict in [
        ("time per token, 256k to 1M tokens of context", 0, "aim"),
        ("time per request, batch 64 to 512", 0, "aim"),
        ("pages of 64 over page 1", 0, "aim"),
        ("window, bound by memory", 0.06, "**below**"),
        ("cap, bound by memory", 0.04, "must"),
        ("lse, bound by memory", 0, "aim"),
        ("a second word, bound by memory", 0.03, "must"),
        ("tails of more than 64 keys, cost per byte", 1.03, "must"),
        ("batches of more than 256, cost per byte", 1, "aim"),
    ]:
        target = asked(found, regime)
        assert target.points, regime
        assert target.value == pytest.approx(value, abs=1e-3), regime
        assert target.verdict == verdict, regime


def test_float8_is_that_of_the_fixture(cells):
    speed, error = growth.float8(cells)
    assert speed.value == pytest.approx(1.5, rel=1e-3)
    assert speed.verdict == "must"
    assert (error.value, error.verdict) == (0.0025, "aim")
    assert all("fp8" in point.where for point in speed.points)


def test_every_target_is_measured(cells):
    """The matrix has a cell for every line that was asked for."""
    found = [
        *targets.speeds(cells),
        *targets.ratios(cells),
        *targets.latent(cells),
        *growth.shapes(cells),
        *growth.float8(cells),
        *growth.steps(cells),
    ]
    assert [target.regime for target in found if not target.points] == []


def test_small_kernels_have_targets_and_a_table(tmp_path):
    def cell(batch, *times):
        lines = zip(("tree", "accept greedy", "kv move, 1 layer"), times, strict=False)
        return {
            "name": f"batch {batch}",
            "case": {"batch": batch, "topk": 4, "steps": 5, "nodes": 16},
            "contestants": [
                *({"name": name, "us": us} for name, us in lines),
                {"name": "plan", "failed": "ArithmeticError: off"},
            ],
        }

    (tmp_path / records.SMALL).write_text(
        json.dumps(
            {
                "cells": [cell(1, 2.0, 3.0), cell(256, 2.25, 4.5), cell(512, 9.0, 9.0, 9.0)],
                "roofs": {"empty_1_us": 0.7},
            }
        )
    )
    found = {target.regime: target for target in records.asked(tmp_path)}
    assert found["tree build, batch <= 256"].verdict == "aim"
    assert found["tree build, batch <= 256"].value == 2.25
    assert found["accept, greedy, batch <= 256"].verdict == "**below**"
    assert found["plan, alone, batch <= 256"].verdict == "not measured"
    text = records.blocks(tmp_path)["small-ops"]
    assert "| us | batch 1 | batch 256 | batch 512 |" in text
    assert "| kv move, 1 layer | - | - | 9.00 |" in text
    assert "| plan | - | - | - |" in text


def test_the_sanitizer_has_a_table(tmp_path):
    run = {
        "tool": "memcheck",
        "group": "gluon",
        "ran": ["a", "b"],
        "cases": 3,
        "errors": None,
        "warnings": 1,
        "commit": "abc",
        "explanation": "",
    }
    (tmp_path / records.SANITIZER).write_text(json.dumps({"runs": [run | {"tool": "none"}, run]}))
    table = records.blocks(tmp_path)["sanitizer"]
    assert "| memcheck | gluon | abc | 2 of 3 | - | 1 | - |" in table


def test_two_speeds_are_told_in_the_order_they_came(tmp_path):
    rows = [
        {"after": "start", "tiny": 1003.1},
        {
            "after": "engine",
            "tiny": 1216.4,
            "one graph": 472.1,
            "three graphs": 476.8,
            "tiny, then": 1003.0,
        },
    ]
    (tmp_path / records.SPEEDS).write_text(
        json.dumps(
            {
                "lists": [{"name": "launches", "rows": rows[:1]}, {"name": "fused", "rows": rows}],
            }
        )
    )
    table = records.blocks(tmp_path)["two-speeds"]
    assert "| launches | start 1,003 | - |" in table
    assert "| fused | start 1,003, engine 1,216 | engine 472 / 477 |" in table


def test_a_page_is_filled_in_between_its_marks(parts, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    page = docs / report.PAGE
    page.write_text(PAGE.format("trees"))
    made = report.write(ROOT / "none" / "attention", docs)
    assert made == [page]
    assert page.read_text() == PAGE.format("trees").replace("old", "\nNo results yet.\n")


def test_what_is_written_is_what_is_checked(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    folder, docs = tmp_path / "results" / "attention", tmp_path / "docs"
    made_up.write(folder, ["drafts", "options", "float8"])
    docs.mkdir()
    (docs / report.PAGE).write_text(
        PAGE.format("float8") + PAGE.format("drafts") + PAGE.format("summary")
    )
    made = report.write(folder, docs)
    page = made[0].read_text()
    assert "![Keys and values in float8](img/attention_float8.svg)" in page
    assert page.count("| bfloat16 |") == len(report.SHOWN["float8"][1])
    assert "| 1 x 1k draft topk 8 step 2 | **" in page
    assert "step 3" not in page
    assert "against FlashInfer's decode](#draft-decode) | 2.50x | 2.50x | 15 |" in page
    assert page == report.rendered(page, folder, read(folder))
    assert page.count("after\n") == 3
    parts = {part.name: part for part in read(folder)}
    assert [path.name for path in made[1:]] == [
        "attention_drafts.svg",
        "attention_float8.svg",
        "attention_latency.svg",
    ]
    assert plots.stamp(made[1]) == plots.digest(parts["drafts"])
    assert plots.stamp(made[3]) == plots.digest_of(list(parts.values()))
    before = [path.read_text() for path in made]
    assert [path.read_text() for path in report.write(folder, docs)] == before


def test_the_command_writes_the_page(monkeypatch, tmp_path):
    asked = []
    suite = command._suite("report")
    monkeypatch.setattr(suite, "write", lambda *where: asked.append(where) or [Path("page.md")])
    out = CliRunner().invoke(app, ["bench", "--report", "--out", str(tmp_path)])
    assert out.exit_code == 0, out.output
    assert out.output == "page.md\n"
    assert asked == [(tmp_path, ROOT / "docs")]
    absent = CliRunner().invoke(app, ["bench", "--report", "--out", str(tmp_path / "typo")])
    assert (absent.exit_code, len(asked)) == (2, 1)
    assert absent.stderr.startswith("specattn: error: --out: no such folder of results")
