"""Names of Gluon that versions of Triton write differently, one of each."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma


def _found(module: Any, name: str, before: str) -> Any:
    """Return what newer versions call ``name``, and older ones ``before``."""
    return vars(module)[name if hasattr(module, name) else before]


#: Wait for the warps of a partition; renamed in Triton 3.7.
barrier = _found(gl, "barrier", "thread_barrier")
#: Copy elements at pointers to shared memory; renamed in 3.8, the former name is gone in 3.9.
async_load = _found(async_copy, "async_load", "async_copy_global_to_shared")
#: Copy a box of a descriptor's tensor to shared memory; renamed with the former.
tma_load = _found(tma, "async_load", "async_copy_global_to_shared")
#: See shared memory as another shape or layout; a private name before 3.9.
reinterpret = _found(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
