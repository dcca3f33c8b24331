"""How many programs share the row of a table that may be long or short."""

from __future__ import annotations

# programs that keep the largest GPUs busy; more than are needed cost time to start
PROGRAMS = 2048


def programs_per_row(rows: int, blocks: int) -> int:
    """Choose how many programs share each of ``rows`` rows of at most ``blocks`` blocks.

    Lengths are known on the device alone, and most rows are far shorter than they may be: a
    program per block would start many for nothing. Each takes every n-th block instead.
    """
    return max(1, min(blocks, PROGRAMS // max(rows, 1)))
