"""The command as a process: interrupts, closed pipes, odd arguments."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from specattn.cli import app
from specattn.cli.generate import Generate
from tests.cli.command import ON_CPU, PROMPT, ROOT, plain_tokens
from tests.samples import half, sampled

INTERPRETED = (
    b"specattn: warning: no CUDA device: "
    b"Triton kernels run in Triton's interpreter, which is slow\n"
)
FULL = b"specattn: error: cannot write the output: No space left on device\n"


def process(*args: str, stdout: int = subprocess.PIPE, **rest) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-m", "specattn", *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "0"},
        **rest,
    )


def test_an_interrupt_ends_quietly():
    running = process(
        "generate",
        *ON_CPU,
        PROMPT,
        "--max-new-tokens",
        "2000",
        "--ignore-eos",
        # a shell's background jobs, and what they start, ignore interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None
    assert running.stdout.read(8)  # it is generating
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=600)
    # Python ends by the signal itself if it was inside an exec of text
    assert running.returncode in (130, -signal.SIGINT)
    assert errors == b""


@sampled(half, option=["--version", "--help"], out=["closed pipe", "full disk"])
def test_a_closed_pipe_and_a_full_disk_leave_nothing_for_the_last_flush(option, out):
    """Python itself would end with 120 and a traceback of its own."""
    if out == "closed pipe":
        reader, written = os.pipe()
        os.close(reader)
    else:
        written = os.open("/dev/full", os.O_WRONLY)
    running = process(option, stdout=written)
    os.close(written)
    _, errors = running.communicate(timeout=600)
    assert (running.returncode, errors) == {"closed pipe": (141, b""), "full disk": (3, FULL)}[out]


def test_an_argument_that_is_not_utf8_beside_closed_standard_streams():
    """Python has no `sys.stdin` and `sys.stdout` then; see `test_exit_codes.py` for each."""
    wrong = os.fsdecode(b"abc\xff")
    running = process("generate", wrong, preexec_fn=lambda: [os.close(fd) for fd in (0, 1)])
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 2
    assert errors == b"specattn: error: PROMPT: is not UTF-8 (byte 0xff at offset 3)\n"


@pytest.mark.slow
def test_triton_on_a_cpu_switches_its_interpreter_on_before_models_import_it():
    options = ["--backend", "triton", "--steps", "0", "--no-graphs", "--json"]
    running = process("generate", *ON_CPU, *options, "--max-new-tokens", "1", "a")
    out, errors = running.communicate(timeout=600)
    assert running.returncode == 0, errors
    assert json.loads(out)["tokens"] == plain_tokens("a", 1)
    assert errors == INTERPRETED


@pytest.mark.parametrize("columns", [60, 79, 200])
def test_help_names_every_option_whole(columns, monkeypatch, capsys):
    """However wide the terminal is, which the command looks at once, when it is imported."""
    monkeypatch.setenv("COLUMNS", str(columns))
    spec = spec_from_file_location("specattn.cli.app_again", app.__file__)
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    names = [f"--{one.name.replace('_', '-')}" for one in fields(Generate) if one.name != "ctx"]
    with pytest.raises(SystemExit):
        again.app(["generate", "--help"])
    shown = capsys.readouterr().out
    names = [name for name in names if name not in ("--prompt", "--as-json")]
    assert len(names) > 40
    assert [name for name in names if not re.search(rf"{name}\b(?!-)", shown)] == []
