"""Backends that were measured to be faster, where they are.

``fastest.json`` beside this module is a record of ``specattn bench``, by compute capability. What
``auto`` takes follows from it, from what is installed and from the layers alone: nothing is timed,
so that all ranks choose alike. The record says, too, where float8 keys and values are slower.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from specattn.backends import load_backend
from specattn.backends.base import AttentionBackend, CompositeBackend, reasons_of
from specattn.batch import Phase
from specattn.config import FLOAT8
from specattn.errors import UnsupportedError
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.backends.base import BackendFactory, Capabilities
    from specattn.backends.paged import PagedBackend
    from specattn.config import AttnConfig

RECORD = Path(__file__).with_suffix(".json")
#: Forwards that another backend may take over.
PROMPTS, DECODE, CHAINS = "prompts", "decode", "chains"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """A line of the record: who is faster, and at what.

    Parameters
    ----------
    backend : str
        Its name.
    forwards : str
        ``prompts``; ``decode``, of one query token per request; or ``chains`` of more.
    dtype : str
        Of q, k and v, e.g. ``bfloat16``.
    head_dim : int
        As in `AttnConfig`.
    latent_heads : int
        Query heads of ``latent`` layers; 0 for all other layers, with any heads.
    page_size : int
        Slots of a page.
    batch : int
        From how many requests on.
    gain, least : float
        The own kernels' time over the backend's: geometric mean, and in the worst cell.
    cells : int
        How many were measured.
    measured : str
        Card, versions and date.
    """

    backend: str
    forwards: str
    dtype: str
    head_dim: int
    latent_heads: int
    page_size: int
    batch: int
    gain: float
    least: float
    cells: int
    measured: str

    def covers(self, config: AttnConfig) -> bool:
        """Whether such layers were measured: without windows, caps, sinks, float8."""
        return (
            _plain(config)
            and config.kv_dtype is None
            and config.dtype == getattr(torch, self.dtype)
            and config.head_dim == self.head_dim
            and (config.num_qo_heads if config.latent else 0) == self.latent_heads
        )

    def takes(self, plan: AttnPlan | ExtendPlan) -> bool:
        """Whether such forwards were measured: neither trees nor draft extends."""
        if isinstance(plan, ExtendPlan):
            kind, page = PROMPTS, plan.page_size
        elif plan.layout.causal and plan.layout.phase is not Phase.PREFILL:
            kind, page = DECODE if plan.layout.q_len == 1 else CHAINS, plan.layout.page_size
        else:
            return False
        wide = len(plan.req_pool_indices) >= self.batch
        return wide and (kind, page) == (self.forwards, self.page_size)

    @property
    def what(self) -> str:
        """The forwards and layers, in words."""
        layers = f"{self.latent_heads} latent heads" if self.latent_heads else "heads"
        some = f" of {self.batch} requests or more" if self.batch > 1 else ""
        pages = f"pages of {self.page_size}"
        return f"{self.forwards}{some}: {layers} of {self.head_dim} in {self.dtype}, {pages}"

    @property
    def why(self) -> str:
        """The figures, in words."""
        times = f"{self.gain:.2f} times as fast as the own kernels"
        cells = f"{self.cells} cell{'' if self.cells == 1 else 's'}, {self.least:.2f} at worst"
        return f"{times}: {cells}; {self.measured}"

    def told(self, reasons: Sequence[str]) -> str:
        """Say why it is taken, or what stands in its way."""
        if reasons:
            return f"not {self.backend} for {self.what}: {'; '.join(reasons)}"
        return f"{self.backend} for {self.what} ({self.why})"


def _plain(config: AttnConfig) -> bool:
    return config.window_left < 0 and not config.logit_cap and not config.sinks


def _record(device: torch.device) -> dict[str, Any]:
    """Return the tables of a device's compute capability; none for CPUs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return found.get(f"{major}.{minor}", {})


def recorded(device: torch.device) -> tuple[Choice, ...]:
    """Return the choices on record for a device."""
    return tuple(Choice(**one) for one in _record(device).get("auto", ()))


