"""Lines of `bench.acceptance` by every kind of draft, and what their record says."""

from __future__ import annotations

import json

import pytest
import torch

from bench import acceptance
from bench.acceptance import SETTINGS
from bench.lines import Setting
from bench.suite import acceptance as report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEXTS = ("import os\nimport sys\nimport os\nimport sys\nimport", "def f(self, x):\n    return")
EAGLE, BLOCK = (3, 4, 12), (15, 1, 20)
LINES = (
    acceptance.PLAIN_GREEDY,
    Setting("dflash", (15, 1, 16)),
    Setting("dflash", BLOCK, best_first=True),
    Setting("lookup", (4, 4, 12)),
    Setting("lookup+eagle3", EAGLE),
    Setting("lookup+dflash", BLOCK, best_first=True),
    Setting("dflash", BLOCK, 1.0, best_first=True),
    Setting("eagle3", (3, 1, 4), 1.0, draft_sampling=True),
)


def key(setting):
    return setting.draft, setting.tree, setting.temperature


@pytest.fixture
def tiny(monkeypatch):
    def prompts(count, tokenizer):
        return [tokenizer(text)["input_ids"] for text in TEXTS[:count]]

    monkeypatch.setattr(acceptance, "SETTINGS", LINES)
    monkeypatch.setattr(acceptance, "held_out_prompts", prompts)

    def command(*words):
        argv = ["acceptance", "--device", DEVICE, "--prompts", "2", "--new", "7", "--slots", "2"]
        monkeypatch.setattr("sys.argv", [*argv, *map(str, words)])
        acceptance.main()

    return command


def test_lines_are_added_to_those_that_are_known(tiny, tmp_path, monkeypatch):
    out = tmp_path / report.RECORD
    tiny("--kinds", "plain", "dflash", "--out", out)
    assert len(json.loads(out.read_text())["results"]) == 4
    tiny("--out", out)
    record = json.loads(out.read_text())
    found = {tuple(line[name] for name in acceptance.NAMES): line for line in record["results"]}
    assert found.keys() == {key(setting) for setting in LINES}
    for setting in LINES:
        line = found[key(setting)]
        assert (line["tokens"], line["shape"]) == (14, list(setting.shape))
        assert 1 <= line["accepted_per_step"] <= setting.shape[0] + 1
        equal = None if setting.temperature else 2
        assert line.get("requests_equal_to_plain") == equal
        if setting.draft != "plain" and not setting.temperature:
            assert line["steps"] < found["plain", "no tree", 0.0]["steps"], setting

    text = report.shown(tmp_path)
    chain, tree = (found["dflash", name, 0.0] for name in ("chain of 15", "best first, 20 nodes"))
    ratio = tree["accepted_per_step"] / chain["accepted_per_step"]
    assert f"| {tree['accepted_per_step']:.2f} | {ratio:.2f}x |" in text
    assert "14 new tokens per line. Of the greedy texts of drafts, 10 of 10 are plain" in text
    assert "| lookup, else EAGLE-3 | topk 4, 12 nodes, 3 steps |" in text

    monkeypatch.setattr(acceptance, "measure", None)
    before = out.read_text()
    tiny("--out", out)
    assert out.read_text() == before


def test_a_run_that_is_cut_short_keeps_its_lines(tiny, tmp_path, capsys):
    out = tmp_path / "found.json"
    tiny("--kinds", "plain", "--seconds", "0", "--out", out)
    assert not out.exists()
    assert "spent before ('plain', 'no tree', 0.0)" in capsys.readouterr().out
    tiny("--kinds", "plain", "--out", out)
    tiny("--kinds", "dflash", "--seconds", "0", "--out", out)
    assert [line["draft"] for line in json.loads(out.read_text())["results"]] == ["plain"]


def test_other_texts_than_plain_decodings_are_written_and_refused(tiny, tmp_path, monkeypatch):
    out, honest = tmp_path / "found.json", acceptance.measure

    def wrong(setting, *args):
        record, tokens = honest(setting, *args)
        return record, [tokens[0], tokens[1][::-1] if setting.draft == "lookup" else tokens[1]]

    monkeypatch.setattr(acceptance, "measure", wrong)
    with pytest.raises(AssertionError, match=r"not plain decoding's texts: \[\('lookup'"):
        tiny("--kinds", "plain", "lookup", "--out", out)
    counts = [line["requests_equal_to_plain"] for line in json.loads(out.read_text())["results"]]
    assert counts == [2, 1]


def test_every_line_has_a_name_of_its_own():
    assert len({key(setting) for setting in SETTINGS}) == len(SETTINGS)
    assert {setting.draft for setting in SETTINGS} == set(report.DRAFTS)
    for setting in SETTINGS:
        setting.configs(acceptance.PROMPT_TOKENS + 128 + acceptance.ROOM, 4)


def test_lines_of_other_runs_are_not_added_to(tiny, tmp_path):
    out = tmp_path / "found.json"
    tiny("--kinds", "plain", "--out", out)
    with pytest.raises(ValueError, match=r"found\.json differs in new"):
        tiny("--new", "6", "--out", out)
