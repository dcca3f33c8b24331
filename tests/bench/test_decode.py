"""The shipped pair in every way there is to run it, and what its record says."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import decode
from bench.suite import decode as report
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from tests.tiny import TinyDraft, TinyTarget, dense_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PROMPTS = [[5, 9, 31, 2, 8], [7, 7, 3, 30, 12]]


class Generator(torch.nn.Module):
    """What transformers' `generate` is called as, over a tiny target."""

    def __init__(self, target: TinyTarget) -> None:
        super().__init__()
        self.target, self.device = target, torch.device(DEVICE)
        self.generation_config = SimpleNamespace(eos_token_id=0)

    def generate(self, ids, *, attention_mask, max_new_tokens, do_sample, **drawing):
        assert attention_mask.shape == ids.shape
        assert bool(drawing) == do_sample
        assert self.generation_config.eos_token_id is None, "texts go on past their ends"
        new = [dense_greedy(self.target, row, max_new_tokens) for row in ids.tolist()]
        return torch.cat([ids, torch.tensor(new, device=ids.device)], 1)


def test_every_way_writes_the_same_and_is_recorded(tmp_path, monkeypatch, capsys):
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    models[0].tokenizer = None
    monkeypatch.setattr(decode, "pair", lambda *_: models)
    monkeypatch.setattr(decode, "plain_target", lambda *_: Generator(models[0]))
    monkeypatch.setattr(decode, "held_out_prompts", lambda count, _: PROMPTS[:count])
    monkeypatch.setattr(decode, "SHORT", 3)
    monkeypatch.setattr(decode, "CONTEXT", 64)
    out = tmp_path / report.RECORD
    options = ["--batch", "2", "--new", "5", "--repeats", "2", "--dtype", "float32"]
    options += ["--settings", report.PLAIN, "chain of 5", "--ways", *report.WAYS]
    monkeypatch.setattr(sys, "argv", ["decode", *options, "--out", str(out)])
    decode.main()
    found = json.loads(out.read_text())
    greedy, drawn = found["cells"]
    ways = {(line["setting"], line["way"]): line for line in greedy["lines"]}
    assert [line["setting"] for line in drawn["lines"]] == [setting for setting, _ in ways]
    assert len(ways) == 8
    for key, line in ways.items():
        assert line["equal"] == (None if key == (report.PLAIN, report.ONE) else 2), key
        eager = key[1] == report.EAGER
        assert line["new_tokens"] == (3 if eager else 5)
        assert len(line["runs"]) == 2
    assert [line["equal"] for line in drawn["lines"]] == [None, 2, 2, None, 2, 2, 2, None]
    assert "| 2 | plain | 1.00 |" in report.shown(tmp_path)
    assert "Of the greedy texts, 14 of 14 are" in report.shown(tmp_path)
    assert "chain of 5, way three graphs, new_tokens 5" in capsys.readouterr().out


def test_first_tokens_are_not_counted_and_slots_come_back():
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    engine = Engine(*models, SpecConfig(5, max_context_len=64, max_num_reqs=2), buckets=[2])
    run = decode.decode(
        engine, [Request(p, n, ignore_eos=True) for p, n in zip(PROMPTS, (4, 30), strict=True)]
    )
    assert [len(tokens) for tokens in run.tokens] == [4, 30]
    assert run.tokens_per_second == pytest.approx(32 / run.seconds)
    assert engine.table.num_free_rows == 2


def test_other_texts_fail_a_float32_run_once_they_are_recorded(tmp_path, monkeypatch):
    line = {"setting": "chain", "way": report.ONE, "equal": 1}
    theirs = {"setting": report.TRANSFORMERS, "way": report.EAGER, "equal": 0}
    made = {"name": "batch 2", "batch": 2, "temperature": 0.0, "lines": [line, theirs]}
    monkeypatch.setattr(decode, "pair", lambda *_: (SimpleNamespace(tokenizer=None),))
    monkeypatch.setattr(decode, "plain_target", lambda *_: Generator(None))
    monkeypatch.setattr(decode, "held_out_prompts", lambda count, _: PROMPTS[:count])
    monkeypatch.setattr(decode, "cell", lambda *_: made)
    out = tmp_path / "found.json"
    argv = ["decode", "--batch", "2", "--out", str(out), "--dtype"]
    monkeypatch.setattr(sys, "argv", [*argv, "bfloat16"])
    decode.main()
    monkeypatch.setattr(sys, "argv", [*argv, "float32"])
    with pytest.raises(AssertionError, match=r"texts: \['batch 2, chain, one graph'"):
        decode.main()
    assert len(json.loads(out.read_text())["cells"]) == 2


RECORD = {"models": "fused", "dtype": "bfloat16"}


def cell(temperature: float, one: list[float], three: list[float]) -> dict:
    plain = {
        "setting": report.PLAIN,
        "way": report.ONE,
        "tokens_per_second": 500.0,
        "runs": [500.0],
        "equal": None,
        "accepted_per_step": 1.0,
    }
    lines = [
        plain
        | {
            "setting": "chain of 5",
            "way": way,
            "tokens_per_second": sorted(runs)[1],
            "runs": runs,
            "equal": 3,
            "accepted_per_step": 2.5,
        }
        for way, runs in ((report.ONE, one), (report.THREE, three))
    ]
    theirs = {
        "setting": report.TRANSFORMERS,
        "way": report.EAGER,
        "tokens_per_second": 100.0,
        "runs": [100.0],
        "equal": 4,
    }
    return {
        "name": f"batch 4 at {temperature}",
        "batch": 4,
        "temperature": temperature,
        "lines": [plain, *lines, theirs],
    }


def test_one_graph_is_held_to_three(tmp_path):
    cells = [
        cell(0.0, [1100.0, 1200.0, 900.0], [1000.0, 1200.0, 900.0]),
        cell(1.0, [980.0, 990.0, 1000.0], [1000.0, 1000.0, 1000.0]),
    ]
    (tmp_path / report.RECORD).write_text(json.dumps(RECORD | {"cells": cells}))
    text = report.shown(tmp_path)
    assert "| 4 | chain of 5 | 2.50 | 1,100 | 1,000 | - | - | 1.10x | 2.20x | 11.00x |" in text
    assert "| 990 | 1,000 | - | - | 0.99x | 1.98x | 9.90x |" in text
    assert text.endswith("Of the greedy texts, 10 of 12 are plain decoding's.")
