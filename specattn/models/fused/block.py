"""A fused decoder layer: packed weights, and the operations between their products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from specattn.attention.bound import BoundLayers
from specattn.errors import ModelError
from specattn.kernels.fused import (
    Rotation,
    add_rms_norm,
    qk_norm_rope_store_kv,
    silu_mul,
    split_k_reduce,
)
from specattn.kernels.fused.stream import stream_gated, stream_linear, streams
from specattn.models.shards import is_sharded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specattn.config import AttnConfig
    from specattn.speculative.model import Attend

# The angles of these rope types depend on the position alone.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Kernels are compiled for the divisibility of a table's last position.
_TABLE_STEP = 64
# The kernel that rotates heads adds these modules' biases.
_BIASED = ("q_proj", "k_proj", "v_proj")
# The fused path uses nothing but the weights of these modules, and of those above their biases.
_PLAIN = {"_proj": nn.Linear, "lm_head": nn.Linear, "embed_tokens": nn.Embedding}


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Rotation angles of L positions, by a module of nothing else."""

    rotary: nn.Module
    length: int

    @cached_property
    def rows(self) -> Tensor:
        """``[L, D]`` float32, see `Rotation`; computed on first use, outside any capture."""
        buffer = next(self.rotary.buffers())
        positions = torch.arange(self.length, device=buffer.device)[None]
        with torch.no_grad():
            cosine, sine = self.rotary(buffer.new_empty(1, dtype=torch.float32), positions)
        half = cosine.shape[-1] // 2  # [1, L, D]
        return torch.cat([cosine[0, :, :half], sine[0, :, :half]], dim=-1)

    def of_length(self, length: int) -> RotaryTable:
        """Return the table of ``length`` positions, itself if it has them."""
        length = -(-length // _TABLE_STEP) * _TABLE_STEP
        table = self if length == self.length else RotaryTable(self.rotary, length)
        _ = table.rows
        return table


@dataclass(frozen=True, eq=False)
class Block:
    """The weights of a decoder layer, each ``[out, in]``."""

    geometry: AttnConfig
    rotary: RotaryTable  # which layers share
    head_norms: tuple[Tensor, Tensor] | None  # [D] each: of query heads and of key heads
    eps: float  # of every norm
    input_norm: Tensor  # [H], before attention
    post_norm: Tensor  # [H], before the feed-forward part
    qkv: Tensor  # [(Hq + 2 Hkv) D, H]: queries, keys and values
    qkv_bias: Tensor | None  # [(Hq + 2 Hkv) D]
    o: Tensor  # [H, Hq D], the output projection
    gate_up: Tensor  # [2 I, H]: gates, then the values they gate
    down: Tensor  # [H, I]

    @classmethod
    def of_layer(
        cls, layer: nn.Module, rotary: RotaryTable, geometry: AttnConfig, eps: float
    ) -> Self:
        """Pack a transformers layer's weights, which become views of that."""
        parts: Any = layer
        attention, mlp = parts.self_attn, parts.mlp
        heads = attention.q_proj, attention.k_proj, attention.v_proj
        norms = None
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight, attention.k_norm.weight
        return cls(
            geometry,
            rotary,
            norms,
            eps,
            parts.input_layernorm.weight,
            parts.post_attention_layernorm.weight,
            _pack(heads),
            _pack_biases(heads),
            attention.o_proj.weight,
            _pack((mlp.gate_proj, mlp.up_proj)),
            mlp.down_proj.weight,
        )

    @cached_property
    def rotation(self) -> Rotation:
        """The heads' bias, norms and position embedding, as the kernels take them."""
        return Rotation(self.rotary.rows, self.head_norms, self.eps, self.qkv_bias)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Rotation]:
        """Return keys and values ``[S, T, 2 Hkv D]``, and their rotation."""
        first = self.geometry.num_qo_heads * self.geometry.head_dim
        rotation = self.rotation
        if rotation.bias is not None:
            rotation = replace(rotation, bias=rotation.bias[first:])
        return project(x, self.qkv[first:]), rotation

    def attend(
        self,
        x: Tensor,
        stream: Tensor,
        layer: int,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend with the normed ``x``, and add the result to the stream.

        Returns the norm of the new stream, and the stream, ``[R, H]`` each.
        """
        parts = project(x, self.qkv)
        if isinstance(attend, BoundLayers):
            out = attend.packed(layer, parts, positions, self.rotation)
        else:
            out = attend(layer, *self._heads(parts, positions))
        result: tuple[Tensor, Tensor] = add_rms_norm(
            project(out.flatten(1), self.o), stream, self.post_norm, self.eps, rows=rows
        )
        return result

    def feed(self, x: Tensor) -> Tensor:
        """Feed ``x [T, H]`` forward; returns ``parts [S, T, H]``."""
        if streams(x, self.gate_up, gated=True):
            return project(stream_gated(x, self.gate_up), self.down)
        gated = silu_mul(project(x, self.gate_up), x.dtype)
        return project(gated, self.down)

    def _heads(self, parts: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rotated heads, for an `Attend` that stores them itself."""
        shape, count = self.geometry, len(positions)
        q, k, v = (
            parts.new_empty(count, heads, shape.head_dim, dtype=shape.dtype)
            for heads in (shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        turn = self.rotation
        qk_norm_rope_store_kv(parts, positions, turn, q, k, v, None)
        return q, k, v


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by ``weight [out, in]`` in S parts of the product."""
    if streams(x, weight):
        return stream_linear(x, weight)
    return nn.functional.linear(x, weight)[None]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``x [T, in]`` by ``weight [out, in]``; returns ``[T, out]``."""
    parts = project(x, weight)
    if len(parts) == 1:
        return parts[0]
    total: Tensor = split_k_reduce(parts, x.dtype)
    return total


def _pack(projections: Sequence[nn.Linear], what: str = "weight") -> Tensor:
    """Stack weights or biases of modules, which keep views."""
    packed = torch.cat([getattr(part, what).detach() for part in projections])
    pieces = packed.split([part.out_features for part in projections])
    for part, piece in zip(projections, pieces, strict=True):
        setattr(part, what, nn.Parameter(piece, requires_grad=False))
    return packed


def _pack_biases(projections: Sequence[Any]) -> Tensor | None:
    """Stack the biases of modules, if there are any."""
    if all(part.bias is None for part in projections):
        return None
    for part in projections:
        if part.bias is None:
            part.bias = nn.Parameter(part.weight.new_zeros(part.out_features))
    return _pack(projections, "bias")


def refuse_unless_fused(
    argument: str, config: Any, parts: Iterable[tuple[str, nn.Module]], *others: str
) -> None:
    """Refuse a model that the kernels do not compute.

    Parameters
    ----------
    argument : str
        ``"target"`` or ``"draft"``.
    config : PretrainedConfig
        The model's configuration, of Llama or a model like it.
    parts : iterable of (str, nn.Module)
        The modules by name.
    *others : str
        Reasons that the caller knows already.

    Raises
    ------
    ModelError
        With all reasons in one line.
    """
    reasons = list(others)
    if not others and config.hidden_act != "silu":
        reasons.append(f"hidden_act is {config.hidden_act!r}, not 'silu'")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        reasons.append(f"rope_type {rope!r} is not one of {', '.join(ROPE_TYPES)}")
    odd = (why for name, part in parts if (why := _oddity(name, part)))
    if first := next(odd, None):
        reasons.append(first)
    if reasons:
        raise ModelError(argument, f"unsupported by the fused path: {'; '.join(reasons)}")


def _oddity(name: str, part: nn.Module) -> str:
    """Say what a module computes besides its product, or nothing."""
    if is_sharded(part, recurse=False):
        return f"{name} is sharded over ranks"
    if getattr(part, "bias", None) is not None and not name.endswith(_BIASED):
        return f"{name} has a bias"
    for suffix, plain in _PLAIN.items():
        # A quantised or adapted layer has scales or further weights.
        if name.endswith(suffix) and type(part) is not plain:
            return f"{name} is a {type(part).__name__}"
    return ""
