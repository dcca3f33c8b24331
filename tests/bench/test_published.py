"""What `bench.published` measures, with the shipped models, and what it says of texts."""

from __future__ import annotations

import argparse
import gzip
import json
import runpy
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import published
from bench.lines import Setting, Transformers
from bench.shipped import pair
from specattn.models.hub import PAIR, PAIR_HEADS

ROOT = Path(__file__).parent.parent.parent
MAKE = runpy.run_path(str(ROOT / "docs" / "make_published.py"))
BATCH = ("--batches", "2", "--temperatures", "0")
PROMPTS = [[5, 9, 31, 2, 8], [7, 7, 3, 30, 12, 7, 7]]


def test_departures_are_counted_with_the_gap_there():
    plain = [[1, 2, 3], [4, 5, 6], [7, 8]]
    found = [[1, 2, 3], [4, 9, 6], [8, 8]]
    gaps = [[9.0] * 3, [9.0, 0.03125, 9.0], [0.5, 9.0]]
    assert published.departures(plain, found, gaps) == {
        "equal_to_plain": 1,
        "gaps_at_departures": [0.0312, 0.5],
    }


def test_every_line_has_a_name_of_its_own():
    """And its shapes are trees."""
    names = [
        [(one.draft, one.tree) for one in published.trees(kind, 15) if one.configs(256, 2)]
        for kind in (published.PLAIN, *published.KINDS)
    ]
    assert all(len(set(some)) == len(some) > 1 for some in names[1:])
    assert names[0] == [("plain", "no tree")]
    assert ("model", "adaptive") in names[published.KINDS.index("model") + 1]


def test_problems_are_asked_as_chats(tmp_path):
    class Tokenizer:
        chat_template = "{{ messages }}"

        def __call__(self, text):
            return {"input_ids": [len(text)]}

        def apply_chat_template(self, chat, **options):
            assert options["add_generation_prompt"]
            return [len(turn["content"]) for turn in chat]

    path = tmp_path / "problems.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for prompt in ("def f():", "def longer():"):
            file.write(json.dumps({"prompt": prompt}) + "\n")
    short, long = published.problems(path, Tokenizer())
    assert long[0] - short[0] == len("def longer():") - len("def f():")
    Tokenizer.chat_template = None
    assert published.problems(path, Tokenizer()) == [[len("def f():")], [len("def longer():")]]


@pytest.fixture
def command(monkeypatch, tmp_path):
    monkeypatch.setattr(published, "problems", lambda path, tokenizer: PROMPTS)
    monkeypatch.setattr(published, "CHAINS", ((3, 1, 4),))
    monkeypatch.setattr(published, "NODES", (5, 20))
    out = tmp_path / "record.json"
    target = tmp_path / "Pair-4.6M"
    target.symlink_to(PAIR / "target")
    argv = ["published", "--target", target, "--problems", "none", "--out", out]
    argv += ["--dtype", "float32", "--device", "cpu", "--new", "7"]

    def run(*words):
        monkeypatch.setattr("sys.argv", [str(word) for word in (*argv, *words)])
        published.main()
        return json.loads(out.read_text())

    return run


def test_drafts_and_transformers_write_the_same(command, monkeypatch):
    heads = ["--draft", PAIR / "target", "--dflash", PAIR_HEADS["dflash"]]
    kinds = ["--kinds", "lookup+model", "dflash"]
    record = command(*heads, *kinds, *BATCH)
    assert (record["target"], record["model"], record["eagle3"]) == ("Pair-4.6M", "target", None)
    lines = {(line["by"], line["draft"], line["tree"]): line for line in record["results"]}
    assert [(draft, tree) for by, draft, tree in lines if by == published.OURS] == [
        ("plain", "no tree"),
        ("lookup+model", "chain of 3"),
        ("lookup+model", "adaptive"),
        ("dflash", "chain of 15"),
        ("dflash", "best first, 5 nodes"),
        ("dflash", "best first, 20 nodes"),
    ]
    sides = {(by, draft) for by, draft, _ in lines if by != published.OURS}
    assert sides == {
        (by, draft) for by in ("transformers", "custom_generate") for draft in ("plain", "model")
    }
    for name, line in lines.items():
        assert (line["texts"], line["tokens"], line["equal_to_plain"]) == (2, 14, 2), name
        assert line["tokens_per_second"] == pytest.approx(14 / line["seconds"], rel=0.02)
    for line in (line for name, line in lines.items() if name[0] == published.OURS):
        # the first token of a text comes with its prompt
        assert sum(n * count for n, count in enumerate(line["steps_by_tokens"], 1)) == 12
        assert line["accepted_per_step"] == pytest.approx(12 / line["steps"], abs=1e-4)
    assert sum(lines["specattn", "lookup+model", "adaptive"]["steps_by_depth"].values()) > 0
    assert lines["specattn", "lookup+model", "chain of 3"]["accepted_per_step"] > 2

    monkeypatch.setattr(published, "run", None)
    again = command(*heads, *kinds, *BATCH, "--no-transformers")
    assert again == record, "lines that are there are kept"


