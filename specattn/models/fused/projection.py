"""Weights as objects: products, bias, and what ranks make of them.

A dtype of weights is a class, with a row in the table of each reader: that of
`specattn.models.fused.readers` for modules of transformers, that of
`specattn.integrations.sglang.readers` for SGLang's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from specattn.kernels.fused import add_partials
from specattn.kernels.fused.fp8 import gated_scaled
from specattn.kernels.fused.stream import prepare, stream_gated, stream_linear, streams
from specattn.models.shards import own, shard_like, sum_over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from specattn.kernels.fused.fp8 import RowsFormat


@dataclass(frozen=True, eq=False)
class Projection:
    """A weight, and all that its product needs.

    Parameters
    ----------
    weight : Tensor
        ``[out, in]``.
    bias : Tensor, optional
        ``[out]``.
    combine : callable, optional
        Of weights that ranks share: makes the result ``[T, out]`` of every rank's product. It adds
        up products of columns, or puts those of rows side by side.
    size : int, optional
        The columns of the result, where they are not the weight's rows: padding comes last.
    """

    weight: Tensor
    bias: Tensor | None = None
    combine: Callable[[Tensor], Tensor] | None = None
    size: int | None = None

    @property
    def in_features(self) -> int:
        """The width of what is multiplied."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """The width of the result."""
        return len(self.weight) if self.size is None else self.size

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of what is multiplied, None if of any."""
        return self.weight.dtype

    @property
    def rows_format(self) -> RowsFormat | None:
        """How what is multiplied is quantised, if it is."""
        return None

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads of it."""
        return self.weight.nbytes

    def prepare(self) -> None:
        """Try out the kernels of its products, which a capture cannot do."""
        prepare(self.weight)

    def parts(self, x: Tensor) -> Tensor:
        """Multiply ``x [T, in]``; returns ``[S, T, out]``, which add up."""
        if self.combine is not None or self.size is not None:
            return self.product(x)[None]
        return self._parts(x)

    def product(self, x: Tensor) -> Tensor:
        """Multiply ``x [T, in]``; returns ``[T, out]``."""
        parts = self._parts(x)
        total: Tensor = parts[0] if len(parts) == 1 else add_partials(parts, x.dtype)
        if self.combine is not None:
            total = self.combine(total)
        return total if self.size is None else total[:, : self.size]

    def gated(self, x: Any, how: RowsFormat | None = None) -> Any:
        """Return ``silu(x gate) * (x up)``, ``[T, out / 2]``.

        The gates are the first rows.

        Parameters
        ----------
        x : Tensor
            ``[T, in]``.
        how : RowsFormat, optional
            How what reads the result takes its rows. Then the result is a `ScaledRows` where that
            costs no launch, else a Tensor.
        """
        if self.bias is not None:
            gate, up = self.product(x).chunk(2, dim=-1)
            return silu(gate) * up
        if streams(x, self.weight, gated=True):
            return stream_gated(x, self.weight)
        return gate_parts(self._parts(x), x.dtype, how)

    def _parts(self, x: Tensor) -> Tensor:
        if self.bias is None and streams(x, self.weight):
            return stream_linear(x, self.weight)
        return linear(x, self.weight, self.bias)[None]

    def rows(self, first: int, end: int | None = None) -> Self:
        """Return the projection to the columns ``[first, end)`` of the result."""
        bias = None if self.bias is None else self.bias[first:end]
        return replace(self, weight=self.weight[first:end], bias=bias)

    def reordered(self, order: Tensor) -> Self:
        """Return the projection to the columns ``order [out]`` of the result."""
        bias = None if self.bias is None else self.bias[order]
        return replace(self, weight=self.weight[order], bias=bias)

    def summed(self, group: ProcessGroup) -> Self:
        """Return the projection of ranks that share its columns."""
        # once in the sum
        bias = self.bias if group.rank() == 0 else None
        return replace(self, bias=bias, combine=partial(sum_over, group))

    def without_bias(self) -> Self:
        """Return the projection of the weight alone."""
        return replace(self, bias=None)

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        """Pack projections of one input and kind, the first one's rows first."""
        kind = type(parts[0])
        if kind is not cls:
            return kind.stacked(parts)
        weight = torch.cat([part.weight for part in parts])
        return cls(weight, stacked_bias(parts))

    def lend(self, modules: Sequence[Any]) -> None:
        """Make the weights of modules, packed in this order, its views."""
        first = 0
        for module in modules:
            end = first + len(own(module.weight))
            piece = self.rows(first, end)
            for name, view in (("weight", piece.weight), ("bias", piece.bias)):
                if view is not None:
                    _lend(module, name, view)
            first = end


@dataclass(frozen=True, eq=False)
class ModuleProjection(Projection):
    """A product that a module of its host computes.

    Parameters
    ----------
    module : nn.Module
        Called with ``[T, in]``; the other parts are those of `Projection`, of this module.
    first : int
        The first column that is wanted of its result.
    """

    module: Any = None
    first: int = 0

    @classmethod
    def of(cls, module: Any) -> Self:
        """Return the product of a module with a ``weight [out, in]``."""
        return cls(module.weight, size=module.out_features, module=module)

    def product(self, x: Tensor) -> Tensor:
        """Call the module."""
        result: Tensor = self.module(x)
        return result[:, self.first : self.first + self.out_features]

    def rows(self, first: int, end: int | None = None) -> Self:
        """Return the same module, of whose result fewer columns are wanted."""
        size = (self.out_features if end is None else end) - first
        return replace(self, first=self.first + first, size=size)


def _lend(module: Any, name: str, view: Tensor) -> None:
    """Make a parameter a view, and the same object if possible."""
    held = getattr(module, name)
    if type(held) is nn.Parameter and not held.is_inference():
        held.data = view
    else:
        shard = shard_like(view, held)
        setattr(module, name, nn.Parameter(shard, requires_grad=False))


def gate_parts(parts: Tensor, dtype: torch.dtype, how: RowsFormat | None) -> Any:
    """Gate what partials add up to, in one launch.

    ``parts`` are ``[S, T, out]``; the rest is as in `Projection.gated`.
    """
    if how is None:
        return add_partials(parts, dtype, gated=True)
    return gated_scaled(parts, how, dtype)


def own_bias(module: Any) -> Tensor | None:
    """Return what this rank holds of a module's bias."""
    return None if module.bias is None else own(module.bias)


def stacked_bias(parts: Sequence[Projection]) -> Tensor | None:
    """Return the bias of packed projections, of which some may lack one."""
    given = [part.bias for part in parts if part.bias is not None]
    if not given:
        return None
    missing = (given[0].new_zeros(len(part.weight)) for part in parts)
    both = zip(parts, missing, strict=True)
    return torch.cat([zeros if part.bias is None else part.bias for part, zeros in both])
