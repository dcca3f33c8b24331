"""The backends by name, imported when they are first asked for."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from specattn.backends.base import (
    AttentionBackend,
    BackendFactory,
    BoundAttention,
    Capabilities,
    imported,
    reasons_of,
)
from specattn.checks import function
from specattn.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from specattn.config import AttnConfig

__all__ = [
    "AttentionBackend",
    "BackendFactory",
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
    "triton_sharing": "specattn.backends.triton:TritonSharingBackend",
    "torch_native": "specattn.backends.torch_native:TorchNativeBackend",
    "flex": "specattn.backends.flex:FlexBackend",
    "fa3": "specattn.backends.flash_attn:Fa3Backend",
    "flashinfer": "specattn.backends.flashinfer:FlashInferBackend",
    "triton_mla": "specattn.backends.triton_mla:TritonMlaBackend",
    "flashinfer_mla": "specattn.backends.flashinfer_mla:FlashInferMlaBackend",
    "flashmla": "specattn.backends.flashmla:FlashMlaBackend",
    "fa4": "specattn.backends.blackwell:Fa4Backend",
    "cutlass_mla": "specattn.backends.blackwell:CutlassMlaBackend",
    "trtllm_mha": "specattn.backends.blackwell:TrtllmMhaBackend",
    "trtllm_mla": "specattn.backends.blackwell:TrtllmMlaBackend",
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
    if name == "auto" or "," in name:
        raise ValueError(f"backend name {name!r} has another meaning")
    if _registered().get(name, target) != target:
        raise ValueError(f"backend name {name!r} is taken")
    if target.count(":") != 1:
        raise ValueError(f"target must be 'module:Class', got {target!r}")
    _BACKENDS[name] = target


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, the library's own first."""
    return tuple(_registered())


def _registered() -> dict[str, str]:
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    # twice: own names come first, and their values last
    return _BACKENDS | found | _BACKENDS


def load_backend(name: str | BackendFactory) -> BackendFactory:
    """Import a backend, or compose one of several.

    Parameters
    ----------
    name : str or BackendFactory
        A backend; or ``"prefill,decode"`` or ``"prefill,decode,verify"``, see
        `specattn.backends.by_phase.by_phase`. What is no name is returned as it is.

    Raises
    ------
    UnsupportedError
        If there is no backend of that name, or it cannot be imported.
    ValueError
        If it is neither a name nor callable.
    """
    if not isinstance(name, str):
        function("backend", name)
        return name
    if "," in name:
        return _load_by_phase(name)
    # to look through what is installed takes milliseconds, and its names come last
    registered = _BACKENDS if name in _BACKENDS else _registered()
    if name not in registered:
        known = ", ".join(("auto", *registered))
        raise UnsupportedError(f"backend {name!r}", [f"unknown; choose one of {known}"])
    backend: BackendFactory = imported(registered[name], name)
    return backend


def _load_by_phase(name: str) -> BackendFactory:
    from specattn.backends.by_phase import by_phase

    prefill, decode, *verify = (part.strip() for part in name.split(","))
    if len(verify) > 1 or "auto" in (prefill, decode, *verify):
        raise UnsupportedError(
            f"backend {name!r}", ["a composite is named prefill,decode[,verify], without auto"]
        )
    return by_phase(prefill=prefill, decode=decode, verify=verify[0] if verify else None)


def available(
    backend: str | BackendFactory, config: AttnConfig | None, device: torch.device
) -> list[str]:
    """Say why ``backend`` cannot serve ``config`` on ``device``; empty means it can.

    With ``config=None`` only the device and the installed libraries are asked about.

    Raises
    ------
    UnsupportedError
        If there is no backend of that name, or it cannot be imported.
    """
    return reasons_of(load_backend(backend), config, device)


#: What ``auto`` tries, first to last, and why; docs/backends.md has the numbers.
AUTO: dict[str, dict[str, str]] = {
    "cuda": {
        "triton": "one captured kernel for chains and trees, without host planning",
        "triton_mla": "the same for latent attention, whose heads are wider",
        "flashinfer": "compiled kernels where the library's own cannot serve",
        "torch_native": "serves everything, eagerly",
    },
    "cpu": {"torch_native": "Triton would run in its interpreter"},
}


def choose_backend(
    backend: str | BackendFactory, configs: list[AttnConfig], device: torch.device
) -> BackendFactory:
    """Return what makes the backends for layers of these configurations.

    Parameters
    ----------
    backend : str or BackendFactory
        A backend, or a composite, which must then serve every configuration. By name also
        ``"prefill,decode[,verify]"``, and ``"auto"``: the first of `AUTO` that serves, and beside
        it whatever `specattn.backends.fastest` has on record as faster. The choices are logged, and
        what stood in the way of others.
    configs : list of AttnConfig
        The distinct layer configurations.
    device : torch.device
        Where the pools live.

    Raises
    ------
    UnsupportedError
        If a backend named explicitly, or every candidate of ``auto``, cannot serve.
    """
    if backend == "auto":
        return _choose(configs, device)
    chosen = load_backend(backend)
    reasons = _all_reasons(chosen, configs, device)
    if reasons:
        raise UnsupportedError(f"backend {chosen.name!r} on {device}", reasons)
    return chosen


def _choose(configs: list[AttnConfig], device: torch.device) -> BackendFactory:
    from specattn.backends.fastest import faster

    refused: dict[str, list[str]] = {}
    for name, why in AUTO.get(device.type, AUTO["cpu"]).items():
        candidate = load_backend(name)
        reasons = _all_reasons(candidate, configs, device)
        if not reasons:
            for other, stood in refused.items():
                log.warning("backend auto: not %s on %s: %s", other, device, "; ".join(stood))
            log.info("backend auto: %s on %s (%s)", name, device, why)
            return faster(candidate, configs, device)
        refused[name] = reasons
    raise UnsupportedError(
        f"backend 'auto' on {device}",
        [f"{name}: {reason}" for name, reasons in refused.items() for reason in reasons],
    )


def _all_reasons(
    backend: BackendFactory, configs: list[AttnConfig], device: torch.device
) -> list[str]:
    found = [reason for config in configs for reason in reasons_of(backend, config, device)]
    return list(dict.fromkeys(found))
