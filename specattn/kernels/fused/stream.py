"""Multiply few rows by a large weight, at memory speed.

A product of at most 128 rows takes as long as its weight takes to be read; gated products have at
most 160. The kernels run only on Hopper; everywhere else, and for more rows, torch's product takes
their place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils.weak import WeakTensorKeyDictionary

from specattn.checks import whole_number
from specattn.kernels.gluon_guard import gluon_ok, tma_boxes

MAX_ROWS = 128
# rows of x that a second tile takes, of gated products only
MORE_ROWS = 32
MAX_GATED_ROWS = MAX_ROWS + MORE_ROWS
# gates of the first warpgroup of a CTA with more rows, and the most of the second one
GATES, MOST_MIXED = 64, 32
# rows of weights per half of a CTA; 64 is the whole of a matrix instruction
STEPS = (64, 56, 48)
# for weights too short to give every other CTA a tile of those; TMA is slower with small boxes
SHORT_STEPS = (32, 24, 16)
# bytes of a weight that is there in about 2 us
SHORT = 8_000_000
# TMA copies rows in pieces of this many bytes
PIECE = 16
# rows of x per copy: copies that reach far beyond the last row are slow
BOX = 16

# what TMA is told of weights, and where they were then; the host takes longer to describe one than
# to launch its product
_described: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class StreamTile:
    """Launch constants.

    Parameters
    ----------
    rows : int
        Rows of x in a tile, a power of two from 16 to 128.
    stages : int
        Tiles on their way.
    block_k : int
        Steps along the inner dimension.
    ctas_per_sm : int
        CTAs that share a multiprocessor.
    max_regs, producer_regs : int
        Registers per thread, on average and of the warps that copy.
    pace : int
        Tiles of weights on their way until the ring is full, ``stages`` at most.

    Raises
    ------
    ValueError
        If ``pace`` is none of the ring's.
    """

    rows: int
    stages: int
    block_k: int = 128
    ctas_per_sm: int = 1
    max_regs: int = 128
    producer_regs: int = 32
    pace: int = 2

    def __post_init__(self) -> None:
        whole_number("pace", self.pace, 1, self.stages)


@cache
def stream_tile(rows: int, *, gated: bool = False) -> StreamTile:
    """Choose the tile for this many rows of x.

    The rings of its CTAs fill the shared memory. One CTA per multiprocessor makes fewer partials to
    add up, two even out what is not split.
    """
    if rows <= 16:
        return StreamTile(16, 3, ctas_per_sm=2, max_regs=64, pace=1) if gated else StreamTile(16, 6)
    if rows <= 64:
        return StreamTile(32, 5) if rows <= 32 else StreamTile(64, 4)
    return StreamTile(128, 3, max_regs=168)


def streams(x: Tensor, weight: Tensor, *, gated: bool = False) -> bool:
    """Whether a kernel takes these tensors; the first call tries it out."""
    return (
        0 < x.shape[0] <= MAX_GATED_ROWS
        and x.dtype == weight.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
        and weight.stride(1) == 1
        and weight.stride(0) * 2 % PIECE == 0
        and weight.data_ptr() % PIECE == 0
        and (_gains_wide(x, weight, gated) if x.shape[0] > MAX_ROWS else _gains(x, weight, gated))
    )


def ready(device: torch.device) -> bool:
    """Whether the kernel runs right on ``device``; ask once before any capture."""
    return gluon_ok("gluon_linear", _check, device)


def ready_wide(device: torch.device) -> bool:
    """Whether the kernel of more rows than `MAX_ROWS` does; ask as above."""
    return gluon_ok("gluon_wide_gated", _check_wide, device)


def prepare(weight: Tensor) -> None:
    """Try out what may multiply by a weight."""
    if ready(weight.device) and _mixed_gates_of(weight):
        ready_wide(weight.device)


def stream_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``x [T, K]`` by ``weight [N, K]``, both of 16 bits.

    Returns
    -------
    Tensor
        ``[S, T, N]``, partials whose sum is the product: one of x's dtype, or several in float32.
    """
    tile = stream_tile(len(x))
    step, split = _splits(x, weight, tile)
    out = torch.empty(
        split, len(x), len(weight), dtype=x.dtype if split == 1 else torch.float32, device=x.device
    )
    _launch(x, weight, out, tile, step)
    return out


