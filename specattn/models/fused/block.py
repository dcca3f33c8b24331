"""Fused decoder layers: packed weights, and the operations between their products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from specattn.attention.bound import BoundLayers
from specattn.kernels.fused import (
    Rotation,
    add_partials,
    add_rms_norm,
    qk_norm_rope_store_kv,
)
from specattn.kernels.fused.stream import stream_gated, stream_linear, streams
from specattn.models.hf import refuse_rescaling, rescaling_length
from specattn.models.shards import is_sharded, own, shard_like, sum_over

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from specattn.config import AttnConfig
    from specattn.speculative.model import Attend

# Kernels are compiled for the divisibility of a table's last position.
_TABLE_STEP = 64
#: Projections that are packed, under their names in a layer.
HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATES = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Rotation angles of L positions, by a module of nothing else."""

    rotary: nn.Module
    length: int
    argument: str = "target"  # whose rotations these are
    still: int = 0  # pairs of dimensions that are not rotated, behind the others

    @cached_property
    def rows(self) -> Tensor:
        """``[L, D]`` float32, see `Rotation`; computed on first use, outside any capture."""
        buffer = next(self.rotary.buffers())
        positions = torch.arange(self.length, device=buffer.device)[None]
        with torch.no_grad():
            cosine, sine = self.rotary(buffer.new_empty(1, dtype=torch.float32), positions)
        half = cosine.shape[-1] // 2  # [1, L, D]
        still = cosine.new_zeros(self.length, self.still)
        return torch.cat([cosine[0, :, :half], still + 1, sine[0, :, :half], still], dim=-1)

    def of_length(self, length: int) -> RotaryTable:
        """Return the table of ``length`` positions, itself if it has them.

        Raises
        ------
        ModelError
            If the rope type rotates contexts of that length in another way.
        """
        config: Any = self.rotary.config
        refuse_rescaling(self.argument, f"the {self.argument}", config, length)
        # with a longer table all its positions would be rotated so
        length = min(-(-length // _TABLE_STEP) * _TABLE_STEP, rescaling_length(config)[0])
        table = self if length == self.length else replace(self, length=length)
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
    # What few models have: other biases, [H], [2 I] and [H], and an activation other than SiLU.
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    # Sums products of ranks that have a part of the heads and of the feed-forward part each.
    reduce: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of_weights(
        cls,
        weights: Mapping[str, Tensor],
        rotary: RotaryTable,
        geometry: AttnConfig,
    ) -> Self:
        """Pack a layer's weights, under the names of a transformers layer.

        The table's configuration, a transformers model's, has the activation and the epsilon.
        """
        config: Any = rotary.rotary.config
        qkv, qkv_bias = _packed(weights, *HEADS)
        gate_up, gate_up_bias = _packed(weights, *GATES)
        norms = None
        if "self_attn.q_norm.weight" in weights:
            norms = weights["self_attn.q_norm.weight"], weights["self_attn.k_norm.weight"]
        post_norm = weights["post_attention_layernorm.weight"]
        return cls(
            geometry,
            rotary,
            norms,
            config.rms_norm_eps,
            # EAGLE's first layer has none
            weights.get("input_layernorm.weight", post_norm),
            post_norm,
            qkv,
            qkv_bias,
            weights["self_attn.o_proj.weight"],
            gate_up,
            weights["mlp.down_proj.weight"],
            weights.get("self_attn.o_proj.bias"),
            gate_up_bias,
            weights.get("mlp.down_proj.bias"),
            None if config.hidden_act == "silu" else ACT2FN[config.hidden_act],
        )

    @classmethod
    def of_layer(
        cls,
        layer: nn.Module,
        rotary: RotaryTable,
        geometry: AttnConfig,
        group: ProcessGroup | None = None,
    ) -> Self:
        """Pack a transformers layer's weights, which become views of that.

        Of a layer that the ranks of ``group`` share, these are this rank's.
        """
        weights = {name: own(one.detach()) for name, one in layer.named_parameters()}
        block = cls.of_weights(weights, rotary, geometry)
        for names, packed, bias in (
            (HEADS, block.qkv, block.qkv_bias),
            (GATES, block.gate_up, block.gate_up_bias),
        ):
            parts: list[Any] = [layer.get_submodule(name) for name in names]
            sizes = [len(weights[f"{name}.weight"]) for name in names]
            for what, whole in (("weight", packed), ("bias", bias)):
                if whole is not None:
                    for part, piece in zip(parts, whole.split(sizes), strict=True):
                        shard = shard_like(piece, part.weight)
                        setattr(part, what, nn.Parameter(shard, requires_grad=False))
        if group is None:
            return block
        # once in the sum over ranks
        biases = (block.o_bias, block.down_bias) if group.rank() == 0 else (None, None)
        return replace(
            block, o_bias=biases[0], down_bias=biases[1], reduce=partial(sum_over, group)
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
            self._summed(out.flatten(1), self.o, self.o_bias),
            stream,
            self.post_norm,
            self.eps,
            rows=rows,
        )
        return result

    def feed(self, x: Tensor) -> Tensor:
        """Feed ``x [T, H]`` forward; returns ``parts [S, T, H]``."""
        if self.activation is not None or self.gate_up_bias is not None:
            gate, up = product(x, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
            gated = (self.activation or nn.functional.silu)(gate) * up
        elif streams(x, self.gate_up, gated=True):
            gated = stream_gated(x, self.gate_up)
        else:
            gated = add_partials(project(x, self.gate_up), x.dtype, gated=True)
        return self._summed(gated, self.down, self.down_bias)

    def _summed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return parts of the sum of all ranks' products."""
        if self.reduce is None:
            return project(x, weight, bias)
        return self.reduce(product(x, weight, bias))[None]

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


@dataclass(frozen=True, eq=False, kw_only=True)
class FusedModel:
    """The parts that a fused target and draft heads have.

    Parameters
    ----------
    embed_tokens : nn.Embedding
        ``[V, H]``, over target token ids; a head's is the target's own unless its checkpoint has
        one.
    lm_head : nn.Linear
        ``[V, H]``, or ``[Vd, H]`` of a head; the target's own unless the checkpoint has one. Of
        other classes than these two, and of shards, the module itself is called.
    blocks : tuple of Block
        The weights of every layer.
    features : tuple of int
        The target's hidden states that a draft reads, as in `LoadedTarget`: a target gives
        them, and a head must be given them (pass them to `HFTarget.with_features`).
    """

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    blocks: tuple[Block, ...]
    features: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[AttnConfig, ...]:
        """The attention geometry of every layer."""
        return tuple(block.geometry for block in self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and hidden states."""
        return self.blocks[0].geometry.dtype

    @property
    def hidden_size(self) -> int:
        """H, the width of one hidden state."""
        return self.lm_head.in_features

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.lm_head.out_features

    def _embedding(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids ``[T]`` and the table of embeddings whose rows they are."""
        if _is_plain(self.embed_tokens, nn.Embedding):
            return input_ids, self.embed_tokens.weight
        # one that scales, or a shard
        embeds: Tensor = self.embed_tokens(input_ids)
        return torch.arange(len(embeds), device=embeds.device), embeds.to(self.dtype)

    def _logits(self, x: Tensor) -> Tensor:
        x = x.to(self.lm_head.weight.dtype)
        if _is_plain(self.lm_head, nn.Linear):
            return product(x, self.lm_head.weight, self.lm_head.bias)
        logits: Tensor = self.lm_head(x)
        return logits

    def for_context(self, max_context_len: int) -> Self:
        """Return a model of the same weights that rotates so many positions.

        Later ones count as the last. A model that was never asked has those of its target, and
        computes their angles in its first forward.

        Raises
        ------
        ModelError
            If its rope type rotates contexts of that length in another way.
        """
        rotary = self.blocks[0].rotary.of_length(max_context_len)
        if rotary is self.blocks[0].rotary:
            return self
        return replace(self, blocks=tuple(replace(one, rotary=rotary) for one in self.blocks))


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by ``weight [out, in]`` in S parts of the product."""
    if bias is None and streams(x, weight):
        return stream_linear(x, weight)
    return nn.functional.linear(x, weight, bias)[None]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x [T, in]`` by ``weight [out, in]``; returns ``[T, out]``."""
    parts = project(x, weight, bias)
    if len(parts) == 1:
        return parts[0]
    total: Tensor = add_partials(parts, x.dtype)
    return total


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module computes nothing but what its whole weights say."""
    return type(module) is kind and not is_sharded(module, recurse=False)


def as_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a module around a weight ``[out, in]``, which it shares."""
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _packed(weights: Mapping[str, Tensor], *names: str) -> tuple[Tensor, Tensor | None]:
    """Stack the weights of projections, and their biases if there are any."""
    parts = [weights[f"{name}.weight"] for name in names]
    found = [weights.get(f"{name}.bias") for name in names]
    if all(bias is None for bias in found):
        return torch.cat(parts), None
    pairs = zip(parts, found, strict=True)
    # a part may lack one
    biases = [one.new_zeros(len(one)) if bias is None else bias for one, bias in pairs]
    return torch.cat(parts), torch.cat(biases)
