"""The backends by name, imported when they are first asked for."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from specattn.backends.base import AttentionBackend, BoundAttention
from specattn.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from specattn.config import AttnConfig

__all__ = ["AttentionBackend", "BoundAttention", "available", "backend_names", "choose_backend",
           "load_backend"]

log = logging.getLogger(__name__)

_BACKENDS = {
    "triton": "specattn.backends.triton:TritonBackend",
    "torch_native": "specattn.backends.torch_native:TorchNativeBackend",
}


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, in the order ``auto`` prefers them on a GPU."""
    return tuple(_BACKENDS)


def load_backend(name: str) -> type[AttentionBackend]:
    """Import a backend's class.

    Raises
    ------
    UnsupportedError
        If there is no backend of that name.
    """
    if name not in _BACKENDS:
        known = ", ".join(("auto", *_BACKENDS))
        raise UnsupportedError(f"backend {name!r}", [f"unknown; choose one of {known}"])
    module, attribute = _BACKENDS[name].split(":")
    backend: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
    return backend


def available(name: str, config: AttnConfig | None, device: torch.device) -> list[str]:
    """Say why backend ``name`` cannot serve ``config`` on ``device``; empty means it can."""
    return load_backend(name).reasons(config, device)


def choose_backend(
    name: str, configs: list[AttnConfig], device: torch.device
) -> type[AttentionBackend]:
    """Return the backend to use for layers of these configurations.

    Parameters
    ----------
    name : str
        A backend, which must then serve every configuration; or ``"auto"``: Triton on a CUDA
        device, torch on any other, and torch wherever Triton cannot serve, with the reason logged.
    configs : list of AttnConfig
        The distinct layer configurations.
    device : torch.device
        Where the pools live.

    Raises
    ------
    UnsupportedError
        If a backend named explicitly, or every candidate of ``auto``, cannot serve.
    """
    if name != "auto":
        reasons = _all_reasons(name, configs, device)
        if reasons:
            raise UnsupportedError(f"backend {name!r} on {device}", reasons)
        return load_backend(name)
    order = ("triton", "torch_native") if device.type == "cuda" else ("torch_native",)
    for candidate in order:
        reasons = _all_reasons(candidate, configs, device)
        if not reasons:
            log.info("backend auto: %s on %s", candidate, device)
            return load_backend(candidate)
        log.warning("backend auto: not %s on %s: %s", candidate, device, "; ".join(reasons))
    raise UnsupportedError(f"backend 'auto' on {device}", reasons)


def _all_reasons(name: str, configs: list[AttnConfig], device: torch.device) -> list[str]:
    found = [reason for config in configs for reason in available(name, config, device)]
    return list(dict.fromkeys(found))
