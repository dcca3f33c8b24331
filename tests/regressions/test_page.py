"""No row of the table is forgotten, and the page says what the tests say."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from tests.regressions.pending import PARTLY, PENDING

ROOT = Path(__file__).parent.parent.parent
MAKE = runpy.run_path(str(ROOT / "docs" / "make_regressions.py"))
ROWS = [f"R{number:02}" for number in range(1, 85)]


def test_every_row_is_tested_or_pending():
    tested = MAKE["modules"]()
    assert sorted([*tested, *PENDING]) == ROWS, "a row is missing, or both tested and pending"
    assert tested.keys() >= PARTLY.keys()


@pytest.mark.parametrize("row", MAKE["modules"]())
def test_a_tested_row_has_tests_and_tells_its_story(row):
    path = MAKE["modules"]()[row]
    threads, broke, holds = MAKE["story"](path)
    assert threads
    assert broke
    assert holds
    names = [
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert any(name.startswith("test_") for name in names)


def test_the_page_is_what_the_generator_writes():
    """Run ``python docs/make_regressions.py`` after changing a docstring."""
    assert (ROOT / "docs" / "regressions.md").read_text() == MAKE["page"]()
