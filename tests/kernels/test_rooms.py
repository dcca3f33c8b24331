"""Dispatch: launchers take what their operation names, and Triton is only where it is needed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specattn import kernels

ROOMS = [
    "tree",
    "sampling",
    "step",
    "processors",
    "cache",
    "logprobs",
    "indices",
    "fused",
    "adopt",
    "lookup",
]


# the source of operations, by the module of their launchers
FRONTS = {
    found[1]: source
    for path in sorted(Path(kernels.__file__).parent.glob("*/*.py"))
    if (found := re.search(r'launch = Launchers\("(.+)"\)', source := path.read_text()))
}


@pytest.mark.parametrize("module", FRONTS)
def test_launchers_are_called_by_keyword(module):
    """And every argument has its own name in the call, so that no two of them are swapped."""
    launchers, called = importlib.import_module(module), set()
    for node in ast.walk(ast.parse(FRONTS[module])):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("launch.")):
            continue
        name = ast.unparse(node.func).removeprefix("launch.")
        called.add(name)
        parameters = inspect.signature(getattr(launchers, name)).parameters
        assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
        assert not node.args, name
        for keyword in node.keywords:
            value = ast.unparse(keyword.value)
            assert value == keyword.arg or value not in parameters, (name, keyword.arg, value)
    assert called


def test_a_function_of_the_device_is_chosen(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert not kernels.uses_triton(cpu)
    assert kernels.uses_triton(cuda)
    monkeypatch.setattr(kernels, "_triton_is_installed", lambda: False)
    assert not kernels.uses_triton(cuda)


def test_no_operation_needs_triton_to_be_imported():
    """Or to run on a CPU."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import importlib, torch\n"
        f"for room in {ROOMS}:\n"
        "    importlib.import_module(f'specattn.kernels.{room}')\n"
        "from specattn.kernels.sampling import argmax_tokens\n"
        "assert argmax_tokens(torch.eye(3)).tolist() == [0, 1, 2]\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root
    )
    assert run.returncode == 0, run.stderr
