"""Whole models as drafts, text in front of a draft, and GGUF files."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import ON_CPU, PAIR, PROMPT, generate, generated, plain_tokens, refused, run
from tests.models import gguf_files

TARGET = str(PAIR / "target")
MODEL = ["--draft-kind", "model", "--draft", TARGET]
REPEATED = "a = 1\nb = 2\nc = 3\n" * 3


@pytest.mark.parametrize("options", [[], ["--topk", "2"], ["--no-fused"]], ids=" ".join)
def test_a_whole_model_drafts(options):
    """Of itself every draft is right."""
    found = generated(*MODEL, *options, "--steps", "3", PROMPT, count=13)
    assert found["tokens"] == plain_tokens(PROMPT, 13)
    assert found["accepted_per_step"] == 4
    assert found["fused"] == ([] if "--no-fused" in options else ["target", "draft"])


@pytest.mark.parametrize(
    "options",
    [
        MODEL,
        ["--topk", "2"],
        ["--draft-kind", "dflash", "--tree", "best_first"],
        ["--temperature", "1e-5", "--adaptive"],
    ],
    ids=["model", "eagle3", "dflash", "drawn"],
)
def test_text_drafts_in_front_of_another(options):
    found = generated("--lookup-first", *options, REPEATED, count=24)
    assert found["tokens"] == plain_tokens(REPEATED, 24)


def test_text_in_front_makes_the_paths_longer():
    alone, fronted = (
        generated("--steps", "12", *first, REPEATED, count=40) for first in ([], ["--lookup-first"])
    )
    assert alone["tokens"] == fronted["tokens"]
    assert fronted["steps"] < alone["steps"] / 2


def test_other_commands_take_a_whole_model_as_the_draft():
    shown = run("inspect", *ON_CPU, *MODEL, PROMPT).stdout
    assert "accepted 3 of " in shown
    found = json.loads(run("graphs", *ON_CPU, *MODEL, "--buckets", "2", "--json").stdout)
    assert [one["bucket"] for one in found["captures"]] == [2]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return str(gguf_files.write(gguf_files.tiny(), path, q8=True))


@pytest.mark.parametrize(
    "options", [["--draft-kind", "lookup"], ["--draft-kind", "model", "--lookup-first"]]
)
def test_a_gguf_file_chats_as_plain_decoding_does(file, options):
    drafts = ["--draft", file] if "model" in options else []
    found = generated("--target", file, *options, *drafts, "--chat", "--compare", "hello world")
    assert found["identical"] is True
    assert found["num_tokens"] > 1


def test_the_end_of_a_gguf_file_ends_a_text(file):
    end = gguf_files.TOKENS.index("<|end|>")
    options = ["--target", file, "--draft-kind", "lookup", "--chat", "--min-new-tokens", "4"]
    found = generated(*options, "--logit-bias", f"{end}=1000", "hello")
    assert (found["finish_reason"], found["num_tokens"]) == ("eos", 5)
    assert found["tokens"][-1] == end
    shown = generate(*options, "--logit-bias", f"{end}=1000", "hello").stdout
    assert "<|end|>" not in shown


def test_a_gguf_file_is_no_head(file):
    line = f"--draft: {file} is no head but a whole model: load it by --draft-kind model"
    assert refused("generate", *ON_CPU, "--draft", file, "p") == line
