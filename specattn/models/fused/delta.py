"""Fused Gated DeltaNet layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from specattn.kernels.fused.gates import gated_rms_norm, gather_columns
from specattn.kernels.gated_delta import LayerParts
from specattn.models.fused.block import GatedFeed, add_norm_for, feed_of, projections_of
from specattn.models.fused.projection import Projection
from specattn.models.fused.readers import projection_of
from specattn.models.mixers import columns_of, layer_weights, names_of, widths_of

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import StateConfig
    from specattn.kernels.fused.fp8 import RowsFormat
    from specattn.kernels.gated_delta import LayerWeights
    from specattn.models.fused.block import Feed
    from specattn.models.fused.family import Family
    from specattn.speculative.model import Attend


@dataclass(frozen=True, eq=False, kw_only=True)
class DeltaBlock:
    """The weights of a layer that mixes by the gated delta rule.

    Parameters
    ----------
    geometry : StateConfig
        Of its mixing.
    eps : float
        Of every norm.
    input_norm, post_norm : Tensor
        ``[H]``: the weights of the norms before mixing and before the feed-forward part.
    mixed : tuple of Projection
        ``[C + HV V + 2 HV, H]``: queries, keys and values, then what gates the output, b and a.
        Two, the second to b and a, where these are not quantised as the others are.
    columns : tuple of Tensor, optional
        Int64, of each product: which of its columns these are, if they are not in that order.
    weights : LayerWeights
        What else it mixes by.
    norm : Tensor
        ``[V]``: the weight of the norm of what every head gives.
    out : Projection
        ``[H, HV V]``.
    feed : Feed
        The feed-forward part.
    """

    geometry: StateConfig
    eps: float
    input_norm: Tensor
    post_norm: Tensor
    mixed: tuple[Projection, ...]
    columns: tuple[Tensor, ...] | None
    weights: LayerWeights
    norm: Tensor
    out: Projection
    feed: Feed
    #: Nothing is normed before it is added to the stream.
    added_norms: tuple[None, None] = (None, None)

    @classmethod
    def of_layer(cls, layer: Any, geometry: StateConfig, family: Family, config: Any) -> Self:
        """Pack a layer of transformers, whose weights become views of it."""
        mixer, modules = layer.linear_attn, projections_of(layer)
        packed = [getattr(mixer, name) for name in names_of(mixer)]
        read, columns = [projection_of(one) for one in packed], columns_of(mixer)
        pieces, ends = [slice(None)], [slice(None)]
        if read[0].rows_format != read[-1].rows_format:
            half, wide = len(read) // 2, sum(widths_of(mixer)[:2])
            pieces, ends = [slice(half), slice(half, None)], [slice(wide), slice(wide, None)]
        mixed = tuple(Projection.stacked(read[piece]) for piece in pieces)
        block = cls(
            geometry=geometry,
            eps=config.rms_norm_eps,
            input_norm=family.norm(layer.input_layernorm.weight.detach()),
            post_norm=family.norm(layer.post_attention_layernorm.weight.detach()),
            mixed=mixed,
            columns=None
            if columns is None
            else tuple(columns[end] - (end.start or 0) for end in ends),
            weights=layer_weights(mixer),
            norm=mixer.norm.weight.detach(),
            out=projection_of(mixer.out_proj),
            feed=feed_of(layer, modules, config),
        )
        for one, piece in zip(mixed, pieces, strict=True):
            one.lend(packed[piece])
        return block

    @property
    def rows_format(self) -> RowsFormat | None:
        """How the rows of its first product are quantised, if they are."""
        return self.mixed[0].rows_format if len(self.mixed) == 1 else None

    def prepare(self) -> None:
        """Try out the kernels of its products, which a capture cannot do."""
        feed = self.feed
        fed = (feed.gate_up, feed.down) if isinstance(feed, GatedFeed) else ()
        for part in (*self.mixed, self.out, *fed):
            part.prepare()

    def _products(self, x: Any) -> list[Tensor]:
        """Return the products ``[S, T, columns]``, their columns in order."""
        if self.columns is not None:
            pairs = zip(self.mixed, self.columns, strict=True)
            dtype = self.geometry.dtype
            return [gather_columns(one.parts(x), columns, dtype)[None] for one, columns in pairs]
        if len(self.mixed) == 1:
            return [self.mixed[0].parts(x)]
        # partials of two products need not be alike
        return [one.product(x)[None] for one in self.mixed]

    def attend(
        self,
        x: Any,
        stream: Tensor,
        layer: int,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> tuple[Any, Tensor]:
        """Mix the normed ``x``, and add to the stream; see `Block.attend`."""
        one, products = self.geometry, self._products(x)
        size = one.conv_channels + one.num_v_heads * one.head_v_dim
        qkv, z = products[0][..., :size].tensor_split([one.conv_channels], -1)
        b, a = products[-1][..., -2 * one.num_v_heads :].chunk(2, -1)
        found = attend.mix(layer, LayerParts(qkv, b, a), self.weights)
        return add_norm_for(
            self.feed.rows_format,
            self.out.parts(gated_rms_norm(found, z, self.norm, self.eps)),
            stream,
            self.post_norm,
            self.eps,
            rows=rows,
        )
