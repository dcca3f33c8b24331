"""A full disk, a closed pipe, a lack of memory: an exit code and at most one line, no traceback."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager

import pytest
import torch

from specattn.cli import running
from specattn.cli.app import app
from tests.cli.command import ON_CPU, PROMPT, run

WRITERS = {
    "generate": ["generate", *ON_CPU, PROMPT, "--max-new-tokens", "4"],
    "json": ["generate", *ON_CPU, PROMPT, "--max-new-tokens", "4", "--json"],
    "graphs": ["graphs", *ON_CPU, "--steps", "1", "--buckets", "1"],
    "inspect": ["inspect", *ON_CPU, PROMPT],
    "backends": ["backends"],
    "backends_json": ["backends", "--json"],
    "help": ["--help"],
    "help_of_a_command": ["generate", "--help"],
    "version": ["--version"],
}
FULL_DISK = "specattn: error: cannot write the output: No space left on device\n"


@contextmanager
def full_disk():
    # the interpreter closes it, and what it holds is lost
    with open("/dev/full", "w", buffering=1 << 16) as stream:
        yield stream


@contextmanager
def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1 << 16) as stream:
        yield stream


def ended(args: list[str], capsys) -> tuple[int, str]:
    """Run a command in this process; return its exit code and its last line of errors."""
    with pytest.raises(SystemExit) as found:
        app(args)
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return found.value.code, (errors.splitlines(keepends=True) or [""])[-1]


@pytest.mark.parametrize("args", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_is_one_line_and_3(args, monkeypatch, capsys):
    with full_disk() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert ended(args, capsys) == (3, FULL_DISK)


@pytest.mark.parametrize("args", WRITERS.values(), ids=WRITERS)
def test_a_closed_pipe_is_141_without_a_word(args, monkeypatch, capsys):
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert ended(args, capsys)[0] == 141


def test_a_full_disk_under_standard_error_leaves_the_exit_code(monkeypatch, capsys):
    with full_disk() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert ended(["generate", "--topk", "x", "p"], capsys)[0] == 2


@pytest.mark.parametrize(
    ("args", "others"),
    [
        (["generate", *ON_CPU, PROMPT], "--max-context, --batch-size or --max-new-tokens"),
        (["graphs", *ON_CPU], "--max-context or --buckets"),
    ],
    ids=["generate", "graphs"],
)
def test_pools_that_do_not_fit_name_the_options(args, others, monkeypatch):
    monkeypatch.setattr(running, "Engine", lambda *_, **__: torch.empty(2**60, dtype=torch.uint8))
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "specattn: error: --max-context: the KV pools do not fit into the device's memory; "
        f"lower {others}\n"
    )


def out_of_memory(kind: str):
    if kind == "host":
        raise MemoryError
    if kind == "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB.\nSee docs.")
    torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "host"])
def test_memory_that_runs_out_while_running_is_one_line_and_3(kind, monkeypatch):
    monkeypatch.setattr(running.Engine, "generate", lambda *_: out_of_memory(kind))
    result = run("generate", *ON_CPU, PROMPT)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("specattn: error: out of memory")
    assert result.stderr.count("\n") == 1


def test_another_error_is_not_hidden(monkeypatch):
    def fail(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(running.Engine, "generate", fail)
    result = run("generate", *ON_CPU, PROMPT)
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize("broken", [[1], [0, 2]])
def test_logits_that_are_not_finite_are_one_line_and_4(broken, tmp_path, monkeypatch):
    """The texts are written all the same, those of the other prompts whole."""
    generate = running.Engine.generate

    def with_broken_requests(engine, requests, on_tokens=None):
        results = generate(engine, requests, on_tokens)
        for index in broken:
            results[index].finish_reason = "nonfinite"
        return results

    file = tmp_path / "prompts.txt"
    file.write_text("import os\ndef f(x):\nclass A:\n")
    args = ["generate", *ON_CPU, "--max-new-tokens", "4", "--prompts", str(file)]
    whole = run(*args)
    monkeypatch.setattr(running.Engine, "generate", with_broken_requests)
    named = ", ".join(str(index + 1) for index in broken)
    line = (
        f"specattn: error: the target's logits after prompt {named} are NaN or infinite; "
        "the text ends there\n"
    )
    result = run(*args)
    assert (result.exit_code, result.stdout) == (4, whole.stdout)
    assert result.stderr.endswith(f"\n{line}")
    result = run(*args, "--json")
    assert (result.exit_code, result.stderr) == (4, line)
    reasons = [one["finish_reason"] for one in json.loads(result.stdout)]
    assert reasons == ["nonfinite" if index in broken else "length" for index in range(3)]
