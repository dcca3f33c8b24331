"""What of the plug-in needs no SGLang: the table of names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from specattn.integrations import sglang
from specattn.integrations.sglang import names


def test_the_entry_point_is_the_plug_in():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["sglang.srt.plugins"]
    assert resolve_name(points[names.NAME]) is sglang.register


@pytest.mark.parametrize(
    ("installed", "served"),
    [("0.5.15", True), ("0.5.23", True), ("0.5.16", False), ("0.6.0", False)],
)
def test_a_release_that_was_not_tested_is_refused(monkeypatch, installed, served):
    monkeypatch.setattr(names, "version", lambda package: installed)
    monkeypatch.setattr(names, "NAMES", {})
    monkeypatch.setattr(names, "OF_RELEASE", {one: {} for one in names.OF_RELEASE})
    assert names.problems() == (
        [] if served else [f"SGLang must be 0.5.15 or 0.5.23, got {installed}"]
    )


def test_names_that_are_missing_or_take_other_parameters(monkeypatch):
    monkeypatch.setattr(names, "version", lambda package: "0.5.15")
    table = {"json.dumps": ("obj",), "json.gone": (), "json.loads": ("s", "t")}
    monkeypatch.setattr(names, "NAMES", table)
    of_release = {names.OLD: {"json.older": ()}, names.NEW: {"json.newer": ()}}
    monkeypatch.setattr(names, "OF_RELEASE", of_release)
    missing, other, older = names.problems()
    assert missing.startswith("json.gone does not load")
    assert other == "json.loads takes no t"
    assert older.startswith("json.older does not load")


def test_every_hook_is_in_the_table():
    assert sglang.HOOKS.keys() <= names.NAMES.keys()
    assert sglang.OLD_HOOKS.keys() <= names.OF_RELEASE[names.OLD].keys()
    assert sglang.NEW_HOOKS.keys() <= names.OF_RELEASE[names.NEW].keys()
