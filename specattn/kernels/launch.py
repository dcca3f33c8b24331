"""Launches as the host sees them: options, grids, and sizes of blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# lanes of a warp
_WARP = 32
# rows up to which there are so few programs that small ones are best
_FEW_ROWS = 64
# programs that keep the largest GPUs busy; more than are needed cost time to start
PROGRAMS = 2048


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether ``device`` knows programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, Any]:
    """Return what a kernel needs that passes its constant ``PDL`` to `pdl.enter`."""
    return {"PDL": True, "launch_pdl": True} if supports_pdl(device) else {"PDL": False}


def programs_per_row(rows: int, blocks: int) -> int:
    """Choose how many programs share a row of at most ``blocks`` blocks.

    Lengths are known on the device alone, and most rows are far shorter than they may be: a program
    per block would start many for nothing. Each takes every n-th block instead.
    """
    return max(1, min(blocks, PROGRAMS // max(rows, 1)))


def columns_of(rows: int) -> tuple[int, int]:
    """Return the columns and warps of a program that sums or gates.

    Programs of a row are many: of few rows so that each multiprocessor has some, of more rows they
    are larger, or starting them takes longer than running them.
    """
    return (512, 2) if rows <= _FEW_ROWS else (2048, 8)


def split_lanes(splits: int) -> int:
    """Return the width of blocks that hold a row's splits.

    More rows have fewer splits each, and every width is compiled anew: none is below a warp's.
    """
    return max(power_of_2(splits), _WARP)


def cdiv(size: int, block: int) -> int:
    """Return how many blocks hold ``size`` elements."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """Return the least power of two from ``size`` on, at least 1."""
    return 1 << max(size - 1, 0).bit_length()
