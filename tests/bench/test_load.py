"""An engine under load: who is in flight, what clients are told, and texts that are refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from bench.load import __main__ as command
from bench.load import cells, check, client, figures
from bench.step_world import Shape
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.metrics import EngineMetrics
from specattn.engine.request import Request

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "vocab_size": 97,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
CELL = cells.Cell(cells.SMALL, 3, (5, 15), (6, 20), 9)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    target = Qwen2Config(**SIZES, tie_word_embeddings=True)
    shape = Shape("tiny", target, LlamaConfig(**SIZES), 61)
    monkeypatch.setattr(cells, "shape_of", lambda model: shape)
    monkeypatch.setitem(cells.CELLS, "1.5b-32", CELL)


def engine(draft="plain", dtype=torch.float32):
    load = cells.loader(CELL.model, torch.device("cpu"), dtype)
    return cells.engine_of(load, [CELL], cells.DRAFTS[draft])


@pytest.mark.parametrize("by", client.CLIENTS)
def test_so_many_requests_are_in_flight_and_texts_are_those_of_plain_decoding(by):
    made, _ = engine()
    requests = CELL.requests(97, 0)
    found = client.load(made, requests, CELL.at_once, seconds=600, client=by)
    plain = Engine(made.target.model, None, SpecConfig(0, 1, 1, 64, 1))
    told = {text.request.prompt: text for text in found.texts}
    for request in requests:
        text = told[request.prompt]
        assert text.tokens == plain.generate([request])[0].tokens
        assert sum(count for _, count in text.chunks) == len(text.tokens)
        assert 1 + sum(text.accept_lens) == len(text.tokens)
    begins, now = [text.submitted for text in found.texts], CELL.at_once
    ends = sorted(text.chunks[-1][0] for text in found.texts)
    assert begins == sorted(begins)
    assert begins[now - 1] < ends[0], "all clients are there"
    for end, begin in zip(ends, begins[now:], strict=False):
        assert end <= begin, "one has to end before the next one comes"
        if by == "engine":
            told = [at for text in found.texts for at, _ in text.chunks]
            assert not any(end < at < begin for at in told), "which comes at once"
    assert found.after.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert 0 < found.prompts.calls <= CELL.count


def test_no_requests_come_when_time_is_up():
    made, _ = engine()
    for by in ("engine", "asyncio"):
        texts = client.CLIENTS[by](made, CELL.requests(97, 0), CELL.at_once, 0.0)
        assert texts == []


def test_an_engine_that_fails_ends_the_load(monkeypatch):
    made, _ = engine()
    monkeypatch.setattr(made, "step", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        client.load(made, CELL.requests(97, 0), CELL.at_once, seconds=600)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draft", ["plain", "eagle3"])
def test_texts_that_the_target_does_not_write_are_refused(draft, dtype):
    made, lowest = engine(draft, dtype)
    assert lowest == (61 if draft == "eagle3" else 0)
    texts = client.load(made, CELL.requests(97, 0), CELL.at_once, seconds=600).texts[:3]
    found = check.check(made, texts, lowest)
    assert found["checked"] == 3
    assert found["missed"] < check.MOST_MISSED
    for at in (0, sum(texts[1].accept_lens[:-1])):
        right, texts[1].tokens = texts[1].tokens, [*texts[1].tokens]
        texts[1].tokens[at] = (right[at] + 1) % 97
        with pytest.raises(check.WrongTexts):
            check.check(made, texts, lowest)
        texts[1].tokens = right
    # another request's text
    texts[1].tokens, texts[1].accept_lens = texts[2].tokens, texts[2].accept_lens
    with pytest.raises(check.WrongTexts):
        check.check(made, texts, lowest)


def test_forced_steps_gain_what_they_are_told():
    made, _ = engine("eagle3-tree")
    found = client.load(made, CELL.requests(97, 0), CELL.at_once, seconds=600)
    lens = [lens for text in found.texts for lens in text.accept_lens[:-1]]
    assert max(lens) == 4
    assert sum(lens) / len(lens) > 3.5, "trees may be shallower"


def test_figures_of_two_texts():
    """By hand: submitted at 0 and 3, tokens at 1, 2 (three), 4 and at 5, 6."""
    first = client.Text(Request([1]), 10.0)
    second = client.Text(Request([1]), 13.0)
    for text, chunks in ((first, [(11, 1), (12, 3), (14, 1)]), (second, [(15, 1), (16, 1)])):
        for at, count in chunks:
            text.came([7] * count, float(at))
        text.came([], 99.0)
    before = EngineMetrics(prompt_tokens=5, verify_steps=1, accept_lens=(0, 1, 0, 0))
    after = EngineMetrics(prompt_tokens=9, verify_steps=4, accept_lens=(0, 3, 0, 1))
    prompts = client.PromptTime(2, 1.5)
    found = figures.figures(client.Load([first, second], 10.0, prompts, before, after))
    assert (found["texts"], found["tokens"], found["seconds"]) == (2, 7, 6.0)
    assert found["tokens_per_s"] == pytest.approx(7 / 6, abs=1e-4)
    assert found["full_tokens_per_s"] == pytest.approx(4 / 3, abs=1e-4)
    assert (found["ttft_ms"], found["ttft_p99_ms"]) == (1500.0, 2000.0)
    # a third of a second three times, 2 s, 1 s
    assert found["itl_ms"] == pytest.approx(1000 / 3, abs=1e-4)
    assert (found["itl_p99_ms"], found["gap_p99_ms"], found["gap_most_ms"]) == (2000.0,) * 3
    assert (found["prompt_ms"], found["prompt_host"], found["prompt_tokens"]) == (750.0, 0.25, 4)
    assert found["prompt_stream"] is None
    # two more steps of a request that gained 1, and one that gained 3
    assert (found["steps"], found["batch"]) == (3, 1.0)
    assert found["per_step"] == pytest.approx(5 / 3, abs=1e-4)


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": [4, 5, 6]}) + "\n" + json.dumps({"prompt": "def f"}))
    tokenizer = SimpleNamespace(
        chat_template="chat",
        apply_chat_template=lambda chat, **_: [len(turn["content"]) for turn in chat],
    )
    cell, requests = cells.given(path, tokenizer, 32, 2, 3)
    assert [one.prompt for one in requests] == [(4, 5, 6), (5,), (4, 5, 6)]
    assert not any(one.ignore_eos for one in requests)
    assert (cell.at_once, cell.count, cell.longest) == (2, 3, 35)


def test_the_command_measures_the_shipped_pair_and_sets_sides_beside_each_other(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(cells.CELLS, "pair-4", cells.Cell(cells.SHIPPED, 2, (8, 12), (8, 12), 5))
    words = ["--cells", "1.5b-32,pair-4", "--dtype", "float32", "--out", str(tmp_path)]
    command.main([*words, "--rounds", "2", "--label", "old", "--commit", "abc"])
    command.main([*words[2:], "--cells", "pair-4", "--drafts", "lookup,eagle3", "--label", "new"])
    lines = figures.read(tmp_path / "load.jsonl")
    names = [(line["cell"], line["draft"], line["side"], line["round"]) for line in lines]
    assert names == [
        *(("1.5b-32", "plain", "old", at) for at in (0, 1)),
        *(("pair-4", "plain", "old", at) for at in (0, 1)),
        ("pair-4", "lookup", "new", 0),
        ("pair-4", "eagle3", "new", 0),
    ]
    assert {line["equal_alone"] for line in lines} == {command.CHECKED}
    assert lines[0]["machine"]["commit"] == "abc"
    assert lines[-1]["per_step"] > 1.5, "the pair's head is a trained one"
    assert lines[-1]["tokens"] == lines[2]["tokens"], "sides get the same requests"
    capsys.readouterr()
    command.main(["--table", str(tmp_path / "load.jsonl")])
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "first token, ms" in head
    assert [row.split(" | ")[:5] for row in rows][1:3] == [
        ["| pair-4", "plain", "engine", "old", "2"],
        ["| pair-4", "lookup", "engine", "new", "1"],
    ]


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--cells", "2b"])
    assert "known: first-token-1.5b" in capsys.readouterr().err