def float8_gains(configs: Sequence[AttnConfig] | None, device: torch.device) -> list[str]:
    """Say how fast float8 keys and values were measured to be.

    A line per head size: with ``configs=None`` all on record, else those of layers that are stored
    so, with bfloat16 queries and nothing else set.
    """
    sizes = {
        one.head_dim
        for one in configs or ()
        if one.kv_dtype == FLOAT8 and one.dtype == torch.bfloat16
        if _plain(one) and not one.deterministic
    }
    return [
        f"float8 keys and values, heads of {size}: {line}"
        for size, line in _record(device).get("float8", {}).items()
        if configs is None or int(size) in sizes
    ]


def made(choice: Choice, config: AttnConfig, device: torch.device) -> PagedBackend:
    """Make a recorded backend.

    Raises
    ------
    UnsupportedError
        If it cannot serve the layers here, or its library does not load.
    """
    backend = load_backend(choice.backend)
    if reasons := reasons_of(backend, config, device):
        raise UnsupportedError(f"backend {backend.name!r}", reasons)
    return cast("PagedBackend", backend(config, device))


def considered(
    configs: Sequence[AttnConfig] | None, device: torch.device
) -> dict[Choice, list[str]]:
    """Return what is on record for layers, with what prevents it.

    With ``configs=None`` only the device and the installed libraries are asked about.
    """
    found: dict[Choice, list[str]] = {}
    for choice in recorded(device):
        if configs is None:
            found[choice] = load_backend(choice.backend).reasons(None, device)
            continue
        for config in filter(choice.covers, configs):
            try:
                made(choice, config, device)
            except UnsupportedError as error:
                found.setdefault(choice, list(error.reasons))
            else:
                found[choice] = []
                break
    return found


def faster(
    base: BackendFactory, configs: Sequence[AttnConfig], device: torch.device
) -> BackendFactory:
    """Return ``base`` with the recorded backends that serve some layer.

    What is chosen is logged, what stands in the way of others, and where float8 is slower.
    """
    found = considered(configs, device)
    for choice, reasons in found.items():
        log.info("backend auto: %s", choice.told(reasons))
    for line in float8_gains(configs, device):
        log.info("backend auto: %s", line)
    chosen = tuple(choice for choice, reasons in found.items() if not reasons)
    return FastestBackend(base, chosen) if chosen else base


@dataclass(frozen=True)
class FastestBackend:
    """A backend for all forwards, and others where they are faster.

    Parameters
    ----------
    base : BackendFactory
        Serves what no choice takes over.
    choices : tuple of Choice
        Of the record.
    """

    base: BackendFactory
    choices: tuple[Choice, ...]

    @property
    def name(self) -> str:
        """E.g. ``auto(triton; prompts fa3)``."""
        parts = dict.fromkeys(f"{one.forwards} {one.backend}" for one in self.choices)
        return f"auto({self.base.name}; {', '.join(parts)})"

    @property
    def capabilities(self) -> Capabilities:
        """Those of the base, which serves where another one does not."""
        return self.base.capabilities

    def reasons(self, config: AttnConfig | None, device: torch.device) -> list[str]:
        """Say why the base cannot serve ``config``."""
        return self.base.reasons(config, device)

    def __call__(self, config: AttnConfig, device: torch.device) -> AttentionBackend:
        """Make the base, and what is faster for layers of this geometry.

        A plan is bound to the first recorded backend that serves it, else to the base.
        """
        base, parts = self.base(config, device), []
        for choice in self.choices:
            if choice.covers(config):
                # layers of one width may still differ in what is not measured, as their values' is
                with suppress(UnsupportedError):
                    parts.append((choice, made(choice, config, device)))

        def serving(plan: Plan) -> AttentionBackend:
            if not isinstance(plan, CsrPlan):
                for choice, backend in parts:
                    if choice.takes(plan) and not backend.refusals(plan):
                        return backend
            return base

        return CompositeBackend(config, base.capabilities, serving) if parts else base
