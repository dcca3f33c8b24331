"""The tile tables of the Triton kernels."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from specattn.kernels.attention.tiles import (
    HOPPER,
    RESERVED,
    DeviceLimits,
    TileConfig,
    extend_tile_config,
    sharing_rows,
    tile_config,
)

KB = 1024
SHARED = {80: 163 * KB, 86: 99 * KB, 89: 99 * KB, 90: 227 * KB, 100: 227 * KB}


def test_tiles_of_other_devices_have_legal_sizes() -> None:
    shapes = product(
        (1, 16, 32, 64, 256, 800),
        (64, 96, 128, 256),
        (64, 128, 256),
        (torch.bfloat16, torch.float32),
        SHARED.items(),
    )
    for rows, dim, v_dim, dtype, (target, shared) in shapes:
        limits = DeviceLimits(100, shared, target // 10)
        for tile in (
            tile_config(rows, dim, v_dim, dtype, 8, limits),
            extend_tile_config(dim, v_dim, dtype, limits),
        ):
            where = (rows, dim, v_dim, dtype, target, tile)
            assert tile.block_m >= 16, where
            assert tile.block_n >= 16, where
            assert tile.stages >= 2, where
            keys = tile.stages * tile.block_n * (dim + v_dim) * dtype.itemsize
            assert tile.ctas_per_sm * keys <= shared + RESERVED or target == 90, where


@pytest.mark.parametrize(
    ("rows", "dim", "batch", "tile"),
    [
        (16, 128, 8, TileConfig(16, 64, ctas_per_sm=3, max_regs=168)),
        (64, 128, 8, TileConfig(64, 64, max_regs=192)),
        (256, 128, 8, TileConfig(128, 128, warps=8, ctas_per_sm=1)),
        (64, 256, 8, TileConfig(64, 32, stages=4, ctas_per_sm=1)),
    ],
)
def test_hopper_keeps_its_table(rows: int, dim: int, batch: int, tile: TileConfig) -> None:
    """What was measured there does not change with what others need."""
    assert tile_config(rows, dim, dim, torch.bfloat16, batch, HOPPER) == tile


def test_shared_tiles_have_room_for_several_requests() -> None:
    """Wide where half of one may rest, and never too narrow for one request."""
    wide, float8 = torch.bfloat16, torch.float8_e4m3fn
    for rows in (1, 4, 16, 32, 64, 160):
        for dtype, rests in product((wide, float8), (True, False)):
            assert sharing_rows(rows, dtype, rests=rests) >= max(rows, 64)
    assert sharing_rows(32, wide, rests=True) == 128
    assert sharing_rows(4, wide, rests=True) == 64
