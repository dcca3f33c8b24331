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
        "largest_gap_at": (2, 0),
    }
    assert "largest_gap_at" not in published.departures(plain, plain, gaps)


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
    steps = lines["specattn", "lookup+model", "adaptive"]["steps_by_tree"]
    assert {*steps} == {"chain of 5", "chain of 3", "no tree"}
    assert sum(steps.values()) > 0
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


def test_problems_are_drawn_more_than_once(command, monkeypatch):
    asked = []
    make = Setting.requests

    def requests(*args):
        asked.append(made := make(*args))
        return made

    monkeypatch.setattr(Setting, "requests", requests)
    monkeypatch.setattr(published, "PROBLEMS", {1: 1})
    shapes = {"plain": [Setting("plain", (0, 1, 1))], "lookup": []}
    monkeypatch.setattr(published, "trees", lambda kind, _: shapes[kind])
    words = ["--no-transformers", "--batches", "2", "1", "--temperatures", "0", "0.8"]
    lines = command(*words)["results"]
    texts = [line["texts"] for line in lines]
    assert texts == [2, 2 * published.DRAWS, 1, published.DRAWS]
    record = MAKE["Measured"](Path(), {"new": 7} | MACHINE | {"results": lines})
    told = "; 2 problems (1 with 1 at once), 2 texts of each where they are drawn, at most 7"
    assert told in MAKE["measured"](record)
    for some in asked:
        assert len({one.sampling.seed for one in some}) == len(some)


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


def test_the_page_and_its_pictures_are_what_the_generator_writes():
    """Run ``python docs/make_published.py`` after a record changed."""
    docs = ROOT / "docs"
    assert (docs / "published.md").read_text() == MAKE["page"]()
    made = MAKE["pictures"](MAKE["read"](MAKE["RESULTS"]))
    # how a picture looks depends on matplotlib, so files are not compared
    there = {path.name: MAKE["stamp"](path) for path in (docs / "img").glob("published_*")}
    assert there == {name: MAKE["digest"](shown) for name, (_, shown) in made.items()}


def line(draft, tree, temperature, batch, speed, gained, by=published.OURS, **more):
    """Of ten texts, one of which departs; ``gained`` counts steps by their tokens."""
    made = {"by": by, "draft": draft, "tree": tree, "temperature": temperature, "batch": batch}
    steps = sum(gained)
    tokens = sum(n * count for n, count in enumerate(gained, 1))
    made |= {"texts": 10, "tokens_per_second": speed, "steps_by_tokens": gained}
    made |= {"steps": steps, "accepted_per_step": tokens / steps}
    return made | {"equal_to_plain": 9, "gaps_at_departures": [0.03125]} | more


