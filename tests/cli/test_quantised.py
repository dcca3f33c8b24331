"""Targets and heads of FP8 weights."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from specattn.cli import loading
from specattn.models.fused.scaled import FORMATS
from tests.cli.command import (
    COUNT,
    PAIR,
    PROMPT,
    generate,
    generated,
    plain_model,
    plain_tokens,
    refused,
    tokenizer,
)
from tests.models.test_quantised import fp8_folder

SAYS = "specattn: warning: --quantization {} makes another model of {}, with texts of its own"


def test_the_ways_are_those_of_the_library() -> None:
    assert tuple(FORMATS) == loading.QUANTIZATIONS


@pytest.mark.parametrize(
    ("way", "shape"),
    [("fp8", []), ("fp8-channel", ["--topk", "3"]), ("fp8-weights", ["--no-fused"])],
)
def test_a_quantised_target_writes_what_it_writes_plainly(way, shape) -> None:
    """But for near ties: a sum that rounds the other way can make an activation the next number."""
    options = ["--quantization", way, "--draft-quantization", "fp8", *shape]
    result = generate("--compare", "--json", *options, PROMPT, count=8)
    assert result.stderr.splitlines() == [SAYS.format(way, PAIR / "target")]
    found = json.loads(result.stdout)
    if not found["identical"]:
        assert found["first_difference"]["plain_margin"] < 0.2, found["first_difference"]


@pytest.mark.parametrize(
    "kind",
    [[], ["--draft-kind", "dflash"], ["--draft-kind", "model", "--draft", str(PAIR / "target")]],
    ids=["eagle3", "dflash", "model"],
)
def test_a_quantised_draft_changes_no_text(kind) -> None:
    found = generated("--draft-quantization", "fp8-channel", *kind, PROMPT)
    assert found["tokens"] == plain_tokens(PROMPT, COUNT)
    assert found["accepted_per_step"] > 2


def test_an_fp8_folder_is_a_target(tmp_path) -> None:
    fp8_folder(tmp_path, deepcopy(plain_model()))
    tokenizer().save_pretrained(tmp_path)
    target = ["--target", str(tmp_path), "--draft", str(PAIR / "draft")]
    result = generate("--compare", "--json", *target, PROMPT)
    found = json.loads(result.stdout)
    assert (result.stderr, found["fused"]) == ("", ["target", "draft"])
    assert found["accepted_per_step"] > 2
    if not found["identical"]:
        assert found["first_difference"]["plain_margin"] < 0.2, found["first_difference"]


def test_mistakes() -> None:
    ways = "must be fp8, fp8-channel or fp8-weights, got 'int4'"
    for option in ("--quantization", "--draft-quantization"):
        assert refused("generate", "--device", "cpu", option, "int4", "p") == f"{option}: {ways}"
    alone = ["--draft-quantization", "fp8", "--draft-kind"]
    for kind in ("lookup", "none"):
        line = refused("generate", "--device", "cpu", *alone, kind, "p")
        want = f"--draft-quantization: needs a model that drafts, which --draft-kind {kind} has not"
        assert line == want
