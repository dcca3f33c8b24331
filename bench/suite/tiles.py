"""Other tiles of the Triton kernel worth a try, by packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specattn.kernels.tile_config import TileConfig

if TYPE_CHECKING:
    from .cases import Case

SMALL = [
    TileConfig(16, 64, ctas_per_sm=2), TileConfig(16, 32, ctas_per_sm=4),
    TileConfig(64, 64, max_regs=168),
]
MEDIUM = [
    TileConfig(64, 64, max_regs=168), TileConfig(64, 64, max_regs=192), TileConfig(64, 64),
    TileConfig(64, 64, max_regs=168, short=4), TileConfig(64, 64, max_regs=168, short=1000),
    TileConfig(64, 32, ctas_per_sm=2), TileConfig(64, 64, stages=2, ctas_per_sm=1),
    TileConfig(64, 32, ctas_per_sm=1), TileConfig(64, 64, warps=8, stages=2, ctas_per_sm=1),
    TileConfig(32, 32, ctas_per_sm=2),
]
LARGE = [
    TileConfig(128, 64, warps=8, ctas_per_sm=1), TileConfig(64, 64, max_regs=168),
    TileConfig(128, 64, warps=8, stages=4, ctas_per_sm=1),
    TileConfig(128, 32, warps=8, ctas_per_sm=1),
]
# over float8 keys a tile is converted before its products; 8 warps lose below 128 rows
FLOAT8 = [
    TileConfig(64, 128, max_regs=240), TileConfig(64, 128, max_regs=224),
    TileConfig(64, 128, short=4), TileConfig(64, 128, short=1000),
    TileConfig(64, 128, stages=2), TileConfig(64, 128, stages=4, ctas_per_sm=1),
    TileConfig(64, 64), TileConfig(64, 64, stages=4), TileConfig(64, 64, stages=5),
    TileConfig(64, 64, ctas_per_sm=3, max_regs=168), TileConfig(64, 256, stages=2, ctas_per_sm=1),
    TileConfig(32, 64), TileConfig(16, 64, ctas_per_sm=3, max_regs=168),
]
FLOAT8_LARGE = [
    TileConfig(128, 64, warps=8, ctas_per_sm=1), TileConfig(64, 128),
    TileConfig(128, 64, warps=8, stages=4, ctas_per_sm=1),
    TileConfig(128, 128, warps=8, stages=2, ctas_per_sm=1),
]
PROMPT = [TileConfig(128, 64, warps=8), TileConfig(128, 128, warps=8)]


@dataclass(frozen=True)
class Named:
    """A tile and its short name."""

    config: TileConfig

    @property
    def name(self) -> str:
        tile = self.config
        return (f"{tile.block_m}x{tile.block_n} w{tile.warps} s{tile.stages} "
                f"c{tile.ctas_per_sm} r{tile.max_regs} short{tile.short}")


def candidates(case: Case) -> list[Named]:
    """Return the tiles for a case; none where other tables hold, as for latent attention."""
    rows = case.q_len * case.heads[0] // case.heads[1]
    if case.latent or case.fixed:
        return []
    if case.stored and case.mode != "prompt":
        return [Named(tile) for tile in (FLOAT8 if rows <= 64 else FLOAT8_LARGE)]
    if case.mode == "prompt":
        return [Named(tile) for tile in PROMPT]
    return [Named(t) for t in (SMALL if rows <= 16 else MEDIUM if rows <= 64 else LARGE)]
