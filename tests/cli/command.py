"""The command line in this process, over the shipped pair on the CPU, and what it should say."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.main import get_command
from typer.testing import CliRunner

from specattn.cli import loading
from specattn.cli.app import app

ROOT = Path(__file__).parent.parent.parent
PAIR = Path(str(files("specattn"))) / "pair"
PROMPT = "class Point:\n    def __init__(self, x, y):"
OTHERS = ["import os\n", "def read_config(path):", "for name in sorted(names):\n"]
ON_CPU = ["--device", "cpu"]
# tokens of a text, unless a test says otherwise
COUNT = 16
RUNNER = CliRunner()
load_models = loading.load_models


@cache
def loaded(*args, **kwargs):
    return load_models(*args, **kwargs)


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(PAIR / "target")


@cache
def plain_model():
    return AutoModelForCausalLM.from_pretrained(
        PAIR / "target", dtype=torch.float32, attn_implementation="sdpa"
    )


@cache
def plain_tokens(prompt: str, count: int) -> list[int]:
    """What transformers' own greedy decoding says."""
    ids = tokenizer()(prompt, return_tensors="pt").input_ids
    out = plain_model().generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


@cache
def command(commands):
    """What typer makes of the functions, which takes it longer than most commands."""
    return get_command(commands)


def run(*args: str, stdin: str | bytes | None = None, env: dict | None = None):
    with mock.patch("typer.testing._get_command", command):
        return RUNNER.invoke(app, args, input=stdin, env=env)


def refused(*args: str, **rest) -> str:
    """The line, and all there is, that tells of a mistake."""
    result = run(*args, **rest)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("specattn: error: ")
    return line.removeprefix("specattn: error: ")


def generate(*args: str, count: int = COUNT, **rest):
    result = run("generate", *ON_CPU, "--max-new-tokens", str(count), *args, **rest)
    assert result.exit_code == 0, result.output
    return result


def generated(*args: str, **rest):
    return json.loads(generate("--json", *args, **rest).stdout)
