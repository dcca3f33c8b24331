"""One backend for prompts, one for decoding, one for verification."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specattn.backends import load_backend
from specattn.backends.base import Capabilities, CompositeBackend, reasons_of
from specattn.batch import Phase
from specattn.plan import ExtendPlan, Plan

if TYPE_CHECKING:
    import torch

    from specattn.backends.base import AttentionBackend, BackendFactory
    from specattn.config import AttnConfig


def by_phase(
    *,
    prefill: str | BackendFactory,
    decode: str | BackendFactory,
    verify: str | BackendFactory | None = None,
) -> ByPhaseBackend:
    """Return a composite with a backend for every phase.

    Parameters
    ----------
    prefill : str or BackendFactory
        Serves prompts and draft extends.
    decode : str or BackendFactory
        Serves plain decoding and draft decoding.
    verify : str or BackendFactory, optional
        Serves target verification; ``decode`` if omitted.

    Raises
    ------
    UnsupportedError
        If there is no backend of one of the names.
    """
    parts = (prefill, decode, decode if verify is None else verify)
    return ByPhaseBackend(*map(load_backend, parts))


@dataclass(frozen=True)
class ByPhaseBackend:
    """Backends by phase, over one pool, as `by_phase` makes it.

    A backend given twice is made once.
    """

    prefill: BackendFactory
    decode: BackendFactory
    verify: BackendFactory

    @property
    def name(self) -> str:
        """As ``--backend`` takes it."""
        parts = [self.prefill.name, self.decode.name]
        return ",".join(parts if self.verify == self.decode else [*parts, self.verify.name])

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that hold in every phase in which they are asked for."""
        prefill, decode, verify = (
            part.capabilities for part in (self.prefill, self.decode, self.verify)
        )
        return replace(
            Capabilities.merged([prefill, decode, verify]),
            trees=decode.trees and verify.trees,
            lists=decode.lists,
            extend=prefill.extend,
        )

    def reasons(self, config: AttnConfig | None, device: torch.device) -> list[str]:
        """Say which backend stands in the way, in which phase, and why."""
        parts = [("prefill", self.prefill), ("decode", self.decode)]
        if self.verify != self.decode:
            parts.append(("verify", self.verify))
        found = [
            f"{role} {part.name}: {reason}"
            for role, part in parts
            for reason in reasons_of(part, config, device)
        ]
        if not self.prefill.capabilities.extend:
            found.append(f"prefill {self.prefill.name}: it serves no prompts")
        return found

    def __call__(self, config: AttnConfig, device: torch.device) -> AttentionBackend:
        """Make one backend of every kind."""
        kinds = dict.fromkeys((self.prefill, self.decode, self.verify))
        made = {kind: kind(config, device) for kind in kinds}
        decode = made[self.decode]
        phases = {
            Phase.PREFILL: made[self.prefill],
            Phase.DECODE: decode,
            Phase.DRAFT: decode,
            Phase.VERIFY: made[self.verify],
        }

        def serving(plan: Plan) -> AttentionBackend:
            return phases[Phase.PREFILL if isinstance(plan, ExtendPlan) else plan.layout.phase]

        return CompositeBackend(config, self.capabilities, serving)
