"""Launch constants of the latent kernels."""

from __future__ import annotations

import torch

from specattn.kernels.attention.tiles import (
    HOPPER,
    DeviceLimits,
    GluonTile,
    MergeTile,
    TileConfig,
    fit_tile,
    padded,
)

# a row of DeepSeek's, padded: no model has a wider one
ROW = 512 + 64
# two tiles of 73 KB and the queries fill the shared memory of a CTA; warps are the Triton kernel's
GLUON = GluonTile(64, 64, warps=8, stages=2, ctas_per_sm=1, max_regs=168, min_tiles=2)
# results are 512 columns wide; within 2 % of the best of seven for every batch measured
MERGE = MergeTile(8, partials=8, many=16, span=128)


def mla_tile_config(rows: int, dtype: torch.dtype, limits: DeviceLimits = HOPPER) -> TileConfig:
    """Choose the tile by packed rows (tokens × heads), as `tile_config` does.

    BN is at most 64. An accumulator of 512 columns sets the limits, above 32 rows with the queries
    in shared memory. The 16-bit tile up to 16 rows was the best of a prototype on an H200; the
    others were chosen by what compiles without spills in the loop over full tiles, or with few, and
    not yet timed.
    """
    if limits.major != HOPPER.major and dtype != torch.float32:
        # not yet timed, either; tensor memory would want each tile several times in shared memory
        tile = TileConfig(16, 32) if rows <= 16 else TileConfig(32, 32, warps=8, ctas_per_sm=1)
    else:
        tile = _hopper_tile(rows, dtype)
    return fit_tile(tile, ROW * dtype.itemsize, ROW * dtype.itemsize, limits)


def _hopper_tile(rows: int, dtype: torch.dtype) -> TileConfig:
    if dtype == torch.float32:
        # IEEE products run on the FMA units
        return TileConfig(16, 16, warps=8, stages=2)
    if rows <= 16:
        return TileConfig(16, 32)
    if rows <= 32:
        return TileConfig(32, 32, warps=8, ctas_per_sm=1)
    # of 32 keys, both warpgroups would compute the same logits from the narrowest products
    return TileConfig(64, 64, warps=8, stages=2, ctas_per_sm=1)


def mla_extend_tile_config(dtype: torch.dtype, limits: DeviceLimits = HOPPER) -> TileConfig:
    """Choose the tile of the prompt kernel, which is bound by arithmetic."""
    size = 16 if dtype == torch.float32 else 64 if limits.major == HOPPER.major else 32
    tile = TileConfig(size, size, warps=8, stages=2, ctas_per_sm=1)
    return fit_tile(tile, ROW * dtype.itemsize, ROW * dtype.itemsize, limits)


def latent_widths(head_dim: int, v_head_dim: int) -> tuple[int, int, int, int]:
    """Return the widths of a row: RANK, ROPE, RANK_PAD, ROPE_PAD."""
    rope = head_dim - v_head_dim
    return v_head_dim, rope, padded(v_head_dim), padded(rope)
