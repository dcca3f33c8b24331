"""The attention interface of transformers, and what borrows it.

transformers dispatches attention by name, and keyword arguments of a model's call reach that
dispatch: attention of the name registered here is the callable that the model was called with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import AttentionInterface, PreTrainedModel

from specattn.errors import ModelError
from specattn.models.mixers import mixers_of, restore_mixer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from specattn.kernels.gated_delta import LayerParts, LayerWeights
    from specattn.speculative.model import Attend

#: Attention of this name is whatever callable the model was called with.
INTERFACE = "specattn"


@dataclass(frozen=True, eq=False)
class ModelState:
    """A model's attention implementations, and the parts of it that train.

    Parameters
    ----------
    attention : tuple of (PretrainedConfig, str)
        The attention implementation of the model and of each of its parts.
    mixers : tuple of (Module, callable or None)
        The forward of each `mixers_of`, where it is not its class's.
    training, trained : frozenset of str
        The names of modules in training mode, and of parameters with gradients.
    """

    attention: tuple[tuple[Any, str | None], ...]
    mixers: tuple[tuple[nn.Module, Any], ...]
    training: frozenset[str]
    trained: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Read it off a model."""
        return cls(
            tuple((config, config._attn_implementation_internal) for config in _configs(model)),
            tuple((one, vars(one).get("forward")) for one in mixers_of(model)),
            frozenset(name for name, part in model.named_modules() if part.training),
            frozenset(name for name, one in model.named_parameters() if one.requires_grad),
        )

    def restore(self, model: nn.Module) -> None:
        """Put the model back into this state."""
        for config, attention in self.attention:
            config._attn_implementation_internal = attention
        for mixer, forward in self.mixers:
            restore_mixer(mixer, forward)
        for name, part in model.named_modules():
            part.training = name in self.training
        for name, parameter in model.named_parameters():
            # what somebody made in inference mode must not be touched
            if parameter.requires_grad != (name in self.trained):
                parameter.requires_grad_(name in self.trained)


def _configs(model: nn.Module) -> list[Any]:
    """Return the configurations of a model and of its parts, each once."""
    queue: list[Any] = [one.config for one in model.modules() if isinstance(one, PreTrainedModel)]
    found = {id(config): config for config in queue}
    for config in queue:
        parts = [getattr(config, name) for name in config.sub_configs]
        queue += [part for part in parts if part is not None and id(part) not in found]
        found |= {id(part): part for part in parts if part is not None}
    return list(found.values())


# a compiled model leaves its graph here: an attend is Python, of other shapes in every step
@torch.compiler.disable
def dispatch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    specattn_attention: Callable[..., Tensor] | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Hand a layer's attention to the callable of the model's call."""
    if specattn_attention is None:
        raise ModelError(
            "target",
            f"this model ({module.config.model_type}) attends through specattn while an HFTarget "
            "has it or specattn.generate runs; HFTarget.restore gives it its own attention back",
        )
    return specattn_attention(module, query, key, value, attention_mask, **asked), None


@dataclass(frozen=True)
class HostAttend:
    """An `Attend` as transformers' modules call it."""

    attend: Attend

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend with ``[1, heads, T, D]``; return ``[1, T, heads, Dv]``."""
        q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
        # an `attend` of one's own need not know of sinks that a model does not have
        sinks = {} if s_aux is None else {"sinks": s_aux}
        return self.attend(module.layer_idx, q, k, v, **sinks)[None]

    def mix(self, module: Any, parts: LayerParts, weights: LayerWeights) -> Tensor:
        """Mix tokens; see `Attend.mix`."""
        return self.attend.mix(module.layer_idx, parts, weights)


AttentionInterface.register(INTERFACE, dispatch)
