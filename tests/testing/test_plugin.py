"""The kit as another repository would use it: its own backend, its own pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.test_kit_catches_mutants import MUTANTS

CONFTEST = 'pytest_plugins = ["specattn.testing.plugin"]\n'
BACKEND = """
from specattn.backends.torch_native import TorchNativeBackend
from specattn.testing.plugin import backend_suite

class Mine(TorchNativeBackend):
    name = "mine"

class Broken(Mine):
    name = "broken"

    def __init__(self, config, device):
        super().__init__(config, device)
        object.__setattr__(self.config, "window_left", -1)

class Elsewhere(Mine):
    @staticmethod
    def reasons(config, device):
        return ["not on this machine"]

test_mine = backend_suite(Mine, "cpu")
test_broken = backend_suite(Broken, "cpu")
test_elsewhere = backend_suite(Elsewhere, "cpu")
"""


def run(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-rfs", "-p", "no:cacheprovider", *options]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": root, "PATH": "", "OMP_NUM_THREADS": "1", "HOME": str(folder)},
    )
    return done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(BACKEND)
    return tmp_path


def test_one_test_per_check(repository):
    out = run(repository, "--conformance-level", "smoke", "-v")
    assert "test_mine.py::test_mine[tree_verify-window_9] PASSED" in out, out
    assert "test_mine.py::test_broken[tree_verify-window_9] FAILED" in out
    assert "window: backend 'broken' in tree_verify-window_9: relative error" in out
    assert "not on this machine" in out
    # the level of the command line is the level
    assert "tree_verify-window_0" not in out
    assert "1 failed, 21 passed, 1 skipped" in out


def test_the_page_lists_every_property():
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    listed = set(re.findall(r"^\| ([a-z ]+) \|", page, re.MULTILINE))
    for _, broken, _ in MUTANTS:
        assert broken in listed, broken
