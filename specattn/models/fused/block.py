"""Fused decoder layers: packed weights, and the operations between their products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor, nn

from specattn.attention.bound import BoundLayers
from specattn.kernels.fused import (
    Rotation,
    add_rms_norm,
    embed_norm_pair,
    qk_norm_rope_store_kv,
)
from specattn.kernels.fused.fp8 import (
    RowsFormat,
    add_norm_scaled,
    embed_norm_pair_scaled,
    gate_heads_scaled,
)
from specattn.kernels.fused.gates import gate_heads, gather_columns
from specattn.models.fused.family import LLAMA, Family, activation_of
from specattn.models.fused.projection import Projection
from specattn.models.fused.readers import projection_of
from specattn.models.hf import refuse_rescaling, rescaling_length
from specattn.models.mixers import INTERLEAVED, PLAIN
from specattn.models.shards import is_sharded, own

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from specattn.config import AttnConfig, LayerConfig
    from specattn.speculative.model import Attend

# Kernels are compiled for the divisibility of a table's last position.
_TABLE_STEP = 64
#: Projections that are packed, under their names in a layer.
HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATES = ("mlp.gate_proj", "mlp.up_proj")
#: Those of whose columns ranks have a part each, so that they add up products.
SUMMED = ("self_attn.o_proj", "mlp.down_proj")
#: Those of layers that mix by the gated delta rule; each group is packed.
MIXED = tuple(
    tuple(f"linear_attn.{name}" for name in names)
    for names in (PLAIN[:2], PLAIN[2:], INTERLEAVED[:1], INTERLEAVED[1:])
)
OUT = "linear_attn.out_proj"


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Rotation angles of L positions, by a module of nothing else."""

    rotary: nn.Module
    length: int
    argument: str = "target"  # whose rotations these are
    still: int = 0  # pairs of dimensions that are not rotated, behind the others
    layer_type: str = ""  # if the module has tables by type of layer

    @cached_property
    def rows(self) -> Tensor:
        """``[L, D]`` float32, see `Rotation`; computed on first use, outside any capture."""
        buffer, kind = next(self.rotary.buffers()), (self.layer_type,) * bool(self.layer_type)
        positions = torch.arange(self.length, device=buffer.device)[None]
        if hasattr(self.rotary, "mrope_section"):
            # those of a text are alike in all grids; some releases expand none
            positions = positions.expand(3, 1, -1)
        with torch.no_grad():
            cosine, sine = self.rotary(buffer.new_empty(1, dtype=torch.float32), positions, *kind)
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


