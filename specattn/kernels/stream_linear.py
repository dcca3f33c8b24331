"""Products of at most 64 rows with a large weight, at the speed at which the weight can be read.

Only on Hopper; everywhere else, and for more rows, torch's product takes its place.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, silu

from specattn.kernels.gluon_guard import gluon_ok

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 64
BLOCK_N = 128
# TMA copies rows in pieces of this many bytes
PIECE = 16


@dataclass(frozen=True)
class StreamTile:
    """Launch constants.

    Parameters
    ----------
    rows : int
        Rows of x in a tile, a power of two from 16 to 64.
    block_k : int
        Steps along the inner dimension.
    stages : int
        Tiles on their way.
    ctas_per_sm : int
        CTAs that share a multiprocessor.
    max_regs, producer_regs : int
        Registers per thread, on average and of the warp that copies.
    """

    rows: int
    block_k: int = 64
    stages: int = 6
    ctas_per_sm: int = 2
    max_regs: int = 64
    producer_regs: int = 32


def stream_tile(rows: int) -> StreamTile:
    """Choose the tile for this many rows of x: two CTAs' rings fill the shared memory."""
    if rows <= 16:
        return StreamTile(16)
    if rows <= 32:
        return StreamTile(32, stages=5, max_regs=80)
    return StreamTile(64, stages=4, max_regs=96)


def streams(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these; the first call per device compiles it and tries it out."""
    return (
        0 < x.shape[0] <= MAX_ROWS and x.dtype == weight.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
        and weight.stride(1) == 1 and weight.stride(0) * 2 % PIECE == 0
        and weight.data_ptr() % PIECE == 0 and ready(x.device)
    )


def ready(device: torch.device) -> bool:
    """Whether the kernel runs right on ``device``; ask once before anything is captured."""
    return gluon_ok("gluon_linear", _check, device)


def stream_linear(x: Tensor, weight: Tensor, tile: StreamTile | None = None) -> Tensor:
    """Multiply ``x [T, K]`` by ``weight [N, K]``, both of 16 bits.

    Returns
    -------
    Tensor
        ``[S, T, N]``, parts whose sum is the product: one of x's dtype, or several in float32.
    """
    tile = tile or stream_tile(len(x))
    steps = -(-x.shape[1] // tile.block_k)
    tiles = -(-len(weight) // BLOCK_N)
    split = max(1, min(_multiprocessors(x.device) * tile.ctas_per_sm // tiles, steps // 2))
    out = torch.empty(
        split, len(x), len(weight), dtype=x.dtype if split == 1 else torch.float32, device=x.device
    )
    _launch(x, weight, out, tile, tiles * split, split, len(weight), out.stride(), gated=False)
    return out


def stream_gated(x: Tensor, weight: Tensor, tile: StreamTile | None = None) -> Tensor:
    """Return ``silu(x gate) * (x up)`` for ``weight [2 I, K]``, gates first, as ``[T, I]``."""
    tile = tile or stream_tile(len(x))
    width = len(weight) // 2
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    tiles = -(-width // (BLOCK_N // 2))
    _launch(x, weight, out, tile, tiles, 1, width, (0, *out.stride()), gated=True)
    return out


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, tile: StreamTile, ctas: int, split: int, width: int,
    strides: tuple[int, ...], *, gated: bool,
) -> None:
    from specattn.kernels.gluon_linear import gluon_linear_kernel

    gluon_linear_kernel[(ctas,)](
        _boxes(weight, 64, tile.block_k), _boxes(x.contiguous(), tile.rows, tile.block_k), out,
        len(x), width, -(-x.shape[1] // tile.block_k), strides[0], strides[1],
        BT=tile.rows, BK=tile.block_k, STAGES=tile.stages, SPLIT=split, GATED=gated,
        PRODUCER_REGS=tile.producer_regs, num_warps=4, maxnreg=tile.max_regs, launch_pdl=True,
    )


def _boxes(matrix: Tensor, rows: int, columns: int) -> Any:
    gl = importlib.import_module("triton.experimental.gluon.language")
    hopper = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    dtype = gl.float16 if matrix.dtype == torch.float16 else gl.bfloat16
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return hopper.TensorDescriptor.from_tensor(matrix, block, layout)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(device: torch.device) -> None:
    """Hold the kernel to float32 products.

    Raises
    ------
    ArithmeticError
        If it disagrees.
    """
    generator = torch.Generator(device).manual_seed(0)
    for rows in (3, 20, 64):
        x = torch.randn(rows, 520, dtype=torch.float16, device=device, generator=generator)
        weight = torch.randn(400, 520, dtype=torch.float16, device=device, generator=generator)
        want = linear(x.float(), weight.float())
        gate, up = want.chunk(2, dim=1)
        for got, exact in (
            (stream_linear(x, weight).sum(0), want), (stream_gated(x, weight), silu(gate) * up),
        ):
            error = float((got.float() - exact).norm() / exact.norm())
            if not error < 1e-2:
                raise ArithmeticError(f"relative error {error:.1e} of {rows} rows")
