"""Multiply rows by float8 (e4m3) weights, half the bytes of 16-bit ones.

Weights have a scale per block of 128 x 128, or per row. Rows are quantised when they are
multiplied: a scale per 128 columns for blocks, else one per row. Two terms of a row,
``scale * (high + low / 16)``, keep what 16 bits hold of it: then weights alone are quantised.

Sums of 128 columns are added up in float32, since float8 products on Hopper sum with 14 bits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, linear, pad, scaled_mm

from specattn.config import FLOAT8
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.attention.tiles import DeviceLimits
from specattn.kernels.fused import add_partials, add_rms_norm, embed_norm_pair, whole_rows
from specattn.kernels.fused.gates import check_gates, gate_heads
from specattn.kernels.gluon_guard import gluon_ok
from specattn.kernels.launch import cdiv, columns_of, launch_options, power_of_2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

launch = TritonModule("specattn.kernels.fused.triton_fp8")

#: Rows and columns of a block.
BLOCK = 128
#: What the second term of a row is multiplied by: e4m3 is off by a 16th at most.
TERM = 16.0
# the largest e4m3 number
_MOST = 448.0
# the least largest number of a block or row: of zeros alone, a scale would be 0
_FLOOR = 1e-10
#: Rows of x that a product copies at a time; terms begin at whole ones.
ROWS_BOX = 16
#: Rows of x that a tile has at most, and up to which reading the weight takes longest.
MAX_ROWS = 64


class RowsFormat(NamedTuple):
    """How a product takes its rows.

    Parameters
    ----------
    groups : int
        Scales of a row: 1, or one per 128 columns.
    terms : int
        Numbers of e4m3 per number of a row: 1 or 2.
    """

    groups: int
    terms: int = 1


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """Rows in e4m3.

    Parameters
    ----------
    values : Tensor
        ``[terms, P, K]`` float8_e4m3fn, contiguous. Of the P rows the first T count; the rest is
        room for copies of 16.
    scales : Tensor
        ``[terms, P, G]`` float32: a scale per 128 columns, or G = 1 of all columns; those of a
        second term are a 16th. A group's lie side by side, as torch's product reads them.
    count : int
        T.
    dtype : torch.dtype
        That of the rows before, and of products.
    """

    values: Tensor
    scales: Tensor
    count: int
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.count

    @property
    def room(self) -> tuple[Tensor, Tensor, int]:
        """What kernels write: values, scales, and P."""
        return self.values, self.scales, self.values.shape[1]

    @property
    def scale(self) -> Tensor:
        """The rows' scales, ``[T, G]``."""
        return self.scales[0, : self.count]

    def restored(self) -> Tensor:
        """Return what the numbers stand for, ``[T, K]`` float32."""
        first, *rest = self.values[:, : len(self)].float()
        whole: Tensor = first + rest[0] / TERM if rest else first
        return whole * _spread(self.scale, whole.shape[1])


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """A weight in e4m3.

    Parameters
    ----------
    values : Tensor
        ``[N, K]`` float8_e4m3fn.
    scale : Tensor
        ``[ceil(N / height), G]`` float32: a scale per 128 columns, or G = 1 of all columns.
    height : int
        Rows that share a scale: 1, or a divisor of 128.
    terms : int
        Of the rows that it multiplies, 1 or 2.
    """

    values: Tensor
    scale: Tensor
    height: int
    terms: int = 1

    @cached_property
    def rows_format(self) -> RowsFormat:
        """How the rows are that it multiplies."""
        return RowsFormat(self.scale.shape[1], self.terms)

    def restored(self) -> Tensor:
        """Return what the numbers stand for, ``[N, K]`` float32."""
        count, size = self.values.shape
        scale = self.scale.repeat_interleave(self.height, 0)[:count]
        return self.values.float() * _spread(scale, size)

    def rows(self, first: int, end: int | None = None) -> ScaledWeight:
        """Return rows of it, of the same memory.

        Scales are copied where the first row lies inside a block.
        """
        first, end, _ = slice(first, end).indices(len(self.values))
        found = self.of_height(gcd(first, self.height))
        scale = found.scale[first // found.height : cdiv(end, found.height)]
        return ScaledWeight(self.values[first:end], scale, found.height, self.terms)

    def of_height(self, height: int) -> ScaledWeight:
        """Return the same weight with a scale per ``height`` rows."""
        if height == self.height:
            return self
        scale = self.scale.repeat_interleave(self.height // height, 0)
        return ScaledWeight(
            self.values, scale[: cdiv(len(self.values), height)], height, self.terms
        )

    @classmethod
    def stacked(cls, parts: Sequence[ScaledWeight]) -> ScaledWeight:
        """Return the rows of all parts.

        Where one ends inside a block, scales are of fewer rows.
        """
        height = gcd(*(part.height for part in parts), *(len(part.values) for part in parts[:-1]))
        parts = [part.of_height(height) for part in parts]
        # torch concatenates no float8 everywhere
        values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FLOAT8)
        scale = torch.cat([part.scale for part in parts])
        return cls(values, scale, height, parts[0].terms)


def scale_blocks(weight: Tensor, *, terms: int = 1) -> ScaledWeight:
    """Quantise ``weight [N, K]`` in blocks of 128 x 128."""
    rows, columns = (cdiv(size, BLOCK) for size in weight.shape)
    room = (0, columns * BLOCK - weight.shape[1], 0, rows * BLOCK - len(weight))
    tiles = pad(weight.float(), room).view(rows, BLOCK, columns, BLOCK)
    scale = _scales(tiles.abs().amax((1, 3)))
    values = _e4m3(tiles, scale[:, None, :, None]).view(rows * BLOCK, columns * BLOCK)
    return ScaledWeight(values[: len(weight), : weight.shape[1]].contiguous(), scale, BLOCK, terms)


def scale_channels(weight: Tensor, *, terms: int = 1) -> ScaledWeight:
    """Quantise ``weight [N, K]`` by a scale per row."""
    scale = _scales(weight.float().abs().amax(1, keepdim=True))
    return ScaledWeight(_e4m3(weight.float(), scale), scale, 1, terms)


def scale_rows(x: Tensor, how: RowsFormat) -> ScaledRows:
    """Quantise ``x [T, K]``, dense in its last axis, for a product."""
    (count, size), (groups, terms) = x.shape, how
    found = rows_like(x, how)
    if has_kernels(x):
        if count:
            constants, spans = _spans(size, how, count)
            launch.scale_rows_kernel[count, spans](
                x,
                *found.room,
                x.stride(0),
                **constants,
                **launch_options(x.device),
            )
        return found
    width = BLOCK if groups > 1 else size
    tiles = pad(x.float(), (0, groups * width - size)).view(count, groups, width)
    values, scale = found.values, _scales(tiles.abs().amax(2))
    found.scales[0, :count] = scale
    scaled = (tiles * (1 / scale)[..., None]).flatten(1)[:, :size].clamp(-_MOST, _MOST)
    values[0, :count] = scaled.to(FLOAT8)
    if terms == 2:
        found.scales[1, :count] = scale / TERM
        values[1, :count] = ((scaled - values[0, :count].float()) * TERM).to(FLOAT8)
    return found


def gated_scaled(partials: Tensor, how: RowsFormat, dtype: torch.dtype) -> ScaledRows:
    """Return ``silu(gate) * up`` of a product's partials, quantised.

    Parameters
    ----------
    partials : Tensor
        ``[S, T, 2 N]``, gates first, dense in its last axis: what `add_partials` gates, rounds and
        `scale_rows` quantises, here in one launch.
    how : RowsFormat
        How what multiplies the result takes it.
    dtype : torch.dtype
        What is quantised is rounded to it before.

    Returns
    -------
    ScaledRows
        ``[T, N]``.
    """
    if not has_kernels(partials):
        return scale_rows(add_partials(partials, dtype, gated=True), how)
    split, count, both = partials.shape
    size = both // 2
    found = rows_like(partials[0, :, :size], how, dtype)
    if count:
        constants, spans = _spans(size, how, count)
        launch.gate_scale_kernel[count, spans](
            partials,
            # of the dtype that is rounded to, and never read
            partials.new_empty(0, dtype=dtype),
            *found.room,
            *partials.stride()[:2],
            SPLIT=split,
            **constants,
            **launch_options(partials.device),
        )
    return found


def gate_heads_scaled(x: Tensor, gates: Tensor, how: RowsFormat) -> ScaledRows:
    """Gate what heads give, and quantise it.

    ``x`` and ``gates`` are those of `specattn.kernels.fused.gates.gate_heads`, whose result is
    quantised as `scale_rows` does it, in the same launch.
    """
    if not has_kernels(x):
        return scale_rows(gate_heads(x, gates), how)
    check_gates(x, gates)
    found = rows_like(x, how)
    if len(x):
        constants, spans = _spans(x.shape[1], how, len(x))
        launch.gate_heads_scale_kernel[len(x), spans](
            x,
            gates,
            *found.room,
            gates.stride(0),
            **constants,
            **launch_options(x.device),
        )
    return found


def add_norm_scaled(
    partials: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    how: RowsFormat,
    *,
    rows: Tensor | None = None,
    residual_out: Tensor | None = None,
    added_weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[ScaledRows, Tensor]:
    """Add a product to the residual stream, and quantise the norm.

    The arguments are those of `specattn.kernels.fused.add_rms_norm`, whose norm is quantised as
    `scale_rows` does it, in the same launch.
    """
    options = {"rows": rows, "residual_out": residual_out, "added_weight": added_weight}
    if not has_kernels(weight):
        x, total = add_rms_norm(partials, residual, weight, eps, dtype=dtype, **options)
        return scale_rows(x, how), total
    (split, count, size), like = partials.shape, weight if residual is None else residual
    count = count if rows is None else len(rows)
    if residual_out is None:
        residual_out = like.new_empty(count, size, dtype=dtype)
    found = rows_like(residual_out, how, dtype or like.dtype)
    if count:
        constants = whole_rows(size)
        launch.add_norm_scale_kernel[(count,)](
            partials,
            residual,
            weight,
            added_weight,
            rows,
            residual_out,
            *found.room,
            eps,
            *partials.stride()[:2],
            0 if residual is None else residual.stride(0),
            residual_out.stride(0),
            SPLIT=split,
            GROUPS=max(1, constants["BLOCK"] // BLOCK) if how.groups > 1 else 1,
            ALL_GROUPS=how.groups,
            TERMS=how.terms,
            **constants,
            **launch_options(weight.device),
        )
    return found, residual_out


def embed_norm_pair_scaled(
    ids: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
    *,
    how: RowsFormat,
    rows: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[ScaledRows, Tensor]:
    """Norm embeddings and hidden states side by side, quantised.

    The arguments are those of `specattn.kernels.fused.embed_norm_pair`, whose norms are quantised
    as `scale_rows` does it, in the same launch where both are of whole groups of columns.
    """
    count, size = len(ids), hidden.shape[1]
    whole = how.groups > 1 and size % BLOCK == 0
    if not (whole and count and has_kernels(hidden)):
        args = ids, table, hidden, embed_weight, hidden_weight, eps
        x, hidden = embed_norm_pair(*args, rows=rows, dtype=dtype)
        return scale_rows(x, how), hidden
    # of the norms' shape and dtype, and never read
    like = hidden_weight.new_empty(1, dtype=dtype).expand(count, 2 * size)
    found = rows_like(like, how)
    chosen = None if rows is None else hidden.new_empty(count, size)
    launch.norm_pair_scale_kernel[count, 2](
        ids,
        table,
        hidden,
        rows,
        embed_weight,
        hidden_weight,
        chosen,
        like,
        *found.room,
        eps,
        table.stride(0),
        hidden.stride(0),
        TERMS=how.terms,
        **whole_rows(size),
        **launch_options(hidden.device),
    )
    return found, hidden if chosen is None else chosen


def scaled_linear(x: ScaledRows, weight: ScaledWeight) -> Tensor:
    """Multiply quantised rows ``[T, K]`` by a weight ``[N, K]``.

    Returns
    -------
    Tensor
        ``[S, T, N]``, partials whose sum is the product: one of x's dtype, or several in float32.
    """
    if len(x) and has_kernels(weight.values):
        return _by_torch(x, weight) if _suits_torch(x, weight) else _by_triton(x, weight)
    return linear(x.restored(), weight.restored()).to(x.dtype)[None]


def _by_triton(x: ScaledRows, weight: ScaledWeight) -> Tensor:
    """Multiply by the Triton kernel, any number of rows."""
    (width, size), count, device = weight.values.shape, len(x), weight.values.device
    # few rows: four CTAs of a multiprocessor read; many: two, of tiles that are twice as wide
    wide = count > MAX_ROWS // 2
    bn, ctas = (128, 2) if wide else (64, 4)
    block = min(max(ROWS_BOX, power_of_2(count)), MAX_ROWS)
    tiles, row_tiles, steps = cdiv(width, bn), cdiv(count, block), cdiv(size, BLOCK)
    slots = DeviceLimits.of(device).sms * ctas
    split = max(1, min(slots // (tiles * row_tiles), steps // 4))
    out = torch.empty(
        split, count, width, dtype=x.dtype if split == 1 else torch.float32, device=device
    )
    launch.scaled_linear_kernel[tiles * split, row_tiles](
        x.values,
        weight.values,
        out,
        x.scales,
        weight.scale,
        count,
        width,
        x.values.stride(0),
        weight.values.stride(0),
        out.stride(0),
        x.scales.stride(2),
        weight.scale.stride(0),
        SIZE=size,
        HEIGHT=weight.height,
        BN=bn,
        BT=block,
        SPLIT=split,
        BLOCKS=weight.scale.shape[1] > 1,
        TERMS=weight.terms,
        STAGES=3 if wide else 5,
        num_warps=8 if wide else 4,
        **launch_options(device),
    )
    return out


def many_rows_ready(weight: ScaledWeight) -> bool:
    """Whether torch multiplies many rows right; ask once before any capture."""
    check = _check_blocks if weight.scale.shape[1] > 1 else _check_channels
    return gluon_ok(f"torch's scaled_mm ({check.__name__})", check, weight.values.device)


def _suits_torch(x: ScaledRows, weight: ScaledWeight) -> bool:
    """Whether torch's product, where it is right, takes these, and gains."""
    values = weight.values
    blocks = weight.scale.shape[1] > 1
    # of blocks, the weight's rows of scales are copied by 16 bytes
    whole = (BLOCK, 4 * BLOCK) if blocks else (16, 16)
    return (
        len(x) > MAX_ROWS
        and x.dtype == torch.bfloat16
        and weight.height == (BLOCK if blocks else 1)
        and all(size % unit == 0 for size, unit in zip(values.shape, whole, strict=True))
        and values.is_contiguous()
        and many_rows_ready(weight)
    )


def _by_torch(x: ScaledRows, weight: ScaledWeight) -> Tensor:
    """Multiply by torch's product: the rows of all terms, and room."""
    blocks = weight.scale.shape[1] > 1
    kinds = ScalingType.RowWise, ScalingType.RowWise
    if blocks:
        kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    product = scaled_mm(
        x.values.flatten(0, 1),
        weight.values.t(),
        # some releases ask for a stride of 1 between columns, even of a sole one
        x.scales.flatten(0, 1) if blocks else x.scales.flatten()[:, None],
        kinds[0],
        weight.scale.t(),
        kinds[1],
        output_dtype=x.dtype,
    )
    found: Tensor = product.unflatten(0, x.values.shape[:2])
    return found[:, : len(x)]


def _check_blocks(device: torch.device) -> None:
    _check_torch(device, scale_blocks)


def _check_channels(device: torch.device) -> None:
    _check_torch(device, scale_channels)


def _check_torch(device: torch.device, scale: Callable[..., ScaledWeight]) -> None:
    """Raise an ArithmeticError unless torch agrees with float32 products."""
    generator = torch.Generator(device).manual_seed(0)
    plain = torch.randn(384, 1024, device=device, generator=generator)
    x = torch.randn(100, 1024, dtype=torch.bfloat16, device=device, generator=generator)
    for terms in (1, 2):
        weight = scale(plain, terms=terms)
        rows = scale_rows(x, weight.rows_format)
        want = linear(rows.restored(), weight.restored())
        error = float((_by_torch(rows, weight).float().sum(0) - want).norm() / want.norm())
        if not error < 1e-2:
            raise ArithmeticError(f"relative error {error:.1e}")


def has_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels of float8 run where a tensor is."""
    return on_triton(tensor) and _has_float8(tensor.device)


@cache
def _has_float8(device: torch.device) -> bool:
    # the interpreter has
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        return True
    log.warning(
        "%s has no float8 products: weights are dequantised whenever they are multiplied",
        torch.cuda.get_device_name(device),
    )
    return False


def _spans(size: int, how: RowsFormat, rows: int) -> tuple[dict[str, int], int]:
    """Return the constants of quantisers, and a row's spans."""
    span = columns_of(rows)[0] if how.groups > 1 else power_of_2(size)
    constants = {
        "SIZE": size,
        "SPAN": span,
        "GROUPS": span // BLOCK if how.groups > 1 else 1,
        "ALL_GROUPS": how.groups,
        "TERMS": how.terms,
        "num_warps": max(1, min(16, span // 256)),
    }
    return constants, cdiv(size, span)


def rows_like(like: Tensor, how: RowsFormat, dtype: torch.dtype | None = None) -> ScaledRows:
    """Return rows for numbers like ``like [T, K]``, not yet written."""
    count, size = like.shape
    padded = cdiv(count, ROWS_BOX) * ROWS_BOX
    values = like.new_empty(how.terms, padded, size, dtype=FLOAT8)
    scales = like.new_empty(how.groups, how.terms, padded, dtype=torch.float32)
    return ScaledRows(values, scales.movedim(0, 2), count, dtype or like.dtype)


def _scales(most: Tensor) -> Tensor:
    # torch multiplies by the inverse of a number of Python's, on a GPU
    return most.clamp(min=_FLOOR) / torch.full((), _MOST, device=most.device)


def _e4m3(numbers: Tensor, scale: Tensor) -> Tensor:
    return (numbers * (1 / scale)).clamp(-_MOST, _MOST).to(FLOAT8)


def _spread(scale: Tensor, size: int) -> Tensor:
    """Return a scale ``[R, G]`` for each of ``size`` columns."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(BLOCK, 1)[:, :size]
