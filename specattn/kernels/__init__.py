"""Device operations: Triton kernels on CUDA, torch functions elsewhere.

The function to call checks its arguments. Where `on_triton` says so, it launches a kernel of a
module ``triton`` beside it; on any other device its own body computes the same in torch. Where the
launches fill a screen, or choose among modules, a launcher stands beside the kernels, of keywords.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


class TritonModule:
    """A module of Triton kernels, imported when one is first used.

    So nothing needs Triton where nothing runs on it::

        kernels = TritonModule("specattn.kernels.cache.triton")

    Launchers have types, for which the module itself stands in its place::

        if TYPE_CHECKING:
            from specattn.kernels.logprobs import triton as launch
        else:
            launch = TritonModule("specattn.kernels.logprobs.triton")

    Parameters
    ----------
    module : str
        Its full name.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self._module), name)
        # the next look-up finds it here
        setattr(self, name, found)
        return found


def on_triton(tensor: Tensor) -> bool:
    """Whether an operation on ``tensor`` is launched; see `uses_triton`."""
    return uses_triton(tensor.device)


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
