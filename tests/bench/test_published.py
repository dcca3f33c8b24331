"""What `bench.published` says of texts, told apart from what an engine gives."""

from __future__ import annotations

import argparse
import gzip
import json

from bench import published
from specattn.engine.request import RequestOutput


def test_departures_are_counted_with_the_gap_there():
    plain = [RequestOutput([1, 2, 3]), RequestOutput([4, 5, 6]), RequestOutput([7, 8])]
    found = [RequestOutput([1, 2, 3]), RequestOutput([4, 9, 6]), RequestOutput([8, 8])]
    gaps = [[9.0] * 3, [9.0, 0.03125, 9.0], [0.5, 9.0]]
    assert published.departures(plain, found, gaps) == {
        "equal_to_plain": 1,
        "gaps_at_departures": [0.0312, 0.5],
    }


def test_every_line_names_what_it_measures():
    args = argparse.Namespace(temperatures=[0.0, 0.8], batches=[8, 1], kinds=["lookup", "model"])
    lines = list(published.settings(args))
    named = [json.dumps(line.named) for line in lines]
    assert len(set(named)) == len(lines)
    assert lines[0] == published.Setting("plain", ((0, 1, 1),), 8, 0.0)
    assert {(line.temperature, line.batch) for line in lines} == {
        (0.0, 8),
        (0.0, 1),
        (0.8, 8),
        (0.8, 1),
    }


def test_problems_are_asked_as_chats(tmp_path):
    class Tokenizer:
        def apply_chat_template(self, chat, **options):
            assert options["add_generation_prompt"]
            return [len(turn["content"]) for turn in chat]

    path = tmp_path / "problems.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for prompt in ("def f():", "def longer():"):
            file.write(json.dumps({"prompt": prompt}) + "\n")
    short, long = published.problems(path, Tokenizer())
    assert long[0] - short[0] == len("def longer():") - len("def f():")
