"""What configurations of FP8 checkpoints say about scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from specattn.kernels.fused.fp8 import BLOCK
from specattn.kernels.launch import cdiv

if TYPE_CHECKING:
    from collections.abc import Mapping

Stated = dict[str, Any]

_COMMON = {"num_bits": 8, "type": "float"}
#: What compressed-tensors says of weights and of activations, by strategy.
_SERVED: Mapping[str, tuple[Stated, Stated]] = {
    "channel": ({}, {"strategy": "token"}),
    "block": ({"block_structure": [BLOCK, BLOCK]}, {"strategy": "group", "group_size": BLOCK}),
}


class Scales(NamedTuple):
    """Where float8 weights have their scales.

    Parameters
    ----------
    name : str
        What follows a weight's module.
    height : int
        Rows that share a scale: 1, over all columns, or 128, over 128 of them.
    """

    name: str
    height: int

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight."""
        rows, columns = weight
        return (rows, 1) if self.height == 1 else (cdiv(rows, BLOCK), cdiv(columns, BLOCK))


def unread_blocks(stated: Stated) -> str:
    """Say why weights of ``quant_method: fp8`` are not read, if so."""
    block, kind = stated.get("weight_block_size"), stated.get("scale_fmt", "float")
    if stated.get("activation_scheme", "dynamic") != "dynamic":
        return "static activation scales"
    if list(block or ()) != [BLOCK, BLOCK]:
        return f"blocks {block}, not [{BLOCK}, {BLOCK}]"
    return "" if kind == "float" else f"{kind} scales"


def scales_of(stated: Stated) -> Scales:
    """Return where weights have their scales.

    Parameters
    ----------
    stated : dict
        ``quantization_config`` of a checkpoint.

    Raises
    ------
    ValueError
        If the weights are not read, with what they are.
    """
    method = stated.get("quant_method")
    if method == "fp8":
        if reason := unread_blocks(stated):
            raise ValueError(f"FP8 of {reason}")
        return Scales("weight_scale_inv", BLOCK)
    if method != "compressed-tensors":
        raise ValueError(f"quant_method {method!r}")
    found = {_strategy(group) for group in (stated.get("config_groups") or {}).values()}
    if len(found) != 1:
        raise ValueError(f"compressed-tensors of {len(found)} kinds of weights")
    return Scales("weight_scale", 1 if found == {"channel"} else BLOCK)


def _strategy(group: Stated) -> str:
    """Return how a group of compressed-tensors scales weights."""
    weights, rows = (group.get(name) or {} for name in ("weights", "input_activations"))
    kind = str(weights.get("strategy"))
    for_weights, for_rows = _SERVED.get(kind, ({}, {}))
    served = _has(weights, _COMMON | for_weights) and _has(
        rows, _COMMON | for_rows | {"dynamic": True}
    )
    if kind not in _SERVED or not served:
        raise ValueError(f"compressed-tensors of weights {weights} and activations {rows or None}")
    return kind


def _has(stated: Stated, wanted: Stated) -> bool:
    return all(stated.get(key) == value for key, value in wanted.items())
