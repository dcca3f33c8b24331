"""The tile table of the tree attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class TileConfig:
    """Launch constants of one attention kernel.

    Parameters
    ----------
    block_m, block_n : int
        Query rows (tokens × heads of a group) and keys per tile, powers of two from 16.
    warps, stages : int
        Warps per CTA; tiles in flight.
    ctas_per_sm : int
        Resident CTAs the grid is sized for. More than fit would run in waves.
    max_regs : int
        Register limit per thread, 0 for none.
    short : int
        Runs of at most this many full tiles go through the masked loop, which saves filling a
        second pipeline.
    """

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 3
    ctas_per_sm: int = 2
    max_regs: int = 0
    short: int = 8


def tile_config(
    rows: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, batch: int
) -> TileConfig:
    """Choose by packed rows (query tokens × group) and head size; never by length.

    One captured graph serves every length, so nothing here may depend on it. The 16-bit values
    for heads up to 128 were measured on an H200; the others keep clear of spills and of the
    227 KB of shared memory a CTA can have.
    """
    width = triton.next_power_of_2(head_dim) + triton.next_power_of_2(v_head_dim)
    if dtype == torch.float32:
        # IEEE products run on the FMA units: registers set the limits
        return TileConfig(16, 32 if width <= 256 else 16, stages=2)
    # a limit of 168 leaves the register file room for a merge CTA, which then starts early; with
    # few requests its own CTAs are larger
    few = batch <= 4
    if rows <= 16:
        return TileConfig(16, 64 if width <= 256 else 32, ctas_per_sm=3, max_regs=168)
    if rows <= 64:
        if width <= 256:
            return TileConfig(64, 64, max_regs=168 if few else 192)
        if width <= 384:
            return TileConfig(64, 64, ctas_per_sm=1)
        return TileConfig(64, 32, stages=4, ctas_per_sm=1)
    if width <= 256:
        return TileConfig(128, 128, warps=8, ctas_per_sm=1)
    return TileConfig(128, 64, warps=8, stages=3 if width <= 384 else 2, ctas_per_sm=1)


def extend_tile_config(head_dim: int, v_head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Choose the tile of the prompt kernel, which is bound by arithmetic."""
    width = triton.next_power_of_2(head_dim) + triton.next_power_of_2(v_head_dim)
    if dtype == torch.float32:
        return TileConfig(32, 32 if width <= 256 else 16, warps=8, stages=2)
    if width <= 256:
        return TileConfig(128, 128, warps=8)
    return TileConfig(128, 64, warps=8, stages=3 if width <= 384 else 2)
