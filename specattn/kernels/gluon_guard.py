"""Decide whether a Gluon kernel may be used, as each proves itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

# what each kernel's check said, per device
_PROVEN: dict[tuple[str, int], bool] = {}


def gluon_ok(kernel_name: str, check: Callable[[torch.device], None], device: torch.device) -> bool:
    """Return whether ``kernel_name`` works on ``device``; the first call there finds out.

    It compiles and runs, so it must not be made while a CUDA graph is captured.

    Parameters
    ----------
    kernel_name : str
        What the result is remembered, and a failure logged, by.
    check : callable
        Imports the kernel, runs a small problem on the device and raises if anything is off.
    device : torch.device
        The device; anything but a Hopper GPU is refused without a check.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    if (kernel_name, index) not in _PROVEN:
        try:
            with torch.cuda.device(index):
                check(torch.device("cuda", index))
            _PROVEN[kernel_name, index] = True
        except Exception as problem:  # compilers fail in ways of their own
            log.warning(
                "%s does not work on %s, a Triton kernel takes its place: %s: %s",
                kernel_name,
                torch.cuda.get_device_name(index),
                type(problem).__name__,
                problem,
            )
            _PROVEN[kernel_name, index] = False
    return _PROVEN[kernel_name, index]
