"""What of the plug-in needs no SGLang: masks and the table of names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from specattn.integrations import sglang
from specattn.integrations.sglang import names
from specattn.integrations.sglang.masks import copy_full
from specattn.interop import full_mask, qlen_mask, words_from_mask


@pytest.mark.parametrize("n", [1, 7, 65])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_the_tree_of_a_full_mask(n, dtype):
    seen = torch.rand(3, n, n) < 0.5
    lens = torch.tensor([4, 0, 9])
    full = full_mask(words_from_mask(seen), lens.int()).to(dtype)
    out = torch.zeros(4 * n * n, dtype=torch.bool)
    copy_full(full, lens, n, out=out)
    assert torch.equal(out[: 3 * n * n].view(3, n, n), seen)
    assert not out[3 * n * n :].any()


def test_a_mask_of_trees_alone_is_taken_as_it_is():
    seen = qlen_mask(words_from_mask(torch.rand(2, 5, 5) < 0.5))
    out = torch.zeros(50, dtype=torch.bool)
    copy_full(seen.flatten(), torch.tensor([3, 4]), 5, out=out)
    assert torch.equal(out.view(2, 5, 5), seen)


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
    monkeypatch.setattr(names, "NAMES", ())
    assert names.problems() == (
        [] if served else [f"SGLang must be 0.5.15 or 0.5.23, got {installed}"]
    )


def test_names_that_are_missing_or_take_other_parameters(monkeypatch):
    monkeypatch.setattr(names, "version", lambda package: "0.5.15")
    table = (
        names.Name("json.dumps", ("obj",)),
        names.Name("json.gone"),
        names.Name("json.loads", ("s", "t")),
        names.Name("json.newer", only=(0, 5, 23)),
    )
    monkeypatch.setattr(names, "NAMES", table)
    missing, other = names.problems()
    assert missing.startswith("SGLang has no json.gone")
    assert other == "json.loads takes no t"


def test_every_hook_is_in_the_table():
    assert {path for path, _ in (*sglang.HOOKS, *sglang.OLD_HOOKS)} <= {
        name.path for name in names.NAMES
    }
