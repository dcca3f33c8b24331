"""Weights that transformers has sharded over ranks (``tp_plan="auto"``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from specattn.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

_HEADS = ("num_attention_heads", "num_key_value_heads")


def is_sharded(module: nn.Module, *, recurse: bool = True) -> bool:
    """Return whether this rank holds only a part of some weight."""
    return any(isinstance(weight, DTensor) for weight in module.parameters(recurse))


def own(weight: Tensor) -> Tensor:
    """Return what this rank holds of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def shard_like(piece: Tensor, weight: Tensor) -> Tensor:
    """Return ``piece`` as this rank's part, sharded as ``weight`` is."""
    if not isinstance(weight, DTensor):
        return piece
    return DTensor.from_local(piece, weight.device_mesh, weight.placements, run_check=False)


def shared_axis(weight: Tensor) -> int | None:
    """Return the axis along which ranks share a weight, if they do."""
    placements = weight.placements if isinstance(weight, DTensor) else ()
    return next((one.dim for one in placements if isinstance(one, Shard)), None)


def cuts(weight: Tensor, unit: int) -> bool:
    """Return whether a rank's share is no multiple of ``unit``."""
    axis = shared_axis(weight)
    if axis is None:
        return False
    size, ranks = weight.shape[axis], weight.device_mesh.size()  # type: ignore[attr-defined]
    # all ranks but the last have as many as the first
    share: int = -(-size // ranks)
    return share < size and share % unit != 0


def sum_over(group: ProcessGroup, x: Tensor) -> Tensor:
    """Add up every rank's ``x`` in place."""
    dist.all_reduce(x, group=group)
    return x


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
