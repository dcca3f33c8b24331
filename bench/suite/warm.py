"""Compiling ahead: several processes fill Triton's cache before anything is timed.

A kernel is compiled for the values it is called with (the divisibility of strides among them), so
the only sure way is to make the very calls, each process its share of them.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import torch

from .batch import Arena, Batch
from .peers import own

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .cases import Cell


def work(cells: Iterable[Cell], index: int, count: int) -> int:
    """Make this process's share of the calls; return how many failed."""
    arena = Arena(torch.device("cuda"), only_one=True)
    failed = 0
    for case in [case for cell in cells for case in cell.cases][index::count]:
        try:
            arena.reserve([case])
            contestant = own(case)(Batch(case, arena))
            contestant.plan()
            contestant.run(0)
            torch.cuda.synchronize()
        # the run itself reports it
        except Exception:
            traceback.print_exc()
            failed += 1
    return failed
