"""The shipped pair in every way there is to run it, and what its record says."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import decode
from bench.suite import decode as report
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
        assert self.generation_config.eos_token_id is None
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
    assert found["slower_than_three_graphs"] == report.slower(found["cells"])
    assert "| 2 | plain | 1.00 |" in report.shown(tmp_path)
    assert "one graph slower than three: " in capsys.readouterr().out


def test_first_tokens_are_not_counted_and_slots_come_back(monkeypatch):
    monkeypatch.setattr(decode, "CONTEXT", 64)
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    batch = decode.Batch(models, PROMPTS, ["chain of 5"], [report.ONE], Generator(models[0]), 4)
    engine = batch._engine(batch.contestants[0.0][0])
    run = decode.decode(
        engine, [Request(p, n, ignore_eos=True) for p, n in zip(PROMPTS, (4, 30), strict=True)]
    )
    assert [len(tokens) for tokens in run.tokens] == [4, 30]
    assert run.tokens_per_second == pytest.approx(32 / run.seconds)
    assert engine.table.num_free_rows == 2


def test_transformers_goes_on_past_ends():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            eos_token_id=3,
        )
    )
    first = decode.Transformers(model).decode(PROMPTS, 1, 0.0).tokens[0][0]
    model.generation_config.eos_token_id = first
    for temperature in (0.0, 1.0):
        run = decode.Transformers(model).decode(PROMPTS, 6, temperature)
        assert [len(tokens) for tokens in run.tokens] == [6, 6]


def test_other_tokens_are_no_result():
    run = decode.Run([[1, 2, 4]], 1.0)
    contestant = decode.Contestant("chain", report.ONE, wanted=[[1, 2, 3]])
    assert contestant.compare(run) is run
    assert contestant.equal == 0
    contestant.exact = True
    with pytest.raises(ArithmeticError, match="chain, one graph: 1 of 1 texts"):
        contestant.compare(run)


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
    assert report.slower(cells) == ["batch 4 at 1.0, chain of 5: 0.990x"]
    text = report.shown(tmp_path)
    assert "| 4 | chain of 5 | 2.50 | 1,100 | 1,000 | - | - | 1.10x | 2.20x | 11.00x |" in text
    assert "| 990 | 1,000 | - | - | 0.99x | 1.98x | 9.90x |" in text
    assert "1.044x as fast as three (geomean of 2 cells), and slower in 1 of them: batch 4" in text
    assert "batch 4 at 1.0, chain of 5: 0.990x. Of the greedy texts, 10 of 12" in text
    (tmp_path / report.RECORD).write_text(json.dumps(RECORD | {"cells": cells[:1]}))
    assert not report.slower(cells[:1])
    text = report.shown(tmp_path)
    assert "and slower in 0 of them. Of" in text
