"""The backends by name, imported when they are first asked for."""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from specattn.backends.base import AttentionBackend, BoundAttention, Capabilities
from specattn.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from specattn.config import AttnConfig

__all__ = [
    "AttentionBackend",
    "BoundAttention",
    "Capabilities",
    "available",
    "backend_names",
    "choose_backend",
    "load_backend",
    "register_backend",
]

log = logging.getLogger(__name__)

_BACKENDS = {
    "triton": "specattn.backends.triton:TritonBackend",
    "torch_native": "specattn.backends.torch_native:TorchNativeBackend",
    "flex": "specattn.backends.flex:FlexBackend",
}


#: Installed packages add backends as entry points of this group, ``name = "module:Class"``.
ENTRY_POINTS = "specattn.backends"


def register_backend(name: str, target: str) -> None:
    """Add a backend, imported when it is first asked for.

    Parameters
    ----------
    name : str
        What users call it; not the name of another backend.
    target : str
        ``"package.module:Class"``, an `AttentionBackend`.

    Raises
    ------
    ValueError
        If the name is taken by another target, or the target is not of that form.
    """
    if _registered().get(name, target) != target or name == "auto" or "," in name:
        raise ValueError(f"backend name {name!r} is taken")
    if target.count(":") != 1:
        raise ValueError(f"target must be 'module:Class', got {target!r}")
    _BACKENDS[name] = target


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, the library's own first."""
    return tuple(_registered())


def _registered() -> dict[str, str]:
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return found | _BACKENDS


def load_backend(name: str) -> type[AttentionBackend]:
    """Import a backend's class.

    Raises
    ------
    UnsupportedError
        If there is no backend of that name.
    """
    registered = _registered()
    if name not in registered:
        known = ", ".join(("auto", *registered))
        raise UnsupportedError(f"backend {name!r}", [f"unknown; choose one of {known}"])
    module, attribute = registered[name].split(":")
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
