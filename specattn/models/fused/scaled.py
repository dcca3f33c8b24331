"""Float8 weights of the fused path, and of transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from specattn.kernels.fused.fp8 import (
    BLOCK,
    RowsFormat,
    ScaledRows,
    ScaledWeight,
    many_rows_ready,
    scale_blocks,
    scale_channels,
    scale_rows,
    scaled_linear,
)
from specattn.kernels.fused.stream_fp8 import (
    ready,
    stream_scaled,
    stream_scaled_gated,
    streams_scaled,
)
from specattn.models.fused.projection import Projection, gate_parts, own_bias, stacked_bias
from specattn.models.shards import own, process_group, shard_like, shared_axis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Ways to quantise plain weights: what each does, for the help of options.
FORMATS = {
    "fp8": "blocks of 128 x 128, and rows per 128 columns",
    "fp8-channel": "a scale per row of weights and of what they multiply",
    "fp8-weights": "blocks of 128 x 128, and nothing else",
}
# rows that are quantised at a time
_AT_ONCE = 64 * BLOCK


@dataclass(frozen=True, eq=False)
class ScaledProjection(Projection):
    """A weight in e4m3, which multiplies quantised rows.

    Parameters
    ----------
    scale : Tensor
        ``[ceil(out / height), G]`` float32, see `ScaledWeight`; the other parts are those of
        `Projection`.
    height : int
        Rows that share a scale.
    terms : int
        Of the rows that it multiplies; two quantise the weight alone.
    """

    scale: Tensor = field(kw_only=True)
    height: int = field(kw_only=True)
    terms: int = field(kw_only=True, default=1)

    @classmethod
    def of(cls, scaled: ScaledWeight, bias: Tensor | None = None) -> Self:
        """Return the projection of a quantised weight."""
        return cls(
            scaled.values, bias, scale=scaled.scale, height=scaled.height, terms=scaled.terms
        )

    @cached_property
    def scaled(self) -> ScaledWeight:
        """The weight with its scales."""
        return ScaledWeight(self.weight, self.scale, self.height, self.terms)

    @property
    def dtype(self) -> torch.dtype | None:
        """None, for rows of any dtype are quantised."""
        return None

    @property
    def rows_format(self) -> RowsFormat | None:
        """How rows are quantised."""
        return self.scaled.rows_format

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads of it."""
        return self.weight.nbytes + self.scale.nbytes

    def prepare(self) -> None:
        """Try out the kernels of its products, which a capture cannot do."""
        ready(self.weight.device)
        many_rows_ready(self.scaled)

    def gated(self, x: Any, how: RowsFormat | None = None) -> Any:
        """Return ``silu(x gate) * (x up)``, ``[T, out / 2]``.

        As everywhere, ``x`` is a Tensor, or a `ScaledRows` of `rows_format`.
        """
        if self.bias is not None:
            return super().gated(x, how)
        weight, rows = self.scaled, self._quantised(x)
        if streams_scaled(rows, weight, gated=True):
            return stream_scaled_gated(rows, weight)
        return gate_parts(scaled_linear(rows, weight), x.dtype, how)

    def _quantised(self, x: Any) -> ScaledRows:
        return x if isinstance(x, ScaledRows) else scale_rows(x, self.scaled.rows_format)

    def _parts(self, x: Any) -> Tensor:
        weight, rows = self.scaled, self._quantised(x)
        multiply = stream_scaled if streams_scaled(rows, weight) else scaled_linear
        parts = multiply(rows, weight)
        if self.bias is None:
            return parts
        return (parts.float().sum(0) + self.bias).to(x.dtype)[None]

    def rows(self, first: int, end: int | None = None) -> Self:
        """Return the projection to the columns ``[first, end)`` of the result."""
        part = self.scaled.rows(first, end)
        bias = None if self.bias is None else self.bias[first:end]
        return replace(self, weight=part.values, bias=bias, scale=part.scale, height=part.height)

    def reordered(self, order: Tensor) -> Self:
        """Return the projection to the columns ``order [out]`` of the result."""
        # torch looks no float8 up everywhere
        weight = self.weight.view(torch.uint8)[order].view(self.weight.dtype)
        bias = None if self.bias is None else self.bias[order]
        scale, height = self.scaled.of_height(1).scale[order], self.height
        blocks = scale[::height]
        if not blocks.repeat_interleave(height, 0)[: len(scale)].equal(scale):
            # rows have left their blocks
            blocks, height = scale, 1
        return replace(self, weight=weight, bias=bias, scale=blocks.contiguous(), height=height)

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        """Pack projections of one input, the first one's rows first."""
        return cls.of(ScaledWeight.stacked([part.scaled for part in parts]), stacked_bias(parts))


class ScaledLinear(nn.Module):
    """A module in the place of `nn.Linear`, of a quantised weight.

    Parameters
    ----------
    projection : ScaledProjection
        Its numbers, of a weight that ranks share those of this rank.
    like : Tensor, optional
        What they are in the place of; if ranks share that, the module does what transformers' would
        do. Those that share columns add up.
    """

    def __init__(self, projection: ScaledProjection, like: Tensor | None = None) -> None:
        super().__init__()
        weight = projection.weight if like is None else shard_like(projection.weight, like)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(projection.scale, requires_grad=False)
        bias = projection.bias
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.height, self.terms = projection.height, projection.terms

    @property
    def in_features(self) -> int:
        """The width of what is multiplied."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """The width of the result."""
        return len(self.weight)

    @property
    def projection(self) -> ScaledProjection:
        """Its numbers, as they lie now; of shards this rank's."""
        weight, bias = own(self.weight), own_bias(self)
        return ScaledProjection(
            weight, bias, scale=self.scale, height=self.height, terms=self.terms
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let conversions move the numbers, and convert the bias alone."""
        kept = self.weight, self.scale

        def applied(one: Tensor) -> Tensor:
            found = fn(one)
            if found.dtype == one.dtype or not any(one is part for part in kept):
                return found
            return one.to(found.device)

        super()._apply(applied, recurse)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x [..., in]``; returns ``[..., out]``."""
        projection = self.projection
        if shared_axis(self.weight) == 1 and (group := process_group(self)) is not None:
            projection = projection.summed(group)
        product: Tensor = projection.product(x.flatten(0, -2))
        return product.view(*x.shape[:-1], -1)


def quantise(projection: Projection, kind: str) -> ScaledProjection:
    """Quantise a projection; the numbers of one that is quantised stay.

    Parameters
    ----------
    projection : Projection
        Of plain weights, or of float8 ones.
    kind : str
        One of `FORMATS`.

    Raises
    ------
    ValueError
        If it is quantised in another way.
    """
    if isinstance(projection, ScaledProjection):
        return _as(projection, kind)
    terms = 2 if kind == "fp8-weights" else 1
    scale = scale_channels if kind == "fp8-channel" else scale_blocks
    # whole blocks at a time: float32 numbers of all of a large weight need much memory
    parts = [scale(rows, terms=terms) for rows in projection.weight.split(_AT_ONCE)]
    whole = parts[0] if len(parts) == 1 else ScaledWeight.stacked(parts)
    found = ScaledProjection.of(whole, projection.bias)
    return replace(found, combine=projection.combine, size=projection.size)


def _as(projection: ScaledProjection, kind: str) -> ScaledProjection:
    if kind == "fp8-weights":
        return replace(projection, terms=2)
    by_channel = projection.scale.shape[1] == 1 and projection.height == 1
    if projection.terms > 1 or (kind == "fp8-channel") != by_channel:
        raise ValueError(f"{kind!r} is not how it is quantised already")
    return projection
