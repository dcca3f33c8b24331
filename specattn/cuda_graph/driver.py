"""The CUDA driver, for what torch has no call for.

See https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint64
from functools import cache
from typing import Any


def has(name: str) -> bool:
    """Whether the driver that is installed has a call of this name."""
    return hasattr(_driver(), name)


def call(name: str, *args: Any) -> None:
    """Call the driver; whole numbers are handles or sizes, of 8 bytes.

    A RuntimeError has the driver's number for a refusal (`CUresult` of cuda.h).
    """
    sized = [c_uint64(arg) if isinstance(arg, int) else arg for arg in args]
    code = getattr(_driver(), name)(*sized)
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
