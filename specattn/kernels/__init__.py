"""Device operations: each one a Triton kernel here and a torch twin in `kernels.reference`."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    import torch


def ops(name: str, device: torch.device) -> ModuleType:
    """Return the module that runs operation ``name`` on ``device``.

    The Triton kernels on CUDA, their torch twins (same functions, same signatures) elsewhere
    and where Triton is not installed.
    """
    return _module(name, device.type == "cuda" and find_spec("triton") is not None)


@cache
def _module(name: str, compiled: bool) -> ModuleType:
    package = "specattn.kernels" if compiled else "specattn.kernels.reference"
    return importlib.import_module(f"{package}.{name}")
