"""The check that Gluon kernels share, and TMA boxes."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextvars import Context
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def gluon_ok(kernel_name: str, check: Callable[[torch.device], None], device: torch.device) -> bool:
    """Return whether ``kernel_name`` works on ``device``; the first call finds out.

    ``check`` then compiles and runs the kernel and raises if anything is off, so that call must not
    be made while a CUDA graph is captured. Anything but a Hopper GPU is refused without it.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return _passes(kernel_name, check, index)


@cache
def _passes(kernel_name: str, check: Callable[[torch.device], None], index: int) -> bool:
    try:
        with torch.cuda.device(index):
            # launched also where launches are compiled only
            Context().run(check, torch.device("cuda", index))
    except Exception as problem:  # compilers fail in ways of their own
        log.warning(
            "%s does not work on %s, a Triton kernel takes its place: %s: %s",
            kernel_name,
            torch.cuda.get_device_name(index),
            type(problem).__name__,
            problem,
        )
        return False
    return True


def tma_boxes(matrix: Tensor, rows: int, columns: int) -> Any:
    """Describe a matrix, of 16 bits or e4m3, to TMA."""
    described, layout = _box_layout(rows, columns, matrix.dtype)
    return described(matrix, [rows, columns], layout)


@cache
def _box_layout(rows: int, columns: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return what describes such boxes, and their layout in shared memory."""
    gl = importlib.import_module("triton.experimental.gluon.language")
    hopper = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    known = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
    element = known.get(dtype, gl.float8e4nv)
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], element)
    return hopper.TensorDescriptor.from_tensor, layout
