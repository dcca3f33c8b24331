"""Running parts: roofs, then cell after cell; every result is written as soon as it is there.

Kernels are compiled ahead: several processes fill Triton's cache before anything is timed. A kernel
is compiled for the values it is called with (the divisibility of strides among them), so the only
sure way is to make the very calls, each process its share of them.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from . import results, roofs, timing
from .batch import Arena, Batch
from .entry import Entry
from .machine import machine
from .peers import PEERS, own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from .cases import Case, Cell, Part
    from .peers.base import Contestant

FORMAT = 1
#: Microseconds that all replays of a contestant may take; five are always taken.
BUDGET_US = 4e5


class DeviceLost(Exception):
    """A kernel broke the CUDA context: nothing more runs in this process.

    Parameters
    ----------
    kernel, cell : str
        Which one, and where.
    """

    def __init__(self, kernel: str, cell: str) -> None:
        super().__init__(f"{kernel}@{cell}")


class Runner:
    """Runs parts on the current CUDA device.

    Parameters
    ----------
    out : Path
        The folder of the results, one file per part.
    rounds : int
        Replays of every contestant.
    log : callable
        Where lines go.
    commit : str, optional
        What the results call this version; git's name for it by default.
    skip : sequence of str
        Contestants to leave out, by name or as ``name@cell``.
    resume : bool
        Whether cells that are in ``out`` already are kept.
    """

    def __init__(
        self,
        out: Path,
        *,
        rounds: int,
        log: Callable[[str], None],
        commit: str | None = None,
        skip: Sequence[str] = (),
        resume: bool = False,
    ) -> None:
        self.out, self.rounds, self.log, self.commit = out, rounds, log, commit
        self.skip, self.resume = set(skip), resume
        self.arena = Arena(torch.device("cuda"))
        # what FlashInfer has not built is told as such; set to nothing, it compiles for minutes
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
        self.absent = {kind.name: reason for kind in PEERS if (reason := kind.absent())}

    def part(self, part: Part) -> dict[str, Any]:
        """Run a part and return what its file holds.

        Raises
        ------
        DeviceLost
            If a contestant broke the CUDA context.
        """
        began = time.perf_counter()
        torch.manual_seed(0)
        kept = self._kept(part.name)
        found: dict[str, Any] = {
            "format": FORMAT,
            "part": part.name,
            "title": part.title,
            "machine": machine(self.commit),
            "rounds": self.rounds,
            "roofs": roofs.measure(self.rounds),
            "absent": self.absent,
            "cells": [],
        }
        self.log(
            f"== {part.name} on {found['machine']['device']}: "
            + "  ".join(f"{name} {value:.2f}" for name, value in found["roofs"].items())
        )
        for name, reason in self.absent.items():
            self.log(f"   absent: {name}: {reason}")
        for cell in part.cells:
            found["cells"].append(
                kept.get(cell.name) or self.cell(cell, found["roofs"]["copy_tb_s"])
            )
            found["seconds"] = round(time.perf_counter() - began, 1)
            results.write(found, self.out / f"{part.name}.json")
        self.log(f"== {part.name}: {found['seconds']} s")
        return found

    def _kept(self, name: str) -> dict[str, Any]:
        path = self.out / f"{name}.json"
        if not self.resume or not path.exists():
            return {}
        return {cell["name"]: cell for cell in json.loads(path.read_text())["cells"]}

    def cell(self, cell: Cell, copy_tb_s: float) -> dict[str, Any]:
        """Check, then time everybody who serves the cell, in turn."""
        began = time.perf_counter()
        self.log(cell.name)
        self.arena.reserve(cell.cases)
        entries = self._own(cell)
        for kind in PEERS if cell.peers else ():
            if kind.name not in self.absent:
                entries += self._peer(cell, kind, entries[0])
        running = [entry.recorded for entry in entries if entry.recorded]
        timing.replay_in_turn(running, self.rounds, BUDGET_US)
        for entry in entries:
            self.log("  " + entry.line(copy_tb_s))
        found = {
            "name": cell.name,
            "case": describe(cell.case),
            "variants": {label: describe(case) for label, case in cell.variants},
            "contestants": [entry.json() for entry in entries],
            "seconds": round(time.perf_counter() - began, 2),
        }
        for entry in entries:
            entry.drop()
        torch.cuda.empty_cache()
        return found

    def _own(self, cell: Cell) -> list[Entry]:
        """Return specattn's kernel, and the cell's variants of it."""
        return [
            self._enter(cell, f"{own(case).name} {label}".strip(), case, own(case), None)
            for label, case in (("", cell.case), *cell.variants)
        ]

    def _peer(self, cell: Cell, kind: type[Contestant], first: Entry) -> list[Entry]:
        """Return the peer's entry, or none where nobody would expect it."""
        try:
            reason = kind.refuses(cell.case)
        # a library may fail in any way, and the others still count
        except Exception as problem:
            self.log(traceback.format_exc())
            reason = f"{type(problem).__name__}: {str(problem)[:200]}"
        if reason is None:
            return [self._enter(cell, kind.name, cell.case, kind, first)]
        return [Entry(kind.name, cell.case, setting=kind.setting, failed=reason)] if reason else []

    def _enter(
        self,
        cell: Cell,
        name: str,
        case: Case,
        kind: type[Contestant],
        like: Entry | None,
    ) -> Entry:
        """Make a contestant ready; a failure is its result.

        Raises
        ------
        DeviceLost
            If the device does not answer after it.
        """
        entry = Entry(name, case, setting=kind.setting)
        if {name, f"{name}@{cell.name}"} & self.skip:
            entry.failed = "left out"
            return entry
        try:
            entry.prepare(kind, self.arena, like)
        # as above
        except Exception as problem:
            self.log(traceback.format_exc())
            entry.failed = f"{type(problem).__name__}: {str(problem)[:300]}"
            entry.recorded = entry.contestant = None
        try:
            torch.cuda.synchronize()
        except Exception as problem:
            raise DeviceLost(name, cell.name) from problem
        return entry


def compile_share(cells: Iterable[Cell], index: int, count: int) -> int:
    """Make this process's share of the calls, for their kernels; return how many failed."""
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


def describe(case: Case) -> dict[str, Any]:
    """Return a case as JSON, equal lengths as (batch, length)."""
    found = asdict(case)
    if len(set(case.lengths)) == 1:
        found["lengths"] = [case.batch, case.lengths[0]]
    return found | {
        "batch": case.batch,
        "tokens": sum(case.lengths),
        "tail": case.tail,
        "size": case.size,
    }
