"""Time attention of requests that share prefixes: read once, and read by each.

Every batch is timed as shipped, sharing, not sharing with the same tile, and sharing with a larger
or smaller one; decoding also by FlashInfer's cascade of two levels, whose plan is made on the host.
Batches that share nothing say what looking for it costs. Times are of a layer; ratios are of
``--layers`` layers and one plan.

    python -m bench.tools.shared --out FILE [--only "64 x 17k"] [--rounds 20]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.suite import oracle, roofs, timing
from bench.suite.batch import Arena, Batch
from bench.suite.cases import Case, K, make
from bench.suite.entry import Entry
from bench.suite.machine import machine
from bench.suite.peers import own
from bench.suite.peers.base import int32
from bench.suite.peers.flashinfer import FlashInferCascade
from bench.suite.peers.ours import Ours
from bench.suite.results import write
from bench.suite.run import BUDGET_US
from specattn.kernels.attention.tiles import SHARE_FROM, GluonTile, gluon_tile_config, tile_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.suite.peers.base import Contestant


@dataclass(frozen=True)
class Work:
    """A batch; of each ``group`` of requests, the first ``common`` slots are the same."""

    case: Case
    group: int = 1
    common: int = 0

    @property
    def name(self) -> str:
        shared = f", {self.common // K}k of {self.group} shared" if self.common else ""
        return f"{self.case.name}{shared}"


SHARED = (
    ("64 x 17k decode", 64, 16 * K),
    ("64 x 17k tree 4-3-8", 64, 16 * K),
    ("16 x 34k decode", 16, 32 * K),
    ("16 x 34k tree 4-3-8", 16, 32 * K),
    ("64 x 9k tree 4-3-8", 8, 8 * K),
    ("64 x 9k decode", 8, 8 * K),
    ("32 x 9k draft topk 8 step 2", 32, 8 * K),
)
APART = (
    "1 x 4k tree 4-3-8; 32 x 4k tree 4-3-8; 1 x 64k + 31 x 2k tree 4-3-8; 8 x 8k tree 4-5-16; "
    "8 x 8k tree 8-7-64; 8 x 8k decode; 64 x 1k decode; 256 x 1k tree 4-3-8; 512 x 512 decode; "
    "8 x 8k draft topk 8 step 2"
)
WORK = (
    *(Work(make(name), group, common) for name, group, common in SHARED),
    *(Work(make(name)) for name in APART.split("; ")),
)


class SharedBatch(Batch):
    """A batch in whose table leading slots are those of the group's first request."""

    def __init__(self, work: Work, arena: Arena) -> None:
        super().__init__(work.case, arena)
        self.work = work
        for b in range(work.case.batch):
            first = b - b % work.group
            self.table[b + 1, : work.common] = self.table[first + 1, : work.common]


class Sharing(Ours):
    """The kernel that looks for common slots, and reads them once."""

    name = "specattn, sharing"

    def options(self) -> dict[str, Any]:
        return super().options() | {"share_from": SHARE_FROM}

    def plan(self) -> None:
        batch = self.batch
        self.kernel.plan(batch.lens, batch.rows, batch.table.stride(0), table=batch.table).fill()


class OtherRows(Sharing):
    """The same with tiles of 128 rows in place of 64, or of 64."""

    name = "specattn, sharing, other rows"

    def options(self) -> dict[str, Any]:
        batch, case = self.batch, self.batch.case
        chosen = Sharing(batch).kernel.tile
        rows = 64 if chosen.block_m > 64 else 128
        tile = (
            gluon_tile_config(rows, case.head_dim, case.batch, case.page_size, batch.kv_dtype)
            if isinstance(chosen, GluonTile)
            else tile_config(rows, case.head_dim, case.head_dim, batch.kv_dtype, case.batch)
        )
        return super().options() | {"tile": tile}


class SameTile(Ours):
    """The same tile, and every request reads its own."""

    name = "specattn, same tile"

    def options(self) -> dict[str, Any]:
        return super().options() | {"tile": Sharing(self.batch).kernel.tile}


class Cascade(FlashInferCascade):
    """A level over the groups' common keys, one over the rest."""

    name = "FlashInfer cascade"
    modes = ("chain",)
    batch: SharedBatch

    def __init__(self, batch: SharedBatch) -> None:
        super().__init__(batch)
        work, device = batch.work, batch.device
        firsts = range(0, work.case.batch, work.group)
        common = torch.cat([batch.table[b + 1, : work.common] for b in firsts])
        rest = [
            torch.cat([batch.table[b + 1, work.common : length], batch.tails[b]])
            for b, length in enumerate(work.case.lengths)
        ]
        ends = torch.tensor([len(slots) for slots in rest]).cumsum(0).tolist()
        self.levels = (
            [
                int32([*firsts, work.case.batch], device),
                int32(list(range(work.case.batch + 1)), device),
            ],
            [
                int32([nth * work.common for nth in range(len(firsts) + 1)], device),
                int32([0, *ends], device),
            ],
            [common, torch.cat(rest)],
            [int32([1] * len(firsts), device), int32([1] * work.case.batch, device)],
        )


def contestants(work: Work) -> Iterator[type[Contestant]]:
    yield from (own(work.case), SameTile, OtherRows, Sharing)
    if work.common and work.case.q_len == 1 and Cascade.absent() is None:
        yield Cascade


def measure(work: Work, arena: Arena, rounds: int, copy_tb_s: float) -> list[Entry]:
    """Check and time one batch by everybody, in turn."""
    print(work.name, flush=True)
    arena.reserve([work.case])
    whole = Entry("", work.case)
    whole.batch = SharedBatch(work, arena)
    whole.expected = oracle.answers(whole.batch)
    entries = []
    for kind in contestants(work):
        entry = Entry(kind.name, work.case, setting=kind.setting)
        try:
            entry.prepare(kind, arena, whole)
        # a library may fail in any way, and the others still count
        except Exception as problem:
            entry.failed, entry.recorded = f"{type(problem).__name__}: {problem}", None
        entries.append(entry)
    timing.replay_in_turn([e.recorded for e in entries if e.recorded], rounds, BUDGET_US)
    for entry in entries:
        print("  " + entry.line(copy_tb_s), flush=True)
    return entries


def ratios(entries: list[Entry], layers: int) -> dict[str, float]:
    """Return the time of every other over that of sharing, of a step's layers and plan."""
    times = {
        entry.name: layers * entry.recorded.median + (entry.plan_us or 0)
        for entry in entries
        if entry.recorded
    }
    mine = times.pop(Sharing.name, None)
    return {name: round(other / mine, 3) for name, other in times.items()} if mine else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="batches whose name has this in it")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    arena = Arena(torch.device("cuda"))
    record: dict[str, Any] = {
        "machine": machine(),
        "roofs": roofs.measure(options.rounds),
        "layers": options.layers,
        "cells": [],
    }
    for work in (work for work in WORK if options.only in work.name):
        entries = measure(work, arena, options.rounds, record["roofs"]["copy_tb_s"])
        found = ratios(entries, options.layers)
        print("  " + "  ".join(f"{name}: {ratio:.3f}x" for name, ratio in found.items()))
        cell = {"name": work.name, "ratios": found, "contestants": [e.json() for e in entries]}
        record["cells"].append(cell)
        for entry in entries:
            entry.drop()
        torch.cuda.empty_cache()
        write(record, options.out)


if __name__ == "__main__":
    main()
