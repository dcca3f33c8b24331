"""Other tiles of specattn's kernels worth a try, by packed rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from specattn.kernels.attention.tiles import MergeTile, TileConfig
from specattn.kernels.mla.tiles import GLUON, mla_tile_config

if TYPE_CHECKING:
    from .cases import Case

SMALL = [
    TileConfig(16, 64, ctas_per_sm=2),
    TileConfig(16, 32, ctas_per_sm=4),
    TileConfig(64, 64, max_regs=168),
]
MEDIUM = [
    TileConfig(64, 64, max_regs=168),
    TileConfig(64, 64, max_regs=192),
    TileConfig(64, 64),
    TileConfig(64, 64, max_regs=168, short=4),
    TileConfig(64, 64, max_regs=168, short=1000),
    TileConfig(64, 32, ctas_per_sm=2),
    TileConfig(64, 64, stages=2, ctas_per_sm=1),
    TileConfig(64, 32, ctas_per_sm=1),
    TileConfig(64, 64, warps=8, stages=2, ctas_per_sm=1),
    TileConfig(32, 32, ctas_per_sm=2),
]
LARGE = [
    TileConfig(128, 64, warps=8, ctas_per_sm=1),
    TileConfig(64, 64, max_regs=168),
    TileConfig(128, 64, warps=8, stages=4, ctas_per_sm=1),
    TileConfig(128, 32, warps=8, ctas_per_sm=1),
]
# over float8 keys a tile is converted before its products; 8 warps lose below 128 rows
FLOAT8 = [
    TileConfig(64, 128, max_regs=240),
    TileConfig(64, 128, max_regs=224),
    TileConfig(64, 128, short=4),
    TileConfig(64, 128, short=1000),
    TileConfig(64, 128, stages=2),
    TileConfig(64, 128, stages=4, ctas_per_sm=1),
    TileConfig(64, 64),
    TileConfig(64, 64, stages=4),
    TileConfig(64, 64, stages=5),
    TileConfig(64, 64, ctas_per_sm=3, max_regs=168),
    TileConfig(64, 256, stages=2, ctas_per_sm=1),
    TileConfig(32, 64),
    TileConfig(16, 64, ctas_per_sm=3, max_regs=168),
]
FLOAT8_LARGE = [
    TileConfig(128, 64, warps=8, ctas_per_sm=1),
    TileConfig(64, 128),
    TileConfig(128, 64, warps=8, stages=4, ctas_per_sm=1),
    TileConfig(128, 128, warps=8, stages=2, ctas_per_sm=1),
]
PROMPT = [TileConfig(128, 64, warps=8), TileConfig(128, 128, warps=8)]


@dataclass(frozen=True)
class Named:
    """A tile, or another merge behind the kernel's own, and a short name."""

    config: TileConfig | None = None
    label: str = ""
    merge: MergeTile | None = None

    @property
    def name(self) -> str:
        tile = self.config
        if self.label or not tile:
            return self.label
        return (
            f"{tile.block_m}x{tile.block_n} w{tile.warps} s{tile.stages} "
            f"c{tile.ctas_per_sm} r{tile.max_regs} short{tile.short}"
        )

    @property
    def options(self) -> dict[str, Any]:
        """What a contestant takes."""
        return {"tile": self.config} | ({"merge": self.merge} if self.merge else {})


LATENT = [
    Named(replace(GLUON, min_tiles=2), "splits of 2 tiles"),
    Named(replace(GLUON, min_tiles=4), "splits of 4 tiles"),
    Named(label="merge 4 rows x 128", merge=MergeTile(4, 16, 32, 128)),
    Named(label="merge 2 rows x 256", merge=MergeTile(2, 16, 32, 256)),
    Named(label="merge 4 rows x 256", merge=MergeTile(4, 8, 16, 256)),
    Named(label="merge 8 rows x 128", merge=MergeTile(8, 8, 16, 128)),
    Named(label="merge 1 row x 512", merge=MergeTile(1, 32)),
    Named(label="merge 4 rows x 512", merge=MergeTile(4, 8)),
]


def candidates(case: Case) -> list[Named]:
    """Return the tiles for a case; none where other tables hold."""
    rows = case.q_len * case.heads[0] // case.heads[1]
    if case.fixed:
        return []
    if case.latent:
        return [Named(mla_tile_config(rows, getattr(torch, case.dtype)), "Triton"), *LATENT]
    if case.stored and case.mode != "prompt":
        return [Named(tile) for tile in (FLOAT8 if rows <= 64 else FLOAT8_LARGE)]
    if case.mode == "prompt":
        return [Named(tile) for tile in PROMPT]
    return [Named(t) for t in (SMALL if rows <= 16 else MEDIUM if rows <= 64 else LARGE)]
