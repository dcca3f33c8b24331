"""What FlashInfer asks of whoever calls it: where it runs, its workspace, and its plans."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch

from specattn.cuda_graph.capture_guard import Settable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from specattn.config import AttnConfig

#: FlashInfer's masked logit is -5e4 before scaling; a smaller scale would let it weigh something.
MIN_SCALE = 1e-3
#: Smallest float workspace.
MIN_FLOATS = 128 << 20


def device_reasons(device: torch.device) -> list[str]:
    """Say why FlashInfer cannot run on ``device``."""
    found = []
    if find_spec("flashinfer") is None:
        found.append("flashinfer is not installed (pip install flashinfer-python, Linux only)")
    if device.type != "cuda":
        found.append(f"FlashInfer needs a CUDA device, got {device.type}")
    elif not torch.cuda.is_available():
        found.append("torch finds no CUDA device")
    elif torch.cuda.get_device_capability(device) < (8, 0):
        found.append("FlashInfer's FA2 kernels need compute capability 8.0")
    return found


def scale_reasons(config: AttnConfig) -> list[str]:
    """Say why FlashInfer cannot mask at the layer's scale."""
    if config.sm_scale < MIN_SCALE:
        return [f"sm_scale must be at least {MIN_SCALE}, got {config.sm_scale}"]
    return []


def require_contiguous(out: Tensor, lse: Tensor | None) -> None:
    """Raise a ValueError for outputs that FlashInfer would misread."""
    for name, tensor in {"out": out, "lse": lse}.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


class FlashInferLayer(Settable):
    """A layer geometry on a CUDA device, with the workspace of everything bound to it.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        A CUDA device.
    """

    name: ClassVar[str]

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._floats: Tensor | None = None

    def processors(self) -> int:
        """Return the device's streaming multiprocessors: FlashInfer cuts its work by them."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def floats(self, size: int) -> Tensor:
        """Return workspace that everything bound here shares: forwards run one after another."""
        size = max(size, MIN_FLOATS)
        if self._floats is None or len(self._floats) < size:
            self._floats = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._floats


class Staged:
    """Whose plans wait in pinned memory until the device has fetched them."""

    def __init__(self) -> None:
        # neither the next plan nor another owner of the memory may write there before
        self._fetched = torch.cuda.Event()
        weakref.finalize(self, self._fetched.synchronize).atexit = False

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Plan inside: on the host, with copies to the device under way afterwards."""
        self._fetched.synchronize()
        yield
        self._fetched.record()