CHAIN, TREE, WIDE = "chain of 3", "topk 4, 16 nodes, 5 steps", "topk 4, 32 nodes, 15 steps"
LINES = [
    line("plain", "no tree", 0.0, 1, 50.0, [4]),
    line("plain", "no tree", 0.0, 8, 200.0, [4], equal_to_plain=10, gaps_at_departures=[]),
    line("plain", "no tree", 0.8, 8, 200.0, [4]),
    line("model", CHAIN, 0.0, 1, 125.0, [1, 0, 3]),
    line("model", CHAIN, 0.0, 8, 300.0, [1, 1, 2]),
    line("model", CHAIN, 0.8, 8, 100.0, [3, 1]),
    line("model", TREE, 0.0, 1, 130.0, [1, 0, 0, 3]),
    line("model", TREE, 0.0, 8, 250.0, [0, 1, 1, 2]),
    line("model", "adaptive", 0.0, 8, 330.0, [1], steps_by_tree={WIDE: 1, CHAIN: 2, "no tree": 1}),
    line("lookup", CHAIN, 0.0, 8, 240.0, [3, 0, 1]),
    line("lookup", WIDE, 0.0, 8, 160.0, [2, 1, 0, 1]),
    line("plain", "", 0.0, 1, 25.0, [1], by=published.THEIRS),
    line("model", "", 0.0, 1, 75.0, [1], by=published.THEIRS),
]
PAIR_LINES = [
    line("lookup", CHAIN, 0.0, 8, 1.0, [2, 1, 1]),
    line("lookup", WIDE, 0.0, 8, 1.0, [3, 1]),
    line("eagle3", CHAIN, 0.0, 8, 1.0, [1, 3]),
]
HEAD = {
    "arguments": {
        "command": "eagle3",
        "target": "/models/qwen15",
        "texts": "some/texts",
        "out": "heads/first",
        "device": "cuda",
        "dtype": "torch.bfloat16",
        "steps": "None",
        "states": "[3, 7]",
        "compile": "True",
    },
    "machine": {"device": "A GPU"},
    "texts": {
        "target": "qwen15",
        "seed": 0,
        "length": 640,
        "part": 2048,
        "temperatures": [0.0, 0.8],
        "chats": 0.8,
        "left_out": ["HumanEval.jsonl.gz"],
        "parts": [{"texts": 9, "new_tokens": 750_000, "left_out": 0, "seconds": 45.0}] * 2,
    },
    "parameters": 60_000_000,
    "steps": 2500,
    "held_out": [
        {"step": 0, "seconds": 0.1, "loss": 10.25, "agreement": [0.0, 0.0, 0.0]},
        {"step": 2500, "seconds": 480.0, "loss": 1.5, "agreement": [0.8, 0.7, 0.5]},
    ],
    "acceptance": {"drafted": 5, "tokens_per_step": 3.25},
}


MACHINE = {"device": "A GPU", "torch": "2.11.0+cu130", "dtype": "bfloat16"}


def write(folder, name, lines, **more):
    record = MACHINE | {
        "new": 256,
        "target": "qwen15",
        "model": "qwen05",
        "eagle3": None,
        "dflash": None,
    }
    record |= {"problems": 164} | more | {"results": lines}
    (folder / f"published_{name}.json").write_text(json.dumps(record))


def unbroken(text):
    return text.replace(" \\\n   ", "")


@pytest.fixture
def results(tmp_path):
    write(tmp_path, "qwen15", LINES)
    exact = [line("lookup", CHAIN, 0.0, 8, 9.0, [1], equal_to_plain=10, gaps_at_departures=[])]
    write(tmp_path, "qwen15_exact", exact, dtype="float32")
    (tmp_path / "acceptance.json").write_text(json.dumps({"results": PAIR_LINES}))
    (tmp_path / "heads_first.json").write_text(json.dumps(HEAD))
    return tmp_path


def test_the_page_ranks_settings(results):
    text = MAKE["page"](results)
    head = "| draft | 1 at once | 8 at once | tokens per step | of the shipped pair |"
    assert f"Greedy:\n\n{head}" in text
    assert (
        f"| a model | 1. {TREE}: 130, 2.60x | 1. {CHAIN}: 300, 1.50x | 1. {TREE}: 3.25 | - |"
        in text
    )
    assert (
        f"| lookup | - | 2. {CHAIN}: 240, 1.20x | 2. {WIDE}: 2.00 | 1. {CHAIN}: 1.75 |" in text
    ), "the shipped pair's EAGLE-3 has no place: this target has none"
    assert "| none | 2. 50, 1.00x | 3. 200, 1.00x | - | - |" in text
    assert (
        "win over their chains: 1 of 1 (1 at once), 0 of 2 (8 at once), "
        "2 of 2 (tokens per step), 0 of 1 (of the shipped pair). "
        "Of 1 pairs of settings that both models ran, 0 rank the same way"
    ) in text
    assert f"1.50x: a model, {CHAIN}; adaptive 1.65x |" in text
    drawn = text.split("\nTemperature 0.8:\n")[1]
    assert f"| none | 1. 200, 1.00x | - |\n| a model | 2. {CHAIN}: 100, 0.50x |" in drawn


