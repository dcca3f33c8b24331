"""Dispatch: kernels take what their operation names, and Triton is only where it is needed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from specattn import kernels

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
