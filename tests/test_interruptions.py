"""A run that is interrupted says what it knew; it is a run of its own here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# as soon as this process knows of a failure and of a test that runs, it is interrupted
CONFTEST = """
import os
import pathlib
import pytest

awaited = {("test_it.py::test_fails", "call"), ("test_it.py::test_hangs", "setup")}

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        awaited.add("no worker stops the run")

@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    awaited.discard((report.nodeid, report.when))
    if not awaited:
        awaited.add("only once")
        os.kill(os.getpid(), int(os.environ["NUMBER"]))

@pytest.hookimpl(trylast=True)
def pytest_keyboard_interrupt():
    pathlib.Path("go").touch()
"""
TESTS = """
import pathlib
import time

def test_passes():
    pass

def test_fails():
    assert not "a thing"

def test_hangs():
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("workers", "number"),
    [(2, signal.SIGTERM), (0, signal.SIGINT)],
    ids=["workers_terminated", "one_process_interrupted"],
)
def test_an_interrupted_run_says_what_had_failed_and_what_was_running(tmp_path, workers, number):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    options = f"-p tests.interruptions -p no:cacheprovider -n {workers} --dist worksteal"
    # that of a worker among others
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split()],
        cwd=tmp_path,
        env=outside | {"PYTHONPATH": str(Path(__file__).parents[1]), "NUMBER": str(int(number))},
        capture_output=True,
        text=True,
        check=False,
        # a shell's background jobs, and what they start, ignore interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    where = r" on gw\d" if workers else ""
    told = (
        r"\ninterrupted: 1 failed, 1 running\n  failed: test_it.py::test_fails \(call\)\n"
        rf"  running: test_it.py::test_hangs{where}, for \d+ s\n"
    )
    assert re.search(told, done.stdout), done.stdout
    # before that, as it failed
    before, _ = done.stdout.split("\ninterrupted: ")
    assert "\nfailed: test_it.py::test_fails (call)\n" in before
