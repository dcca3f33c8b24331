"""The norms of SGLang's layers: their modules, and what these multiply by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from specattn.integrations.sglang.weights import Weights
    from specattn.models.fused.family import Family


@dataclass(frozen=True, eq=False)
class Norms:
    """What norms multiply by: SGLang's weights, or sums of them."""

    family: Family
    weights: Weights

    def of(self, norm: Any) -> Tensor:
        """Return what a norm of SGLang's multiplies by."""
        weight: Tensor = norm.weight.detach()
        found = self.family.norm(weight)
        if found is not weight:
            self.weights.keep(lambda: (self.family.norm(weight),), (found,))
        return found


def norms_in(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the norms of a layer, by name."""
    yield from ((name, one) for name, one in part.named_modules() if name.endswith("norm"))


def norm_class(family: Family) -> tuple[str, str]:
    """Return SGLang's class of norms, and its name of their epsilon."""
    if family.norm_offset:
        return "Gemma3RMSNorm", "eps"
    return "RMSNorm", "variance_epsilon"
