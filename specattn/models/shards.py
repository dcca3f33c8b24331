"""Weights that transformers has sharded over ranks (``tp_plan="auto"``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from specattn.errors import ModelError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

_HEADS = ("num_attention_heads", "num_key_value_heads")


def is_sharded(module: nn.Module, *, recurse: bool = True) -> bool:
    """Return whether this rank holds only a part of some weight."""
    return any(isinstance(weight, DTensor) for weight in module.parameters(recurse))


def process_group(module: nn.Module) -> ProcessGroup | None:
    """Return the ranks that share a model's weights, if they are sharded."""
    for weight in module.parameters():
        if isinstance(weight, DTensor) and weight.device_mesh.size() > 1:
            mesh = weight.device_mesh
            return mesh.get_group("tp" if mesh.ndim > 1 else None)
    return None


def too_old(name: str) -> ModelError:
    """Return the error where transformers keeps no record of shards."""
    return ModelError("target", f"{name} cannot be sharded: that needs transformers 5.17 or newer")


def check_heads(name: str, module: Any, config: Any) -> None:
    """Raise a ModelError unless ranks can share the heads evenly."""
    group = process_group(module)
    if group is None:
        if (module.tp_size or 1) > 1:
            raise too_old(name)
        return
    layers = (part for key, part in module.named_modules() if key.endswith("attn"))
    if not any(is_sharded(part) for part in layers):
        return
    for key in _HEADS:
        heads = getattr(config, key, None) or group.size()
        if heads % group.size():
            raise ModelError(
                "target",
                f"{name} has {key} {heads}, which {group.size()} ranks cannot share evenly; every "
                "rank needs as many whole heads as the others",
            )