def test_the_page_says_what_a_record_says(results):
    text = MAKE["page"](results)
    assert (
        "A GPU, torch 2.11.0, bfloat16; 10 problems, at most 256 tokens each; "
        "a model: Qwen2.5-Coder-0.5B-Instruct. Of 70 greedy texts of drafts 63 are plain "
        "decoding's, and 19 of 20 of plain decoding's own in other batches; the others depart "
        "where the gap is 0.031 at most, 0.031 at the median."
    ) in text
    assert "float32; 10 problems, at most 256 tokens each: Of 10 greedy texts of drafts 10" in text
    assert f"| a model | {CHAIN} | 2.25 | 1.25 | 75% | 50% | - | - | - |" in text
    assert f"| a model | {CHAIN} | 125, 2.50x | 300, 1.50x | - | 100, 0.50x |" in text
    assert f"| a model | greedy | - | {WIDE}: 25%; {CHAIN}: 50%; no tree: 25%; 1.10x |" in text
    assert "| transformers | a model | 75.0 | 3.00x | 9 of 10 |" in text
    assert "`cc324af070c2ecbf`" in text
    assert (
        "python -m bench.published --target qwen15 --draft qwen05 \\\n"
        "    --problems HumanEval.jsonl.gz --kinds model lookup --batches 8 1 \\\n"
        "    --out bench/results/published_qwen15.json\n"
    ) in text


def test_the_page_says_how_heads_were_trained(results):
    text = MAKE["page"](results)
    assert (
        "| EAGLE-3 for Qwen2.5-Coder-1.5B-Instruct | 60.0M | 1.5M | 8.0, A GPU | 2,500 "
        "| 10.25 to 1.50 | 80%, 70%, 50% | 3.25 of 6 |"
    ) in text
    assert "--out texts --minutes 1.5 --seed 0" in unbroken(text)
    assert (
        "train_heads eagle3 --target qwen15 --texts texts --out first --states 3 7 --compile\n"
        in unbroken(text)
    )


@pytest.mark.parametrize(
    "kept",
    [
        lambda one: one["draft"] != "plain",
        lambda one: one["draft"] != "model",
        lambda one: one["temperature"],
        lambda one: one["batch"] == 1,
        lambda one: one["tree"] == "adaptive",
        lambda one: one["by"] == published.OURS,
    ],
    ids=["no plain", "no model", "drawn", "one batch", "adaptive", "no transformers"],
)
def test_records_may_lack_settings(tmp_path, kept):
    lines = [one for one in LINES if kept(one)]
    write(tmp_path, "qwen15", lines)
    text, made = MAKE["page"](tmp_path), MAKE["pictures"](MAKE["read"](tmp_path))
    for one in lines:
        shown = f"| {MAKE['named'](one['draft'])} | {one['tree']} |"
        assert one["by"] != published.OURS or shown in text
    speed = "published_qwen15_speed.svg"
    compared = any(one["draft"] == "plain" and one["by"] == published.OURS for one in lines)
    assert (speed in made) == (f"img/{speed}" in text)
    assert compared or speed not in made
    assert ("Inside transformers" in text) == any(one["by"] == published.THEIRS for one in lines)
    write(tmp_path, "qwen15", lines, device="CPU")
    assert "tokens per second" not in MAKE["page"](tmp_path), "which others share"


def test_pictures_are_the_same_for_the_same_records(results, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra docs has it")
    made = MAKE["pictures"](MAKE["read"](results))
    assert list(made) == ["published_qwen15_depth.svg", "published_qwen15_speed.svg"]
    shares = made["published_qwen15_depth.svg"][1]["greedy"]
    assert shares == {f"model: {TREE}": [1.0, 0.75, 0.5], f"lookup: {WIDE}": [0.5, 0.25, 0.25]}
    for name, (kind, shown) in made.items():
        texts = []
        for folder in ("one", "two"):
            path = tmp_path / folder / name
            MAKE["draw"](kind, shown, path)
            texts.append(path.read_text())
        assert texts[0] == texts[1]
        assert MAKE["stamp"](path) == MAKE["digest"](shown)
        assert f"a model, {TREE}" in texts[0]
        assert "date>" not in texts[0]
