"""Multiply at most 64 rows by a float8 weight, at memory speed.

The kernel runs only on Hopper; elsewhere, and for more rows, `fp8.scaled_linear` takes its place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu

from specattn.kernels.fused.fp8 import (
    BLOCK,
    MAX_ROWS,
    ROWS_BOX,
    ScaledRows,
    ScaledWeight,
    scale_blocks,
    scale_channels,
    scale_rows,
)
from specattn.kernels.fused.stream import PIECE, SHORT, StreamTile, shares, slots, weight_boxes
from specattn.kernels.gluon_guard import gluon_ok, tma_boxes
from specattn.kernels.launch import cdiv, power_of_2

# tiles on their way, by columns of the right factor
_STAGES = {16: 11, 32: 10, 64: 8, 128: 6}
# columns up to which two CTAs have registers on one multiprocessor
_TWO = 32
# what a step of fewer rows must gain over whole matrix instructions
_GAIN = 0.07
# shared memory of a multiprocessor, and what a CTA takes of it beside its ring
_SHARED, _BESIDE = 228 * 1024, 2048


def streams_scaled(x: ScaledRows, weight: ScaledWeight, *, gated: bool = False) -> bool:
    """Whether the kernel takes these; the first call tries it out."""
    values, height = weight.values, weight.height
    return (
        0 < len(x) <= MAX_ROWS
        and values.shape[1] % PIECE == 0
        and values.stride(1) == 1
        and values.stride(0) % PIECE == 0
        and values.data_ptr() % PIECE == 0
        # the rows of a tile lie in two blocks at most, and gates and values begin with one
        and (weight.scale.shape[1] == 1 or (height % 64 == 0 and not (gated and _cut(weight))))
        and ready(values.device)
    )


def _cut(weight: ScaledWeight) -> bool:
    return len(weight.values) // 2 % weight.height != 0


def ready(device: torch.device) -> bool:
    """Whether the kernel runs right on ``device``; ask once before any capture."""
    return gluon_ok("gluon_scaled_linear", _check, device)


def stream_scaled(x: ScaledRows, weight: ScaledWeight) -> Tensor:
    """Multiply rows ``[T, K]`` by ``[N, K]``, as `fp8.scaled_linear` does."""
    width, device = len(weight.values), weight.values.device
    tile, step, split = _tile(x, weight, gated=False)
    out = torch.empty(
        split, len(x), width, dtype=x.dtype if split == 1 else torch.float32, device=device
    )
    _launch(x, weight, out, tile, step)
    return out


def stream_scaled_gated(x: ScaledRows, weight: ScaledWeight) -> Tensor:
    """Return ``silu(x gate) * (x up)``, ``[T, I]``.

    ``weight`` is ``[2 I, K]``, gates first.
    """
    width, device = len(weight.values) // 2, weight.values.device
    tile, step, _ = _tile(x, weight, gated=True)
    out = torch.empty(len(x), width, dtype=x.dtype, device=device)
    _launch(x, weight, out, tile, step)
    return out


def _tile(x: ScaledRows, weight: ScaledWeight, *, gated: bool) -> tuple[StreamTile, int, int]:
    """Choose the tile, rows per half CTA, and shares of K."""
    (width, size), device = weight.values.shape, weight.values.device
    width, halves = (width // 2, 1) if gated else (width, 2)
    rows, steps = max(ROWS_BOX, power_of_2(len(x))), cdiv(size, BLOCK)
    columns = rows * weight.terms
    # two terms of 64 rows have 192 sums a thread
    regs = 128 if columns <= 64 else 144
    one = StreamTile(rows, _STAGES[columns], pace=4, max_regs=regs)
    step, split = shares(width, halves, steps, slots(one, device), _GAIN)
    short = weight.values.numel() < SHORT
    if columns <= _TWO and (gated or (step != 64 and not short)):
        stages = _STAGES[columns] // 2
        one = StreamTile(rows, stages, BLOCK, 2, max_regs=64, producer_regs=24, pace=2)
        step, split = shares(width, halves, steps, slots(one, device), _GAIN)
    split = 1 if gated else split
    # scales of the rows lie beside the ring
    room = _SHARED // one.ctas_per_sm - _BESIDE - 4 * rows * power_of_2(cdiv(steps, split))
    stages = min(one.stages, room // (BLOCK * (BLOCK + columns)))
    pace = stages if short else min(one.pace, stages)
    return replace(one, stages=stages, pace=pace), step, split


def _launch(x: ScaledRows, weight: ScaledWeight, out: Tensor, tile: StreamTile, step: int) -> None:
    """Launch on ``out``, ``[S, T, N]`` or, of gated products, ``[T, I]``."""
    from specattn.kernels.fused.gluon_fp8 import gluon_scaled_linear_kernel

    gated, width, strides, values = out.dim() == 2, out.shape[-1], out.stride(), weight.values
    split, stride_part = (1, 0) if gated else (len(out), strides[0])
    tiles, steps = cdiv(width, step if gated else 2 * step), cdiv(values.shape[1], BLOCK)
    most = slots(tile, values.device)
    blocks = weight.scale.shape[1] > 1
    gluon_scaled_linear_kernel[(min(tiles, most // split) * split,)](
        *weight_boxes(values, BLOCK),
        tma_boxes(x.values.flatten(0, 1), ROWS_BOX, BLOCK),
        out,
        x.scales,
        weight.scale,
        len(x),
        width,
        steps,
        len(weight.scale) - 1,
        stride_part,
        strides[-2],
        x.scales.stride(2),
        weight.scale.stride(0),
        STEP=step,
        BT=tile.rows,
        STAGES=tile.stages,
        KEPT=power_of_2(cdiv(steps, split)) if blocks else 1,
        HEIGHT=weight.height,
        BOX=ROWS_BOX,
        BOXES=x.values.shape[1] // ROWS_BOX,
        SPLIT=split,
        GATED=gated,
        BLOCKS=blocks,
        TERMS=weight.terms,
        MANY=tiles * split > most,
        PACE=tile.pace,
        PRODUCER_REGS=tile.producer_regs,
        num_warps=4,
        maxnreg=tile.max_regs,
        launch_pdl=True,
    )


def _check(device: torch.device) -> None:
    """Raise an ArithmeticError unless the kernel agrees with float32 products."""
    generator = torch.Generator(device).manual_seed(0)
    for count in (3, 20, 64):
        x = torch.randn(count, 528, dtype=torch.bfloat16, device=device, generator=generator)
        halves = torch.randn(2, 192, 528, device=device, generator=generator)
        for scale, terms in ((scale_blocks, 1), (scale_channels, 1), (scale_blocks, 2)):
            weight = ScaledWeight.stacked([scale(half, terms=terms) for half in halves])
            rows = scale_rows(x, weight.rows_format)
            want = rows.restored() @ weight.restored().T
            gate, up = want.chunk(2, dim=1)
            for got, exact in (
                (stream_scaled(rows, weight).sum(0), want),
                (stream_scaled_gated(rows, weight), silu(gate) * up),
            ):
                error = float((got.float() - exact).norm() / exact.norm())
                if not error < 1e-2:
                    raise ArithmeticError(f"relative error {error:.1e} of {count} rows")
