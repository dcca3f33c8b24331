"""Compiling ahead: several processes fill Triton's cache before anything is timed.

A kernel is compiled for the values it is called with (the divisibility of strides among them), so
the only sure way is to make the very calls, each process its share of them.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .batch import Arena, Batch
from .peers import own

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .cases import Case, Cell


def key(case: Case) -> tuple[Any, ...]:
    """Return what decides which kernels a case needs, roughly: equal keys go to one process."""
    return replace(case, lengths=(), shape=()), case.tail, min(case.batch, 9)


def share(cells: Iterable[Cell], index: int, count: int) -> list[Case]:
    """Return every ``count``-th group of cases with equal keys."""
    groups: dict[Any, list[Case]] = {}
    for cell in cells:
        for case in cell.cases:
            groups.setdefault(key(case), []).append(case)
    return [case for group in list(groups.values())[index::count] for case in group]


def work(cells: Iterable[Cell], index: int, count: int) -> int:
    """Make this process's share of the calls; return how many failed."""
    arena = Arena(torch.device("cuda"), only_one=True)
    failed = 0
    for case in share(cells, index, count):
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
