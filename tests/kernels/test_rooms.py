"""Dispatch: kernels take what their operation names, and Triton is only where it is needed."""

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
    "masks",
    "lookup",
]


FOLDER = Path(kernels.__file__).parent
# the modules of kernels, by those of the operations that launch them, and by their names there
FRONTS = {
    (path.relative_to(FOLDER).as_posix(), found[1]): found[2]
    for path in sorted(FOLDER.glob("*/*.py"))
    for found in re.finditer(r'(\w+) = TritonModule\("(.+)"\)', path.read_text())
}


def calls(front, *, kernels):
    """Yield the calls of what its module has, kernels or launchers: parameters, the call."""
    module = importlib.import_module(FRONTS[front])
    file, prefix = front
    for node in ast.walk(ast.parse((FOLDER / file).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) == kernels:
            name = ast.unparse(node.func.value if kernels else node.func)
            if name.startswith(f"{prefix}."):
                found = getattr(module, name.removeprefix(f"{prefix}."))
                yield inspect.signature(found.fn if kernels else found).parameters, node


@pytest.mark.parametrize("front", FRONTS, ids=" ".join)
def test_kernels_get_their_arguments_in_order(front):
    """What has a parameter's name is in its place, so that no two tensors are swapped."""
    for parameters, call in calls(front, kernels=True):
        names, spread, last = list(parameters), False, -1
        for place, argument in enumerate(call.args):
            spread |= isinstance(argument, ast.Starred)
            if (name := ast.unparse(argument)) in parameters:
                # how many a spread argument stands for is not known here
                assert names.index(name) > last if spread else names.index(name) == place, name
                last = names.index(name)
        for keyword in call.keywords:
            assert keyword.arg in (None, "num_warps", "num_stages", *parameters), keyword.arg


@pytest.mark.parametrize("front", FRONTS, ids=" ".join)
def test_launchers_are_called_by_keyword(front):
    """And every argument has its own name in the call, so that no two of them are swapped."""
    for parameters, call in calls(front, kernels=False):
        assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
        assert not call.args, ast.unparse(call.func)
        for keyword in call.keywords:
            value = ast.unparse(keyword.value)
            assert value == keyword.arg or value not in parameters, (keyword.arg, value)


def test_every_room_launches():
    found = {front: [*calls(front, kernels=True), *calls(front, kernels=False)] for front in FRONTS}
    assert len(found) > 10
    assert all(found.values())


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
