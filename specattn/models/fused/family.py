"""What families of models are, for whoever reads their layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from transformers.activations import ACT2FN

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the layers of a family differ from Llama's.

    Parameters
    ----------
    norms : {"pre", "sandwich"}
        Whether what is added to the stream is normed before it is added, too.
    norm_offset : float
        What is added to the weights of all norms.
    experts : bool
        Whether feed-forward parts may be modules of the host's, run as they are.
    gated : bool
        Whether query heads come with gates of what they give, and are rotated in part.
    """

    norms: Literal["pre", "sandwich"] = "pre"
    norm_offset: float = 0.0
    experts: bool = False
    gated: bool = False

    def norm(self, weight: Tensor) -> Tensor:
        """Return what a norm multiplies by.

        That is the weight itself, or a sum in float32.
        """
        return weight if not self.norm_offset else weight.float() + self.norm_offset


LLAMA = Family()
#: By the model type of transformers' configurations.
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": Family(experts=True),
    "mixtral": Family(experts=True),
    "gemma3_text": Family(norms="sandwich", norm_offset=1.0),
    "qwen3_next": Family(norm_offset=1.0, experts=True, gated=True),
    "qwen3_5_text": Family(norm_offset=1.0, gated=True),
    "qwen3_5_moe_text": Family(norm_offset=1.0, experts=True, gated=True),
}


def activation_of(config: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the activation of a configuration's gates; None is SiLU."""
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    return None if name == "silu" else ACT2FN[name]
