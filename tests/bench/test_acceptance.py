"""Lines of `bench.acceptance` by every kind of draft, and what their record says."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch

from bench import acceptance
from bench.acceptance import SETTINGS, Setting, measure, own_branch
from bench.shipped import pair
from bench.suite import acceptance as report
from specattn.attention.multi_step import BoundMultiStep
from specattn.batch import Candidates
from specattn.kernels.tree import Beams

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
    Setting("eagle3", EAGLE, own_branch=True),
)


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
    found = {acceptance.key_of(line): line for line in record["results"]}
    assert list(found) == [setting.key for setting in LINES]
    for setting, line in zip(LINES, found.values(), strict=True):
        assert (line["tokens"], line["shape"]) == (14, list(setting.shape))
        assert 1 <= line["accepted_per_step"] <= setting.shape[0] + 1
        equal = None if setting.temperature else 2
        assert line.get("requests_equal_to_plain") == equal
        if setting.draft != "plain" and not setting.temperature:
            assert line["steps"] < found["plain", "no tree", 0.0]["steps"], setting.key

    text = report.shown(tmp_path)
    chain, tree = (found["dflash", name, 0.0] for name in ("chain of 15", "best first, 20 nodes"))
    ratio = tree["accepted_per_step"] / chain["accepted_per_step"]
    assert f"| {tree['accepted_per_step']:.2f} | {ratio:.2f}x |" in text
    assert "14 new tokens per line. Of the greedy texts of drafts, 12 of 12 are plain" in text
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
    assert len({setting.key for setting in SETTINGS}) == len(SETTINGS)
    assert {setting.draft for setting in SETTINGS} == set(report.DRAFTS)
    for setting in SETTINGS:
        setting.config(acceptance.PROMPT_TOKENS + 128 + acceptance.ROOM, 4)


def test_lines_of_other_runs_are_not_added_to(tiny, tmp_path):
    out = tmp_path / "found.json"
    tiny("--kinds", "plain", "--out", out)
    with pytest.raises(ValueError, match=r"found\.json differs in new"):
        tiny("--new", "6", "--out", out)


def test_own_branches_are_what_draft_forwards_read():
    """The words of every draft forward, from steps of an engine, are those of beam slots."""
    models, steps, topk = pair("cpu", torch.float32), 5, 4
    prompts = [models[0].tokenizer(text)["input_ids"] for text in TEXTS]
    seen, honest = [], BoundMultiStep.fill_ancestors

    def spy(self, step):
        seen.append((step, self.inputs.words[:, step].clone()))
        honest(self, step)

    beams = {
        step: torch.tensor(
            [[sum(1 << at * topk + beam for at in range(step + 1))] for beam in range(topk)]
        )
        for step in range(steps)
    }
    setting = Setting("eagle3", (steps, topk, 16))
    with mock.patch.object(BoundMultiStep, "fill_ancestors", spy):
        _, true = measure(setting, models, prompts, 6, 2)
        before = len(seen)
        _, own = measure(replace(setting, own_branch=True), models, prompts, 6, 2)
    assert true == own, "what drafts read changes no text"
    differing = [bool((words != beams[step]).any()) for step, words in seen]
    assert any(differing[:before])
    assert len(seen) > before
    assert not any(differing[before:])


def test_own_branches_fill_words_of_more_than_64_nodes():
    topk, batch, steps = 8, 1, 9
    probs = torch.full((batch, topk, topk), 0.1)
    words = torch.zeros(batch, topk, 2, dtype=torch.int64)
    width = topk + (steps - 1) * topk**2
    candidates = Candidates(
        torch.zeros(batch, width),
        torch.zeros(batch, width, dtype=torch.int64),
        torch.zeros(batch, 1 + steps * topk, dtype=torch.int64),
        torch.empty(batch, 0, 0),
    )
    ids = torch.zeros(2, batch, topk, dtype=torch.int64)
    with own_branch(topk):
        acceptance.drafting.select_beams(
            steps - 1,
            probs,
            probs.long(),
            Beams(probs[..., 0].contiguous(), ids[0], ids[1], torch.zeros_like(words)),
            candidates=candidates,
            out=Beams(torch.zeros(batch, topk), ids[0], ids[1], words),
        )
    bits = [[int(word) >> at & 1 for word in row for at in range(64)] for row in words[0]]
    for beam, row in enumerate(bits):
        assert [at for at, bit in enumerate(row) if bit] == [s * topk + beam for s in range(steps)]
