"""How the weights of transformers' modules are read."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specattn.config import FLOAT8
from specattn.kernels.fused.fp8 import BLOCK
from specattn.models.fused.projection import ModuleProjection, Projection, own_bias
from specattn.models.fused.scaled import ScaledLinear, ScaledProjection
from specattn.models.shards import cuts, is_sharded, own, shared_axis

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

# what would be served in their place
_INSTEAD = "; quantise the plain checkpoint as it is loaded (quantization='fp8')"


class UnreadError(Exception):
    """What a module is whose weight is not read."""


class CutError(UnreadError):
    """What a module is of whose blocks ranks have parts."""


def _blocks(module: Any) -> Projection:
    """Read an ``FP8Linear``."""
    scale, block = module.weight_scale_inv, module.block_size
    if module.weight.dtype != FLOAT8:
        raise UnreadError(f"an FP8Linear of {module.weight.dtype}")
    if module.activation_scheme != "dynamic":
        raise UnreadError(f"an FP8Linear of static activation scales{_INSTEAD}")
    if block is None or tuple(block) != (BLOCK, BLOCK):
        raise UnreadError(f"an FP8Linear of blocks {block}, not [{BLOCK}, {BLOCK}]{_INSTEAD}")
    if scale.dtype != torch.float32:
        raise UnreadError(f"an FP8Linear of {scale.dtype} scales, not float32{_INSTEAD}")
    check_blocks(module.weight)
    return _scaled(module, own(scale), BLOCK)


def check_blocks(weight: Tensor) -> None:
    """Raise a CutError if a rank has a part of a block."""
    if cuts(weight, BLOCK):
        size = weight.shape[shared_axis(weight) or 0]
        raise CutError(
            f"shared by ranks, whose parts of its {size} rows or columns are no whole blocks of "
            f"{BLOCK}; use fewer ranks"
        )


def _channels(module: Any) -> Projection:
    """Read a ``CompressedTensorsFP8Linear`` or an ``FbgemmFp8Linear``."""
    kind, scale = type(module).__name__, module.weight_scale
    if is_sharded(module):
        raise UnreadError(f"a {kind} that ranks share{_INSTEAD}")
    if scale.dtype != torch.float32 or scale.numel() != len(module.weight):
        found = f"{list(scale.shape)} {scale.dtype} scales, not one per row"
        raise UnreadError(f"a {kind} of {found}{_INSTEAD}")
    most = getattr(module, "input_scale_ub", None)
    if most is not None and not most.isinf().all():
        raise UnreadError(f"a {kind} that cuts activations at {most.item():g}{_INSTEAD}")
    return _scaled(module, scale.reshape(-1, 1), 1)


def _scaled(module: Any, scale: Tensor, height: int) -> Projection:
    numbers = scale.detach().contiguous()
    weight = own(module.weight.detach())
    return ScaledProjection(weight, own_bias(module), scale=numbers, height=height)


#: The readers, by class.
READERS: Mapping[type[nn.Module], Callable[[Any], Projection]] = {
    nn.Linear: lambda module: Projection(own(module.weight), own_bias(module)),
    ScaledLinear: lambda module: module.projection,
}
#: Those of transformers' quantised modules, by name: not every release has each.
QUANTISED: Mapping[str, Callable[[Any], Projection]] = {
    "FP8Linear": _blocks,
    "CompressedTensorsFP8Linear": _channels,
    "FbgemmFp8Linear": _channels,
}


def projection_of(module: nn.Module) -> Projection:
    """Return what this rank holds of a module's weight.

    Raises
    ------
    UnreadError
        If its class has no reader, or its reader does not know weights of this kind.
    """
    kind = type(module)
    read = READERS.get(kind)
    if read is None and kind.__module__.startswith("transformers."):
        read = QUANTISED.get(kind.__name__)
    if read is None:
        raise UnreadError(f"a {kind.__name__}")
    return read(module)


def output_projection(module: Any) -> Projection:
    """Return the projection to logits.

    Of another class, and of shards, the module itself is called.
    """
    if isinstance(module, Projection):
        return module
    if not is_sharded(module, recurse=False):
        with suppress(UnreadError):
            return projection_of(module)
    return ModuleProjection.of(module)
