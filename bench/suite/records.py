"""Tables of records that other programs than the suite have left beside its folder."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from . import tables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TILES, CHUNKS = "gluon_tiles_h200.json", "gluon_chunks_h200.json"
TRITON = "Triton"


def _cases(path: Path) -> dict[str, dict[str, float]]:
    """Return microseconds by case and tile."""
    found: dict[str, dict[str, float]] = {}
    for record in json.loads(path.read_text())["records"]:
        page = record.get("page", 1)
        name = record["case"] if page == 1 else f"{record['case']}, page {page}"
        found.setdefault(name, {})[record["tile"]] = record["us"]
    return found


def _choices(times: dict[str, float]) -> str:
    best = min(times.values())
    shown = {name: tables.micros(us) for name, us in times.items()}
    return "; ".join(
        f"**{shown[name]}** {name}" if us == best else f"{shown[name]} {name}"
        for name, us in times.items()
    )


def tiles(results: Path) -> str:
    """The Gluon kernel's tiles beside the Triton kernel."""
    rows, gains = [], []
    for name, times in _cases(results / TILES).items():
        gluon = {tile: us for tile, us in times.items() if tile != TRITON}
        gain = times[TRITON] / min(gluon.values()) if TRITON in times else None
        gains += [gain] if gain else []
        rows.append([name, tables.micros(times.get(TRITON)), _choices(gluon), tables.times(gain)])
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    names: dict[str, Any] = json.loads((results / TILES).read_text())["tiles"]
    return "\n\n".join([
        f"Best Gluon tile against the Triton kernel: geomean {tables.times(mean)} over "
        f"{len(gains)} cases, {tables.times(min(gains))} to {tables.times(max(gains))}.",
        tables.table(["case", "Triton us", "Gluon us, by tile", "gain"], rows),
        "Tiles, query rows x keys: " + "; ".join(
            f"*{name}* {what}" for name, what in names.items()
        ) + ".",
    ])


def chunks(results: Path) -> str:
    """How many key tiles a chunk should have."""
    return _compared(results, lambda name, times: any("at least" in tile for tile in times))


def prompts(results: Path) -> str:
    """Kernels of the prompt."""
    return _compared(results, lambda name, times: name.startswith("prompt"))


def _compared(results: Path, keep: Callable[[str, dict[str, float]], bool]) -> str:
    """Return a column per tile, the best one bold."""
    found = {name: times for name, times in _cases(results / CHUNKS).items() if keep(name, times)}
    heads = list(next(iter(found.values())))
    rows = []
    for name, times in found.items():
        best = min(times.values())
        shown = [tables.micros(us) for us in times.values()]
        marked = zip(times.values(), shown, strict=True)
        rows.append([name, *(f"**{text}**" if us == best else text for us, text in marked)])
    return tables.table(["case, us", *heads], rows)


#: What a page can show, by the name of its place: the record and the table.
TABLES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "gluon-tiles": (TILES, tiles), "gluon-chunks": (CHUNKS, chunks),
    "gluon-prompts": (CHUNKS, prompts),
}


def blocks(results: Path) -> dict[str, str]:
    """Return the tables whose records are there."""
    return {
        name: make(results) for name, (record, make) in TABLES.items()
        if (results / record).exists()
    }