class Feed(Protocol):
    """The feed-forward part of a layer."""

    @property
    def rows_format(self) -> RowsFormat | None:
        """How its rows are quantised, if they are."""

    def __call__(self, x: Any) -> Tensor:
        """Feed normed rows ``[T, H]`` forward; returns ``parts [S, T, H]``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedFeed:
    """A feed-forward part whose values are gated.

    Parameters
    ----------
    gate_up : Projection
        ``[2 I, H]``: gates, then the values they gate.
    down : Projection
        ``[H, I]``.
    activation : callable, optional
        Of the gates; SiLU by default.
    """

    gate_up: Projection
    down: Projection
    activation: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of_weights(cls, projections: Mapping[str, Projection], config: Any) -> Self:
        """Pack a layer's weights, under the names of a transformers layer.

        Its configuration has the activation.
        """
        return cls(
            gate_up=Projection.stacked([projections[name] for name in GATES]),
            down=projections["mlp.down_proj"],
            activation=activation_of(config),
        )

    @cached_property
    def rows_format(self) -> RowsFormat | None:
        """How its rows are quantised, if they are."""
        return self.gate_up.rows_format

    def __call__(self, x: Any) -> Tensor:
        """Feed ``x [T, H]`` forward; returns ``parts [S, T, H]``."""
        if self.activation is None:
            return self.down.parts(self.gate_up.gated(x, self.down.rows_format))
        gate, up = self.gate_up.product(x).chunk(2, dim=-1)
        return self.down.parts(self.activation(gate) * up)


@dataclass(frozen=True, eq=False)
class ModuleFeed:
    """A feed-forward part that the host's module computes, such as experts."""

    module: nn.Module
    rows_format: None = None

    def __call__(self, x: Any) -> Tensor:
        """Feed ``x [T, H]`` forward; returns ``parts [1, T, H]``."""
        found: Tensor = self.module(x[None])
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """The weights of a decoder layer.

    Parameters
    ----------
    geometry : AttnConfig
        Of its attention.
    rotary : RotaryTable
        Which layers may share.
    head_norms : tuple of Tensor, optional
        ``[D]`` each: the weights of the norms of query heads and of key heads.
    eps : float
        Of every norm.
    input_norm, post_norm : Tensor
        ``[H]``: the weights of the norms before attention and before the feed-forward part.
    added_norms : tuple of Tensor, optional
        ``[H]`` each: the weights of the norms of what attention and the feed-forward part add to
        the stream.
    columns : Tensor, optional
        ``[(2 Hq + 2 Hkv) D]`` int64, of layers with gates: which columns of the product are
        queries, keys, values, and gates of what queries give.
    qkv : Projection
        ``[(Hq + 2 Hkv) D, H]``: queries, keys and values; with ``columns`` gates among them.
    o : Projection
        ``[H, Hq D]``.
    feed : Feed
        The feed-forward part.
    """

    geometry: AttnConfig
    rotary: RotaryTable
    head_norms: tuple[Tensor, Tensor] | None = None
    eps: float
    input_norm: Tensor
    post_norm: Tensor
    qkv: Projection
    o: Projection
    feed: Feed
    added_norms: tuple[Tensor | None, Tensor | None] = (None, None)
    columns: Tensor | None = None

    @classmethod
    def of_weights(
        cls,
        projections: Mapping[str, Projection],
        norms: Mapping[str, Tensor],
        rotary: RotaryTable,
        geometry: AttnConfig,
        feed: Feed,
        family: Family = LLAMA,
    ) -> Self:
        """Pack a layer's weights, under the names of a transformers layer.

        The table's configuration, a transformers model's, has the epsilon.
        """
        config: Any = rotary.rotary.config
        norms = {
            name.removesuffix(".weight"): family.norm(weight)
            for name, weight in norms.items()
            if name.endswith("norm.weight")
        }
        found = norms_of(norms, family)
        columns = None
        if family.gated:
            order = rotated_order(geometry.head_dim, rotary.still).to(found["post_norm"].device)
            columns = _gated_columns(geometry, order)
            if found["head_norms"] is not None:
                found["head_norms"] = tuple(one[order] for one in found["head_norms"])
        return cls(
            geometry=geometry,
            rotary=rotary,
            eps=config.rms_norm_eps,
            **found,
            qkv=Projection.stacked([projections[name] for name in HEADS]),
            o=projections["self_attn.o_proj"],
            feed=feed,
            columns=columns,
        )

    @classmethod
    def of_layer(
        cls,
        layer: nn.Module,
        rotary: RotaryTable,
        geometry: AttnConfig,
        family: Family = LLAMA,
        group: ProcessGroup | None = None,
    ) -> Self:
        """Pack a transformers layer's weights, which become views of that.

        Of a layer that the ranks of ``group`` share, these are this rank's.
        """
        modules = projections_of(layer)
        projections = {name: projection_of(part) for name, part in modules.items()}
        if group is not None:
            for name in projections.keys() & set(SUMMED):
                projections[name] = projections[name].summed(group)
        norms = {name: own(one.detach()) for name, one in layer.named_parameters()}
        feed = feed_of(layer, modules, rotary.rotary.config, projections)
        block = cls.of_weights(projections, norms, rotary, geometry, feed, family)
        block.qkv.lend([modules[name] for name in HEADS])
        return block

    @property
    def rows_format(self) -> RowsFormat | None:
        """How the rows of its first product are quantised, if they are."""
        return self.qkv.rows_format

    def prepare(self) -> None:
        """Try out the kernels of its products, which a capture cannot do."""
        feed = self.feed
        fed = (feed.gate_up, feed.down) if isinstance(feed, GatedFeed) else ()
        for part in (self.qkv, self.o, *fed):
            part.prepare()

    @cached_property
    def rotation(self) -> Rotation:
        """The heads' bias, norms and position embedding, as the kernels take them."""
        # that of gates is in the product
        bias = self.qkv.bias if self.columns is None else None
        return Rotation(self.rotary.rows, self.head_norms, self.eps, bias)

    @cached_property
    def _heads_alone(self) -> Projection:
        """The projection to heads; `rotation` has its bias."""
        return self.qkv.without_bias()

    @cached_property
    def _keys_values(self) -> Projection:
        """The projection to keys and values."""
        return self.qkv.rows(self.geometry.num_qo_heads * self.geometry.head_dim)

    def keys_values(self, x: Any) -> tuple[Tensor, Rotation]:
        """Return keys and values ``[S, T, 2 Hkv D]``, and their rotation."""
        rotation = replace(self.rotation, bias=self._keys_values.bias)
        return self._keys_values.without_bias().parts(x), rotation

    def attend(
        self,
        x: Any,
        stream: Tensor,
        layer: int,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> tuple[Any, Tensor]:
        """Attend with the normed ``x``, and add the result to the stream.

        Returns the norm of the new stream, and the stream, ``[R, H]`` each. Both norms are as
        `add_norm_for` returns them, for the heads and for the feed-forward part.
        """
        if self.columns is None:
            parts = self._heads_alone.parts(x)
        else:
            given = gather_columns(self.qkv.parts(x), self.columns, self.geometry.dtype)
            gated = self.geometry.num_qo_heads * self.geometry.head_dim
            parts, gates = given[None, :, :-gated], given[:, -gated:]
        out: Any
        if isinstance(attend, BoundLayers):
            # gates come between
            how = self.o.rows_format if self.columns is None else None
            out = attend.packed(layer, parts, positions, self.rotation, how)
        else:
            out = attend(layer, *self._heads(parts, positions)).flatten(1)
        if self.columns is not None:
            out = gate_heads_for(self.o.rows_format, out, gates)
        return add_norm_for(
            self.feed.rows_format,
            self.o.parts(out),
            stream,
            self.post_norm,
            self.eps,
            rows=rows,
            added_weight=self.added_norms[0],
        )

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


def norms_of(norms: Mapping[str, Tensor], family: Family) -> dict[str, Any]:
    """Return the norms of a `Block`, by its parameters.

    Parameters
    ----------
    norms : mapping of str to Tensor
        ``[H]`` or ``[D]`` each: what a layer's norms multiply by, under transformers' names.
    family : Family
        What the layer is of.
    """
    post_norm = norms["post_attention_layernorm"]
    added: tuple[Tensor | None, Tensor | None] = (None, None)
    if family.norms == "sandwich":
        added = post_norm, norms["post_feedforward_layernorm"]
        post_norm = norms["pre_feedforward_layernorm"]
    head_norms = None
    if "self_attn.q_norm" in norms:
        head_norms = norms["self_attn.q_norm"], norms["self_attn.k_norm"]
    return {
        "head_norms": head_norms,
        # EAGLE's first layer has none
        "input_norm": norms.get("input_layernorm", post_norm),
        "post_norm": post_norm,
        "added_norms": added,
    }


def rotated_order(size: int, still: int) -> Tensor:
    """Return an order of dimensions for heads rotated in part.

    The first of a head are rotated. In this order, each lies half a head before the one that it is
    rotated with, and ``still`` pairs stay as they are.
    """
    turned = size // 2 - still
    dims = torch.arange(size)
    first, second, *rest = dims.split([turned, turned, still, still])
    return torch.cat([first, rest[0], second, rest[1]])


def _gated_columns(geometry: AttnConfig, order: Tensor) -> Tensor:
    """Return `Block.columns` where each query head lies beside its gates."""
    heads, kv, size = geometry.num_qo_heads, geometry.num_kv_heads, geometry.head_dim
    columns = torch.arange((2 * heads + 2 * kv) * size, device=order.device).view(-1, size)
    queries, keys, values = columns.split([2 * heads, kv, kv])
    found = (queries[::2, order], keys[:, order], values, queries[1::2])
    return torch.cat([one.flatten() for one in found])


def add_norm_for(
    how: RowsFormat | None,
    partials: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    **options: Any,
) -> tuple[Any, Tensor]:
    """Add to the stream, and norm the sum for its reader.

    Parameters
    ----------
    how : RowsFormat, optional
        How what reads the norm takes its rows: then the norm is a `ScaledRows`, else a Tensor.
    partials, residual, weight, eps, **options
        As `add_rms_norm` takes them.
    """
    if how is None:
        return add_rms_norm(partials, residual, weight, eps, **options)
    return add_norm_scaled(partials, residual, weight, eps, how, **options)


def embed_norm_pair_for(how: RowsFormat | None, *args: Any, **options: Any) -> tuple[Any, Tensor]:
    """Norm embeddings and hidden states for their reader, as `add_norm_for` norms.

    The other arguments are those of `embed_norm_pair`.
    """
    if how is None:
        return embed_norm_pair(*args, **options)
    return embed_norm_pair_scaled(*args, how=how, **options)


def gate_heads_for(how: RowsFormat | None, x: Tensor, gates: Tensor) -> Any:
    """Gate what heads give for its reader, as `add_norm_for` norms."""
    return gate_heads(x, gates) if how is None else gate_heads_scaled(x, gates, how)


def projections_of(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose weights are read, by name."""
    names = (*HEADS, *GATES, *SUMMED, *chain.from_iterable(MIXED), OUT)
    return {name: part for name, part in layer.named_modules() if name in names}


def feed_of(
    layer: nn.Module,
    modules: Mapping[str, nn.Module],
    config: Any,
    projections: Mapping[str, Projection] | None = None,
) -> GatedFeed | ModuleFeed:
    """Pack the feed-forward part of a transformers layer, or take its module.

    Parameters
    ----------
    layer : Module
        The layer.
    modules : mapping of str to Module
        Those of `projections_of`.
    config : PreTrainedConfig
        It has the activation.
    projections : mapping of str to Projection, optional
        What the modules' weights are read as; by default as `projection_of` reads them.
    """
    if GATES[0] not in modules:
        return ModuleFeed(layer.get_submodule("mlp"))
    if projections is None:
        projections = {name: projection_of(part) for name, part in modules.items()}
    feed = GatedFeed.of_weights(projections, config)
    feed.gate_up.lend([modules[name] for name in GATES])
    return feed


@dataclass(frozen=True, eq=False, kw_only=True)
class FusedModel:
    """The parts that a fused target and draft heads have.

    Parameters
    ----------
    embed_tokens : nn.Embedding
        ``[V, H]``, over target token ids; a head's is the target's own unless its checkpoint has
        one.
        Of another class, and of shards, the module itself is called.
    lm_head : Projection
        ``[V, H]``, or ``[Vd, H]`` of a head; the target's own unless the checkpoint has one.
    blocks : tuple of Block or DeltaBlock
        The weights of every layer.
    features : tuple of int
        The target's hidden states that a draft reads, as in `LoadedTarget`: a target gives
        them, and a head must be given them (pass them to `HFTarget.with_features`).
    """

    embed_tokens: nn.Embedding
    lm_head: Projection
    blocks: tuple[Any, ...]
    features: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """What every layer is."""
        return tuple(block.geometry for block in self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and hidden states."""
        dtype: torch.dtype = self.blocks[0].geometry.dtype
        return dtype

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
        module = self.embed_tokens
        if type(module) is nn.Embedding and not is_sharded(module, recurse=False):
            return input_ids, self.embed_tokens.weight
        # one that scales, or a shard
        embeds: Tensor = self.embed_tokens(input_ids)
        return torch.arange(len(embeds), device=embeds.device), embeds.to(self.dtype)

    def _logits(self, x: Tensor) -> Tensor:
        dtype = self.lm_head.dtype
        return self.lm_head.product(x if dtype is None else x.to(dtype))

    def for_context(self, max_context_len: int) -> Self:
        """Return a model of the same weights that rotates so many positions.

        Later ones count as the last. A model that was never asked has those of its target, and
        computes their angles in its first forward.

        Raises
        ------
        ModelError
            If its rope type rotates contexts of that length in another way.
        """
        turning = [block for block in self.blocks if isinstance(block, Block)]
        given = {id(block.rotary): block.rotary for block in turning}
        tables = {key: rotary.of_length(max_context_len) for key, rotary in given.items()}
        if tables == given:
            return self
        return replace(
            self,
            blocks=tuple(
                replace(one, rotary=tables[id(one.rotary)]) if isinstance(one, Block) else one
                for one in self.blocks
            ),
        )
