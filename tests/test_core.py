"""The core needs torch, triton and numpy alone: a process that can import nothing else runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = ("torch", "triton", "numpy")
# rooms of the extra `models`, of other engines, and the kit's side for pytest
BEYOND = ("models", "cli", "integrations", "testing.plugin")

ONLY_CORE = """
import sys
from importlib.machinery import PathFinder

class Core:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in BLOCKED:
            return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Core if finder is PathFinder else finder for finder in sys.meta_path]
"""
MISSING = """
from importlib import import_module
for name in ("transformers", "safetensors", "typer", "rich", "numpy", "pytest"):
    try:
        import_module(name)
    except ModuleNotFoundError:
        print(name)
"""
IMPORTS = """
import pkgutil, specattn
from importlib import import_module
for found in pkgutil.walk_packages(specattn.__path__, "specattn."):
    if not found.name.removeprefix("specattn.").startswith(BEYOND):
        import_module(found.name)
"""
ATTENDS = """
import torch
from specattn.testing import conformance
from tests.interpreter import describe_once, patch_once, spread_bits, without_idle_checks
from tests.shortcuts import shortcuts
torch.set_num_threads(1)
patch_once(shortcuts())
describe_once()
without_idle_checks()
spread_bits()
for backend in ("torch_native", "triton"):
    checks = [check for check in conformance(backend, "cpu", "smoke") if "tree" in check.name]
    for check in checks[:2]:
        check()
        print(backend, check.name)
"""


def with_what_they_need(names: tuple[str, ...]) -> set[str]:
    """Return the distributions that ``names`` need, and theirs, without any extra."""
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            try:
                needs = distribution(name).requires or []
            except ModuleNotFoundError:  # of another platform
                continue
            waiting += [re.match(r"[\w.-]+", one)[0] for one in needs if "extra ==" not in one]
    return found


def run(*code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process that can import the core's distributions and nothing else."""
    wanted = with_what_they_need(CORE)
    blocked = {
        module
        for module, owners in packages_distributions().items()
        if not wanted & {owner.lower().replace("_", "-") for owner in owners}
    } - {"specattn"}
    start = f"BLOCKED = {blocked!r}\nBEYOND = {BEYOND!r}\n{ONLY_CORE}"
    return subprocess.run(
        [sys.executable, "-c", "\n".join((start, *code))],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PATH": "", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
    )


def test_the_process_is_as_bare_as_it_says():
    out = run(MISSING)
    assert out.stdout.split() == ["transformers", "safetensors", "typer", "rich", "pytest"]


def test_the_core_imports_and_attends_alone():
    """Trees on both backends that run anywhere, against the kit's float64 oracle."""
    out = run(IMPORTS, ATTENDS)
    assert out.returncode == 0, out.stderr
    assert {line.split()[0] for line in out.stdout.splitlines()} == {"torch_native", "triton"}


def test_the_command_says_what_to_install():
    out = run("from specattn.cli import main\nmain()")
    assert out.returncode == 1
    assert out.stdout == ""
    (line,) = out.stderr.splitlines()
    assert line.startswith("specattn: error: the command needs transformers, safetensors, ")
    assert "pip install 'specattn[models]'" in line
