"""Device operations: each one a Triton kernel here and a torch twin in `kernels.reference`."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import ModuleType


def ops(name: str, device: torch.device) -> ModuleType:
    """Return the module that runs operation ``name`` on ``device``.

    The Triton kernels on CUDA, their torch twins (same functions, same signatures) elsewhere
    and where Triton is not installed.

    Raises
    ------
    ValueError
        If it is Triton's to launch and ``device`` is not this thread's current one; see
        `check_current`.
    """
    compiled = device.type == "cuda" and find_spec("triton") is not None
    if compiled:
        check_current(device)
    return _module(name, compiled)


def check_current(device: torch.device) -> None:
    """Raise a ValueError if ``device`` is a CUDA device other than this thread's current one.

    Triton launches kernels on the current device, wherever their tensors are; a new thread's is
    ``cuda:0``. A graph that was captured is replayed where it belongs, whichever is current.
    """
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"{device} must be the current device, which is cuda:{torch.cuda.current_device()}: "
            f"call torch.cuda.set_device({device.index}) first"
        )


@cache
def _module(name: str, compiled: bool) -> ModuleType:
    package = "specattn.kernels" if compiled else "specattn.kernels.reference"
    return importlib.import_module(f"{package}.{name}")
