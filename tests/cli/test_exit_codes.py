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
from specattn.cli.loading import decode
from tests.cli.command import ON_CPU, OTHERS, PROMPT, loaded, plain_tokens, refused, run, tokenizer

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


@pytest.mark.parametrize("where", [full_disk, closed_pipe])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_progress_that_cannot_be_shown_costs_no_text(options, where, monkeypatch, capsys):
    args = ["generate", *ON_CPU, PROMPT, "--max-new-tokens", "4", *options]
    want = decode(tokenizer(), plain_tokens(PROMPT, 4))
    with where() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(SystemExit) as found:
            app(args)
        stream.flush()  # else Python ends with 120, or with a traceback
    shown = capsys.readouterr().out
    text = json.loads(shown)["text"] if options else shown.removesuffix("\n")
    assert (found.value.code, text) == (0, want)


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


@pytest.mark.parametrize(
    ("args", "missing", "code", "said"),
    [
        (["generate"], ["stdin"], 2, "specattn: error: PROMPT: is missing; "),
        (["backends"], ["stdin", "stdout"], 0, ""),
        (["generate", ""], ["stderr"], 2, ""),
    ],
    ids=["stdin", "stdout", "stderr"],
)
def test_standard_streams_that_are_closed(args, missing, code, said, monkeypatch, capsys):
    """Python has `None` for them."""
    for name in missing:
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as found:
        app(args)
    shown = capsys.readouterr()
    assert (found.value.code, shown.out) == (code, "")
    assert shown.err.startswith(said)
    assert shown.err.count("\n") == bool(said)


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
    line = f"--max-context: the KV pools do not fit into the device's memory; lower {others}"
    assert refused(*args) == line


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


@pytest.mark.parametrize("shape", [[5, 1], [2, 2], [0, 1]], ids=["chain", "tree", "plain"])
def test_a_target_of_nan_ends_the_prompts_that_come_to_it(shape, tmp_path, monkeypatch):
    """Prompt 1 does in its text and prompt 2 at its end; prompt 3 does not."""
    prompts = [PROMPT, "x = y %", OTHERS[0]]
    whole = [plain_tokens(prompt, 12) for prompt in prompts]
    bad = torch.tensor([whole[0][5], tokenizer()(prompts[1]).input_ids[-1]])
    at = whole[0].index(bad[0]) + 1
    assert not set(whole[2]).intersection(bad.tolist())
    models = loaded(
        None, None, speculative=True, dtype=torch.float32, device=torch.device("cpu"), fused=True
    )
    forward = type(models.target).forward

    def breaking(self, ids, positions, attend, rows=None):
        out = forward(self, ids, positions, attend, rows)
        out.logits[torch.isin(ids if rows is None else ids[rows], bad)] = torch.nan
        return out

    monkeypatch.setattr(type(models.target), "forward", breaking)
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(prompts))
    options = ["--steps", str(shape[0]), "--topk", str(shape[1]), "--max-new-tokens", "12"]
    result = run("generate", *ON_CPU, *options, "--prompts", str(file), "--json")
    assert result.exit_code == 4
    found = json.loads(result.stdout)
    assert [one["tokens"] for one in found] == [whole[0][:at], [], whole[2]]
    assert [one["finish_reason"] for one in found] == ["nonfinite", "nonfinite", "length"]
    line = (
        "specattn: error: the target's logits after prompt 1, 2 are NaN or infinite; "
        "the text ends there\n"
    )
    assert result.stderr == line
    result = run("generate", *ON_CPU, *options, "--prompts", str(file))
    assert result.exit_code == 4
    assert result.stdout.endswith(f"==> 3 <==\n{decode(tokenizer(), whole[2])}\n")
    assert result.stderr.endswith(f"\n{line}")
    result = run("generate", *ON_CPU, *options, prompts[1], "--compare")
    assert (result.exit_code, result.stdout) == (4, "\n")
    assert result.stderr.endswith(
        "\nspecattn: error: the target's logits are NaN or infinite; the text ends there\n"
    )
    if shape[0]:
        result = run("inspect", *ON_CPU, *options[:4], prompts[1])
        assert (result.exit_code, result.stdout) == (4, "")
