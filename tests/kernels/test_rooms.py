"""Dispatch: one signature for all implementations, and Triton only where it is needed."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specattn import kernels
from specattn.kernels.sampling import naive

ROOMS = ["tree", "sampling", "step", "processors", "cache", "indices", "fused", "adopt", "lookup"]


def functions(module) -> dict[str, inspect.Signature]:
    """Public functions that a module defines itself."""
    return {
        name: inspect.signature(value)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


@pytest.mark.parametrize("room", ROOMS)
def test_implementations_take_the_same_arguments(room):
    public, torch_made, compiled = (
        functions(importlib.import_module(f"specattn.kernels.{room}{part}"))
        for part in ("", ".naive", ".triton")
    )
    dispatched = public.keys() & torch_made.keys()
    assert dispatched
    for name in dispatched:
        assert torch_made[name] == compiled[name], name
        # what a check has found comes after the arguments of the call
        given = [parameter.annotation for parameter in public[name].parameters.values()]
        taken = [parameter.annotation for parameter in torch_made[name].parameters.values()]
        assert taken[: len(given)] == given, name


def test_a_function_of_the_device_is_chosen(monkeypatch):
    from specattn.kernels.sampling import triton

    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert kernels.implementation(naive.uniform, cpu) is naive.uniform
    assert kernels.implementation(naive.uniform, cuda) is triton.uniform
    monkeypatch.setattr(kernels, "_triton_is_installed", lambda: False)
    assert kernels.implementation(naive.uniform, cuda) is naive.uniform


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
