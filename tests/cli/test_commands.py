"""The other commands: graphs, inspect, version and help."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import version

import pytest
import transformers

from specattn.cli import graphs, running
from tests.cli.command import COUNT, ON_CPU, PROMPT, plain_tokens, refused, run, tokenizer


def test_graphs_says_what_capturing_takes():
    options = ["--steps", "2", "--buckets", "1,3", "--sampled", *ON_CPU]
    result = run("graphs", *options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["device"], found["recorded"], found["nbytes"]) == ("cpu", 0, 0)
    assert [(one["part"], one["bucket"]) for one in found["captures"]] == [
        ("step", 3),
        ("step", 1),
        ("step (sampled)", 3),
        ("step (sampled)", 1),
    ]
    assert 0 < found["seconds"] < found["seconds_with_buffers"]
    table = run("graphs", *options, "--cudagraph", "piecewise", "--tree", "best_first").stdout
    assert re.search(r"2 +target_verify +3 +\d+ ms +0.0 MiB +no +[0-9a-f]{12}", table)
    assert "no graphs were captured on cpu" in table


def test_graphs_says_what_prompts_take_apart(monkeypatch, capsys):
    """As a GPU captures them: behind the steps, by buckets of tokens."""
    made = running.Setup.engine

    def with_prompts(setup, config):
        options = setup.options | {"prompt_buckets": (8, 16)}
        return made(replace(setup, options=options), config)

    monkeypatch.setattr(running.Setup, "engine", with_prompts)
    options = ["--steps", "2", "--buckets", "2", "--sampled", *ON_CPU]
    found = json.loads(run("graphs", *options, "--json").stdout)
    named = [(one["part"], one["bucket"]) for one in found["captures"]]
    assert named[:2] == [("step", 2), ("step (sampled)", 2)]
    assert sorted(named[2:]) == [
        ("first tokens", 8),
        ("first tokens (sampled)", 8),
        *(("prompts", size) for size in (8, 16)),
        *(("prompts' drafts", size) for size in (8, 16)),
    ]
    seconds = [one["seconds"] for one in found["captures"]]
    assert found["prompts"]["seconds"] == pytest.approx(sum(seconds[2:]))
    for at, one in enumerate(found["captures"]):
        one |= {"recorded": True, "nbytes": (2 + (at > 1)) << 20}
    found |= {"recorded": 8, "nbytes": 22 << 20}
    found["prompts"] |= {"recorded": 6, "nbytes": 18 << 20}
    graphs.show(found)
    *_, steps, prompts = capsys.readouterr().out.splitlines()
    assert steps.startswith("8 graphs on cpu in ")
    assert re.fullmatch(r"of these 6 of prompts in .* s, 18.0 MiB more than steps take", prompts)


def test_help_says_what_memory_graphs_counts():
    shown = re.sub(r"\s+", " ", run("graphs", "--help").stdout)
    assert "The column memory is what the pool that all graphs share grew by." in shown


@pytest.mark.parametrize("sizes", ["", "1,x", "0", "2000"])
def test_graphs_refuses_senseless_buckets(sizes):
    line = f"--buckets: must be batch sizes 1..1024 with commas, got {sizes!r}"
    assert refused("graphs", "--buckets", sizes) == line


def test_inspect_shows_tree_mask_and_slots():
    shape = "--topk 2 --steps 3 --draft-tokens 7 --page-size 4"
    result = run("inspect", *ON_CPU, PROMPT, *shape.split())
    assert result.exit_code == 0, result.output
    tree, mask, slots, attention = result.stdout.split("\n\n")
    used = len(tokenizer()(PROMPT).input_ids)
    first = tokenizer().decode(plain_tokens(PROMPT, COUNT)[:1])
    assert tree.splitlines()[1] == f"0 {first!r} @{used}  *"
    assert len(tree.splitlines()) == 1 + 7 + 1
    gained = int(re.search(r"accepted (\d) of 6 drafts", tree)[1])
    assert gained == tree.count("*") - 2  # the header's and the root's
    path = re.findall(r"\d+ ('.*?') @.*\*$", tree, re.MULTILINE)
    texts = [repr(tokenizer().decode([t])) for t in plain_tokens(PROMPT, COUNT)]
    assert path == texts[: gained + 1]
    assert f"bonus {texts[gained + 1]}" in tree
    assert f"  0  0..{used - 1}" in mask
    assert f"row 1: {used} committed in slots 4..{3 + used}" in slots
    assert "verify, nodes 0..6" in slots
    served = dict(re.findall(r"^(.+?)  +(\w+)$", attention, re.MULTILINE))
    assert set(served.values()) == {"torch_native"}
    assert {"prompts", "target verify", "draft decode", "draft extend"} <= served.keys()


def test_inspect_refuses_plain_decoding():
    line = "--steps: must be at least 1: plain decoding has no tree"
    assert refused("inspect", *ON_CPU, PROMPT, "--steps", "0") == line


def test_version_help_and_unknown_commands():
    shown = run("--version").stdout.splitlines()
    assert re.fullmatch(r"specattn \d+\.\d+\.\d+", shown[0])
    assert f"torch {version('torch')}" in shown
    assert f"transformers {transformers.__version__}" in shown
    (on_cpu,) = (line for line in shown if line.startswith("backends on cpu: "))
    assert "torch_native" in on_cpu.removeprefix("backends on cpu: ").split(", ")
    for args in ((), ("--help",), ("-h",)):
        result = run(*args)
        assert result.exit_code == 0
        assert all(name in result.stdout for name in ("generate", "backends", "inspect"))
    assert refused("genrate").startswith("no such command 'genrate'")