def test_every_way_to_run_steps_writes_the_same(command, monkeypatch):
    shapes = {"plain": (0, 1, 1), "lookup": (3, 1, 4)}
    monkeypatch.setattr(published, "trees", lambda kind, _: [Setting(kind, shapes[kind])])
    ways = ["--kinds", "lookup", "--no-transformers", "--ways", *published.WAYS]
    lines = command(*ways, *BATCH)["results"]
    assert len(lines) == 2 * len(published.WAYS)
    assert {line["by"] for line in lines} == {published.named(way) for way in published.WAYS}
    assert {line["equal_to_plain"] for line in lines} == {2}
    args = argparse.Namespace(kinds=[], temperatures=[0.0], batches=[1], ways=published.WAYS)
    alone = [way for *_, way in published.settings(args, None)]
    assert alone == ["default", "piecewise", "eager"], "one request has no halves"


def test_a_kind_needs_its_head(command, capsys):
    with pytest.raises(SystemExit):
        command("--kinds", "lookup+model")
    assert "--kinds model needs --draft" in capsys.readouterr().err


def test_transformers_ends_texts_where_it_is_told_to():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, eos_token_id=3)
    model = LlamaForCausalLM(config)
    text = Transformers(model).text([5, 9], 6)
    model.generation_config.eos_token_id = text[0]
    assert Transformers(model).text([5, 9], 6) == text
    end = max(at for at, token in enumerate(text) if token not in text[:at])
    assert Transformers(model, {text[end]}).text([5, 9], 6) == text[: end + 1]


def test_loaded_models_give_what_their_heads_read():
    for kind, states in (("none", 0), ("eagle3", 3)):
        target, draft = pair("cpu", torch.float32, kind=kind)
        assert (draft is None) == (not states)
        assert len(target.features) == states


def test_the_page_is_what_the_generator_writes():
    """Run ``python docs/make_published.py`` after a record changed."""
    assert (ROOT / "docs" / "published.md").read_text() == MAKE["page"]()


def test_the_page_says_what_a_record_says():
    def line(draft, tree, temperature, batch, speed, gained, by=published.OURS):
        made = {"by": by, "draft": draft, "tree": tree, "temperature": temperature, "batch": batch}
        steps = sum(gained)
        tokens = sum(n * count for n, count in enumerate(gained, 1))
        made |= {"texts": 10, "tokens_per_second": speed, "steps_by_tokens": gained}
        made |= {"steps": steps, "accepted_per_step": tokens / steps}
        return made | {"equal_to_plain": 9, "gaps_at_departures": [0.03125]}

    lines = [
        line("plain", "no tree", 0.0, 1, 50.0, [4]),
        line("lookup+model", "chain of 3", 0.0, 1, 125.0, [1, 0, 3]),
        line("plain", "no tree", 0.8, 8, 200.0, [4]),
        line("lookup+model", "chain of 3", 0.8, 8, 300.0, [1, 1]),
        line("lookup+model", "chain of 3", 0.0, 8, 400.0, [1, 1, 2]),
        line("model", "", 0.0, 1, 75.0, [1], by=published.THEIRS),
    ]
    record = {"device": "A GPU", "torch": "2.11.0+cu130", "dtype": "bfloat16", "new": 256}
    record |= {"target": "Big", "model": "Small", "eagle3": None, "dflash": None}
    text = MAKE["section"](record | {"results": lines})
    assert (
        "A GPU, torch 2.11.0, bfloat16; 10 problems, at most 256 tokens each; a model: Small."
        in text
    )
    assert (
        "Of 20 greedy texts 18 are plain decoding's, the others depart where the gap is 0.031"
        in text
    )
    assert "| lookup, else a model | chain of 3 | 2.25 | 1.50 | 75% | 50% | - | - | - |" in text
    assert "| lookup, else a model | chain of 3 | 125, 2.50x | 400 | 300, 1.50x |" in text
    assert "| transformers | a model | 75.0 | 9 of 10 |" in text
    assert "Tokens per second" not in MAKE["section"](record | {"device": "CPU", "results": lines})
