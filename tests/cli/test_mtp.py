"""A target's own MTP layer on the command line."""

from __future__ import annotations

import json
import shutil

import pytest

from specattn.cli import loading
from tests.cli.command import (
    ON_CPU,
    PAIR,
    PROMPT,
    generate,
    load_models,
    refused,
    run,
    tokenizer,
)
from tests.models.mtp_models import Mtp

SIZE = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with an MTP layer, and the same one without."""
    vocab = len(tokenizer())
    mtp = Mtp.of("deepseek_v3", share=0.3, vocab_size=vocab, eos_token_id=None)
    made = [tmp_path_factory.mktemp(name) for name in ("with", "without")]
    mtp.store(made[0])
    mtp.store(made[1], alone=True)
    for folder in made:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PAIR / "target" / name, folder)
    return [str(folder) for folder in made]


def report(*args: str) -> tuple[dict, str]:
    found = generate("--json", *args, PROMPT, count=SIZE)
    return json.loads(found.stdout), found.stderr


@pytest.mark.parametrize("options", [[], ["--topk", "3"], ["--tree", "best_first"]], ids=" ".join)
def test_it_drafts_where_no_draft_is_named(folders, options, monkeypatch):
    # what is loaded once tells of it once
    monkeypatch.setattr(loading, "load_models", load_models)
    target = ["--target", folders[0], "--ignore-eos"]
    plain, told = report(*target, "--draft-kind", "none")
    assert told == ""
    found, told = report(*target, *options)
    assert told == f"specattn: {folders[0]} drafts with its own MTP layer (--draft mtp)\n"
    named, told = report(*target, *options, "--draft", "mtp")
    assert told == ""
    assert found["tokens"] == named["tokens"] == plain["tokens"]
    assert found["steps"] == named["steps"] < plain["steps"]
    assert found["fused"] == ["draft"]


def test_steps_of_none_and_other_drafts_ask_for_no_layer(folders):
    for options in (["--steps", "0"], ["--draft-kind", "lookup"]):
        assert report("--target", folders[0], *options)[1] == ""


def test_a_target_without_a_layer_needs_a_draft(folders):
    line = "--draft: is needed with --target (or --draft-kind lookup, or none)"
    assert refused("generate", *ON_CPU, "--target", folders[1], PROMPT) == line
    line = f"--draft: {folders[1]} has no MTP layers in model.safetensors: it has no model.layers"
    told = refused("generate", *ON_CPU, "--target", folders[1], "--draft", "mtp", PROMPT)
    assert told.startswith(line)
    assert refused("inspect", "--target", folders[1], PROMPT) == "--draft: is needed with --target"


def test_other_commands_draft_with_it(folders):
    shown = run("inspect", *ON_CPU, "--target", folders[0], PROMPT)
    assert "tree of " in shown.stdout, shown.output
    found = run("graphs", *ON_CPU, "--target", folders[0], "--buckets", "2", "--json")
    assert [one["bucket"] for one in json.loads(found.stdout)["captures"]] == [2]
