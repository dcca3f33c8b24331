"""Device operations, a package each: Triton kernels on CUDA, torch functions elsewhere.

``kernels/<op>/__init__`` holds the functions to call: each checks its arguments once and calls
the implementation for their device. ``triton`` and ``gluon`` launch kernels; ``naive`` computes the
same in torch, on any device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def implementation(naive: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """Return the function of ``naive``'s name that runs on ``device``.

    That is the one in the module ``triton`` beside ``naive``'s own where `uses_triton` says so,
    and ``naive`` elsewhere. Both take the same arguments.

    Parameters
    ----------
    naive : callable
        A function of a module ``specattn.kernels.<op>.naive``.
    device : torch.device
        Where its tensors are.

    Raises
    ------
    ValueError
        As `check_current` does, if Triton is to launch.
    """
    return _triton_of(naive) if uses_triton(device) else naive


def uses_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: CUDA, with Triton installed.

    Raises
    ------
    ValueError
        As `check_current` does, if they would.
    """
    if device.type != "cuda" or not _triton_is_installed():
        return False
    check_current(device)
    return True


def check_current(device: torch.device) -> None:
    """Raise a ValueError unless a CUDA ``device`` is this thread's current one.

    Triton launches kernels on the current device, wherever their tensors are; a new thread's is
    ``cuda:0``. A graph that was captured is replayed where it belongs, whichever is current.
    """
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"{device} must be the current device, which is cuda:{torch.cuda.current_device()}: "
            f"call torch.cuda.set_device({device.index}) first"
        )


@functools.cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _triton_of(naive: Callable[..., Any]) -> Callable[..., Any]:
    module = importlib.import_module(naive.__module__.removesuffix("naive") + "triton")
    function: Callable[..., Any] = getattr(module, naive.__name__)
    return function