def stream_gated(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``silu(x gate) * (x up)``, ``[T, I]``.

    ``weight`` is ``[2 I, K]``, gates first.
    """
    width = len(weight) // 2
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    if len(x) > MAX_ROWS:
        _launch_wide(x, weight, out, _mixed_gates_of(weight))
        return out
    tile = stream_tile(len(x), gated=True)
    _launch(x, weight, out, tile, shares(width, 1, 1, slots(tile, x.device))[0])
    return out


def _gains(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether the kernel runs here, and is faster than torch.

    Beyond 64 rows multiplying takes as long as reading. There streaming is slower for a weight
    that is split and leaves matrix instructions partly empty.
    """
    if not ready(x.device):
        return False
    step, split = _splits(x, weight, stream_tile(len(x)))
    return gated or len(x) <= 64 or step == 64 or split == 1


def _gains_wide(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether the kernel of more rows runs here, and gains.

    Every tile reads all of x, so it is not where a CTA would have more tiles than fit at once, or
    a mixed one alone.
    """
    return gated and ready_wide(x.device) and _mixed_gates_of(weight) > 0


def _splits(x: Tensor, weight: Tensor, tile: StreamTile) -> tuple[int, int]:
    """Choose rows of weights per half CTA, and shares of K."""
    steps = -(-x.shape[1] // tile.block_k)
    return shares(len(weight), 2, steps, slots(tile, x.device))


def slots(tile: StreamTile, device: torch.device) -> int:
    """Return how many CTAs run at once."""
    return multiprocessors(device) * tile.ctas_per_sm


@cache
def shares(width: int, halves: int, steps: int, slots: int, gain: float = 0.02) -> tuple[int, int]:
    """Choose the rows and shares of K that let most CTAs run.

    ``slots`` of them run at once. Fewer rows are to let more than ``gain`` more run.
    """
    best = (-1.0, 0, 0)
    for step in STEPS + SHORT_STEPS:
        if step == SHORT_STEPS[0] and best[0] > 0.5:
            break
        tiles = -(-width // (halves * step))
        split = max(1, min(slots // tiles, steps // 4))
        # the last turn of CTAs leaves multiprocessors idle
        turns = width / (halves * step) * split / slots
        share = turns / math.ceil(turns)
        if share > best[0] + gain:
            best = (share, step, split)
    return best[1], best[2]


def mixed_gates(width: int, sms: int) -> int:
    """Return the gates of a CTA beyond `GATES`, in eights.

    There is a CTA per multiprocessor. 0 if these are none, or too many for a mixed tile.
    """
    more = 8 * math.ceil(width / (8 * sms)) - GATES
    return more if 0 < more <= MOST_MIXED else 0


def _mixed_gates_of(weight: Tensor) -> int:
    return mixed_gates(len(weight) // 2, multiprocessors(weight.device))


def _launch(x: Tensor, weight: Tensor, out: Tensor, tile: StreamTile, step: int) -> None:
    """Launch on ``out``, ``[S, T, N]`` or, of gated products, ``[T, I]``."""
    from specattn.kernels.fused.gluon import gluon_linear_kernel

    gated, width, strides = out.dim() == 2, out.shape[-1], out.stride()
    split, stride_part = (1, 0) if gated else (len(out), strides[0])
    tiles = -(-width // (step if gated else 2 * step))
    steps = -(-x.shape[1] // tile.block_k)
    # as many CTAs as run at once: a further one would begin to read when another has ended
    most = slots(tile, x.device)
    gluon_linear_kernel[(min(tiles * split, most),)](
        *weight_boxes(weight, tile.block_k),
        tma_boxes(x.contiguous(), BOX, tile.block_k),
        out,
        len(x),
        width,
        steps,
        stride_part,
        strides[-2],
        STEP=step,
        BT=tile.rows,
        BK=tile.block_k,
        STAGES=tile.stages,
        BOX=BOX,
        BOXES=-(-len(x) // BOX),
        SPLIT=split,
        GATED=gated,
        MANY=tiles * split > most,
        PACE=_pace(tile, steps, split, weight.nbytes),
        PRODUCER_REGS=tile.producer_regs,
        num_warps=4,
        maxnreg=tile.max_regs,
        launch_pdl=True,
    )


def _launch_wide(x: Tensor, weight: Tensor, out: Tensor, mixed: int) -> None:
    """Launch on ``out``, ``[T, I]``; a CTA takes ``mixed`` gates beyond `GATES`."""
    from specattn.kernels.fused.gluon_wide import gluon_wide_gated_kernel

    tile, width = StreamTile(MAX_ROWS, 4, 64, max_regs=144), out.shape[1]
    gluon_wide_gated_kernel[(-(-width // (GATES + mixed)),)](
        *weight_boxes(weight, tile.block_k),
        tma_boxes(x.contiguous(), BOX, tile.block_k),
        out,
        len(x),
        width,
        -(-x.shape[1] // tile.block_k),
        out.stride(0),
        MIXED=mixed,
        BT=tile.rows,
        MORE=MORE_ROWS,
        BK=tile.block_k,
        STAGES=tile.stages,
        BOXES=-(-len(x) // BOX),
        PACE=tile.pace,
        SIDE_REGS=152,
        PRODUCER_REGS=tile.producer_regs,
        num_warps=4,
        maxnreg=tile.max_regs,
        launch_pdl=True,
    )


def weight_boxes(weight: Tensor, block_k: int) -> tuple[Any, ...]:
    """Describe a weight to TMA, once while it lies where it does."""
    key = weight.data_ptr(), weight.shape, weight.stride()
    kept: dict[int, Any] = _described.setdefault(weight, {})
    if block_k not in kept or kept[block_k][0] != key:
        # what is kept must not keep the weight itself
        alias = weight.detach()
        kept[block_k] = key, tuple(tma_boxes(alias, rows, block_k) for rows in (32, 16, 8))
    found: tuple[Any, ...] = kept[block_k][1]
    return found


def _pace(tile: StreamTile, steps: int, split: int, nbytes: int) -> int:
    """Choose how many tiles are on their way before the rows come.

    The kernels before the product load their operands behind them. A weight that takes no longer
    than such a kernel delays nobody much; a ring that holds most of a CTA's share of ``steps`` is
    full in time at any pace.
    """
    if nbytes < SHORT:
        return tile.stages
    return 1 if 4 * tile.stages * split >= 3 * steps else tile.pace


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(device: torch.device) -> None:
    """Raise an ArithmeticError unless the kernel agrees with float32 products."""
    for rows in (3, 20, 64, 100):
        x, weight = _operands(rows, device)
        _compare(
            (stream_linear(x, weight).sum(0), linear(x.float(), weight.float())),
            (stream_gated(x, weight), _gated(x, weight)),
        )


def _check_wide(device: torch.device) -> None:
    """Raise an ArithmeticError unless gated products of more rows do."""
    x, weight = _operands(150, device)
    out = x.new_empty(len(x), len(weight) // 2)
    _launch_wide(x, weight, out, 8)
    _compare((out, _gated(x, weight)))


def _operands(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of x and a weight to try a kernel with."""
    generator = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, 520, dtype=torch.float16, device=device, generator=generator)
    return x, torch.randn(400, 520, dtype=torch.float16, device=device, generator=generator)


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = linear(x.float(), weight.float()).chunk(2, dim=1)
    return silu(gate) * up


def _compare(*pairs: tuple[Tensor, Tensor]) -> None:
    """Raise an ArithmeticError unless products agree with exact ones."""
    for got, exact in pairs:
        error = float((got.float() - exact).norm() / exact.norm())
        if not error < 1e-2:
            raise ArithmeticError(f"relative error {error:.1e} of {len(got)} rows")
