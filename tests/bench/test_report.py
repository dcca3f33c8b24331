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
# designs that were tried, and the sanitizer, whose table has the version of every run
EARLIER = {
    "mla_merges_h200.json",
    "small_ops_before_h200.json",
    "small_ops_warps_h200.json",
    records.SANITIZER,
}
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
        assert plots.stamp(report.picture(ROOT / "docs", part.name)) == plots.digest(part)
    if parts:
        latency = report.picture(ROOT / "docs", "latency")
        assert plots.stamp(latency) == plots.digest_of(parts)


def test_every_part_has_a_place():
    page = (ROOT / "docs" / report.PAGE).read_text()
    named = re.findall(report.MARKED, page)
    assert {name for _, name, _ in named} == {
        "machines",
        "summary",
        "targets",
        "latency",
        *matrix.parts(),
        *records.TABLES,
    }


def test_the_summary_has_its_lines_and_counts_all():
    page = (ROOT / "docs" / report.PAGE).read_text()
    assert [words for words, _, _ in summary.LINES if f"| [{words}](#" not in page] == []
    lines, *counts = map(
        int,
        re.search(
            r"Of (\d+) lines .*, (\d+) reach their aim, (\d+) what .*, and (\d+) are below", page
        ).groups(),
    )
    assert lines == sum(counts) == len(re.findall(r"\| (?:aim|must|\*\*below\*\*) \|$", page, re.M))


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


def test_records_say_what_they_were_taken_with(parts, tmp_path):
    full = {
        "device": "GPU",
        "torch": "2",
        "triton": None,
        "commit": "abc",
        "kernels": "def",
        "date": "today",
    }
    (tmp_path / records.SMALL).write_text(
        json.dumps(
            {
                "machine": full,
                "cells": [],
                "roofs": {"empty_1_us": 0.7},
            }
        )
    )
    (tmp_path / "graphs_h200.json").write_text(
        json.dumps(
            {
                "machine": {"device": "GPU", "cuda": "13.0", "commit": "012"},
            }
        )
    )
    table = report.blocks(tmp_path / "attention", parts)["machines"]
    assert "| Tree verify | 4.00 |" in table
    assert (
        "| small operations | `small_ops_h200.json` | GPU: torch 2 | `abc` | `def` | today |\n"
        "| captures | `graphs_h200.json` | GPU: CUDA 13.0 | `012` | - | - |"
    ) in table


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


def test_every_record_of_a_version_is_listed():
    """A record that names its commit is in the page's table, or its own table says it."""
    for path in (ROOT / "bench" / "results").glob("*_h200.json"):
        found = json.loads(path.read_text())
        if path.name in records.TAKEN or path.name in EARLIER:
            continue
        assert "commit" not in found.get("machine", {}), path.name


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
    made_up.write(folder, ["drafts", "options"])
    docs.mkdir()
    (docs / report.PAGE).write_text(PAGE.format("options") + PAGE.format("targets"))
    made = report.write(folder, docs)
    page = made[0].read_text()
    assert "![Options and growth](img/attention_options.svg)" in page
    assert "| draft decode, topk 8, against FlashInfer per branch | 2.00x | 2.60x | 2.50x |" in page
    assert page == report.rendered(page, folder, read(folder))
    assert page.count("after\n") == 2
    parts = {part.name: part for part in read(folder)}
    assert [path.name for path in made[1:]] == [
        "attention_drafts.svg",
        "attention_options.svg",
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
