"""What was read of SGLang's weights follows their updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: How a model of SGLang's names its `Weights`.
ATTRIBUTE = "specattn_weights"
#: Numbers of SGLang's layers that are read once: what float8 keys and values are multiplied by.
NUMBERS = ("k_scale_float", "v_scale_float")


@dataclass(frozen=True, eq=False)
class Weights:
    """Where a model's weights lie, and what was computed of them.

    Fused forwards and graphs read weights in place, and so what SGLang writes there. Tensors that
    were computed of weights are computed again.

    Parameters
    ----------
    model : nn.Module
        SGLang's, with its weights loaded.
    places : dict
        What `places_of` found when it was first read.
    computed : list of tuple
        What makes tensors of the weights, and the tensors.
    """

    model: Any
    places: dict[str, Any]
    computed: list[tuple[Callable[[], tuple[Tensor, ...]], tuple[Tensor, ...]]] = field(
        default_factory=list
    )

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return a model's; it has them from the first call on."""
        if not hasattr(model, ATTRIBUTE):
            setattr(model, ATTRIBUTE, cls(model, places_of(model)))
        found: Self = getattr(model, ATTRIBUTE)
        return found

    @staticmethod
    def follow_in(model: Any) -> str:
        """Call `follow` for a model, if steps read it."""
        found: Weights | None = getattr(model, ATTRIBUTE, None)
        return "" if found is None else found.follow()

    def keep(self, make: Callable[[], tuple[Tensor, ...]], found: tuple[Tensor, ...]) -> None:
        """Keep up to date what ``make`` has found."""
        self.computed.append((make, found))

    def follow(self) -> str:
        """Compute anew what was computed.

        Returns
        -------
        str
            What steps would go on to read as it was, by name; empty if there is none.
        """
        for make, found in self.computed:
            for old, new in zip(found, make(), strict=True):
                old.copy_(new)
        now = places_of(self.model)
        moved = [name for name, place in self.places.items() if now.get(name) != place]
        if not moved:
            return ""
        return (
            f"SGLang has put weights elsewhere ({len(moved)}, {moved[0]} among them), and steps "
            "read them where they were: start SGLang anew with these weights"
        )


def places_of(model: Any) -> dict[str, Any]:
    """Return by name where a model's parameters lie, and its `NUMBERS`."""
    found: dict[str, Any] = {
        name: (one.data_ptr(), one.shape, one.stride(), one.dtype)
        for name, one in model.named_parameters()
    }
    for name, module in model.named_modules():
        found |= {
            f"{name}.{part}": getattr(module, part) for part in NUMBERS if hasattr(module, part)
        }
    return found
