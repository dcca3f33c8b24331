"""Tables say what the result files say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.suite import matrix, report, summary
from bench.suite.results import read
from specattn.backends import fastest
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


def test_the_pages_are_what_the_results_say():
    parts = read(RESULTS)
    for name in report.PAGES:
        page = (ROOT / "docs" / name).read_text()
        again = report.rendered(page, RESULTS, parts)
        assert again == page, "see `specattn bench --report`"


def test_every_block_is_on_one_page_once_and_made():
    pages = [(ROOT / "docs" / name).read_text() for name in report.PAGES]
    named = [name for page in pages for _, name, _ in re.findall(report.MARKED, page)]
    assert sorted(named) == sorted(report.blocks(RESULTS, read(RESULTS)))


def test_shown_cells_are_those_of_the_matrix():
    parts = matrix.parts()
    for name, (_, names) in report.SHOWN.items():
        assert set(names.split("; ")) <= {cell.name for cell in parts[name].cells}, name


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
    found = {ratio.section: ratio for ratio in summary.attention(cells)}
    for section, value in [
        ("tree-verify", 2),
        ("decode-and-chain-verify", 1.25),
        ("draft-decode", 2.5),
        ("draft-extend-and-prompts", 0.75),
    ]:
        assert found[section].geomean == pytest.approx(value, rel=1e-3), section
        assert found[section].worst.value == pytest.approx(value, rel=1e-3), section
    assert all(ratio.points for ratio in found.values()), "the matrix has cells for every ratio"


def test_what_auto_takes_stands_beside_the_own_kernels(parts):
    """It is what counts against others."""
    (cell,) = (cell for part in parts for cell in part.cells if cell.name == "1 x 64k prompt 512")
    taken = replace(cell, variants={"auto": replace(cell.own, us=cell.own.us / 2)})
    alone = replace(cell, variants={})
    assert (taken.ours.us, alone.ours) == (cell.own.us / 2, cell.own)
    assert taken.against("FA3") == pytest.approx(2 * alone.against("FA3"))
    assert "| auto |" in report.tables.cells([taken])
    assert "| auto |" not in report.tables.cells([alone])


def test_a_page_is_filled_in_between_its_marks(parts, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    pages = [docs / name for name in report.PAGES]
    for page in pages:
        page.write_text(PAGE.format("trees"))
    made = report.write(ROOT / "none" / "attention", docs)
    assert made == pages
    for page in pages:
        assert page.read_text() == PAGE.format("trees").replace("old", "\nNo results yet.\n")


def test_what_is_written_is_what_is_checked(tmp_path):
    folder, docs = tmp_path / "results" / "attention", tmp_path / "docs"
    made_up.write(folder, ["drafts", "options", "float8"])
    docs.mkdir()
    (docs / report.PAGE).write_text(
        PAGE.format("float8") + PAGE.format("drafts") + PAGE.format("summary")
    )
    for other in report.PAGES[1:]:
        (docs / other).write_text("no marks\n")
    made = report.write(folder, docs)
    page = made[0].read_text()
    assert page.count("| bfloat16 |") == len(report.SHOWN["float8"][1].split("; "))
    assert "| 1 x 1k draft topk 8 step 2 | **" in page
    assert "step 3" not in page
    assert "against FlashInfer's decode](#draft-decode) | 2.50x | 2.50x | 15 |" in page
    assert page == report.rendered(page, folder, read(folder))
    assert page.count("after\n") == 3
    before = [path.read_text() for path in made]
    assert [path.read_text() for path in report.write(folder, docs)] == before


def test_the_command_writes_the_page_and_what_auto_takes(monkeypatch, tmp_path):
    asked = []
    suite = command._suite("report")
    monkeypatch.setattr(suite, "write", lambda *where: asked.append(where) or [Path("page.md")])
    monkeypatch.setattr(fastest, "RECORD", tmp_path / "fastest.json")
    out = CliRunner().invoke(app, ["bench", "--report", "--out", str(tmp_path)])
    assert out.exit_code == 0, out.output
    assert out.output == f"page.md\n{tmp_path / 'fastest.json'}\n"
    assert asked == [(tmp_path, ROOT / "docs")]
    absent = CliRunner().invoke(app, ["bench", "--report", "--out", str(tmp_path / "typo")])
    assert (absent.exit_code, len(asked)) == (2, 1)
    assert absent.stderr.startswith("specattn: error: --out: no such folder of results")
