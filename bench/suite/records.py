"""Tables of records that other programs than the suite have left beside its folder."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from . import decode, metadata, seams, soak, steady, steps, tables
from .targets import Point, Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TILES, CHUNKS = "gluon_tiles_h200.json", "gluon_chunks_h200.json"
SMALL, SANITIZER = "small_ops_h200.json", "sanitizer_h200.json"
LATENT = "mla_variants_h200.json"
COMPILED, SPEEDS = "compile_targets.json", "two_speeds_h200.json"
TRITON = "Triton"
#: Small kernels that were asked to take a few microseconds up to this batch.
ASKED = {
    "plan": "plan, alone",
    "tree": "tree build",
    "accept greedy": "accept, greedy",
    "kv move, 1 layer": "KV move, one layer",
}
BATCH = 256
#: Variants of latent attention that a page shows, and what it calls them.
SHOWN = {
    "triton": "Triton",
    "gluon parts 1": "Gluon, both score",
    "gluon share parts 1": "Gluon, one scores",
    "flashinfer fa3": "FlashInfer MLA",
    "flashmla": "FlashMLA",
}


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
    return "\n\n".join(
        [
            f"Best Gluon tile against the Triton kernel: geomean {tables.times(mean)} over "
            f"{len(gains)} cases, {tables.times(min(gains))} to {tables.times(max(gains))}.",
            tables.table(["case", "Triton us", "Gluon us, by tile", "gain"], rows),
            "Tiles, query rows x keys: "
            + "; ".join(f"*{name}* {what}" for name, what in names.items())
            + ".",
        ]
    )


def chunks(results: Path) -> str:
    """How many key tiles a chunk should have."""
    return _compared(results, lambda name, times: any("at least" in tile for tile in times))


def prompts(results: Path) -> str:
    """Kernels of the prompt."""
    return _compared(results, lambda name, times: name.startswith("prompt"))


def _compared(results: Path, keep: Callable[[str, dict[str, float]], bool]) -> str:
    """Return a column per tile, the best one bold."""
    found = {name: times for name, times in _cases(results / CHUNKS).items() if keep(name, times)}
    return _columns(found)


def latent(results: Path) -> str:
    """Show designs of the Gluon kernel of latent attention beside other kernels."""
    found: dict[str, dict[str, float]] = {}
    for record in json.loads((results / LATENT).read_text())["records"]:
        times = found.setdefault(record["case"], {"floor": record["floor_us"]})
        if record["variant"] in SHOWN:
            times[SHOWN[record["variant"]]] = record["us"]
    return _columns(found)


def _columns(found: dict[str, dict[str, float]]) -> str:
    heads = list(next(iter(found.values())))
    rows = []
    for name, times in found.items():
        best = min(us for tile, us in times.items() if tile != "floor")
        shown = [tables.micros(us) for us in times.values()]
        marked = zip(times.values(), shown, strict=True)
        rows.append([name, *(f"**{text}**" if us == best else text for us, text in marked)])
    return tables.table(["case, us", *heads], rows)


def small(results: Path) -> str:
    """What a step does besides attention and models, by batch."""
    found = json.loads((results / SMALL).read_text())
    trees: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for cell in found["cells"]:
        key = tuple(cell["case"][name] for name in ("topk", "steps", "nodes"))
        trees.setdefault(key, []).append(cell)
    texts = []
    for (topk, depth, nodes), cells in trees.items():
        rows = {line["name"]: [line["name"]] for cell in cells for line in cell["contestants"]}
        for cell in cells:
            times = {line["name"]: line.get("us") for line in cell["contestants"]}
            for name, row in rows.items():
                row.append(tables.micros(times.get(name)))
        head = ["us", *(f"batch {cell['case']['batch']}" for cell in cells)]
        texts += [f"Topk {topk}, {depth} steps, {nodes} nodes:", tables.table(head, rows.values())]
    empty = found["roofs"]["empty_1_us"]
    return "\n\n".join([*texts, f"An empty kernel takes {tables.micros(empty)} us there."])


def sanitizer(results: Path) -> str:
    """What compute-sanitizer said."""
    rows = []
    for run in json.loads((results / SANITIZER).read_text())["runs"]:
        if run["tool"] == "none":
            continue
        shown = [
            tables.NONE if run[name] is None else str(run[name]) for name in ("errors", "warnings")
        ]
        cases = f"{len(run['ran'])} of {run['cases']}"
        rows.append(
            [
                run["tool"],
                run["group"],
                run["commit"],
                cases,
                *shown,
                run["explanation"] or tables.NONE,
            ]
        )
    head = ["tool", "kernels", "version", "cases", "errors", "warnings", "explanation"]
    return tables.table(head, rows)


def compiled(results: Path) -> str:
    """Registers, spilled bytes and shared memory of the attention kernels on every target."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    targets = set()
    for record in json.loads((results / COMPILED).read_text())["records"]:
        name = record["kernel"].strip("_").removesuffix("_kernel")
        targets.add(record["target"])
        if name.endswith(("attention", "extend")):
            spilled = f" (+{record['stack']})" if record["stack"] else ""
            rows.setdefault((name, record["case"]), {})[record["target"]] = (
                f"{record['registers']}{spilled}, {record['shared'] / 1024:.0f} KB"
            )
    head = ["kernel", "case", *(f"SM{target}" for target in sorted(targets))]
    return tables.table(
        head,
        (
            [*key, *(row.get(target, tables.NONE) for target in sorted(targets))]
            for key, row in rows.items()
        ),
    )


def speeds(results: Path) -> str:
    """Return a row for every list of things that a process did, and what was timed after each."""
    rows = []
    for found in json.loads((results / SPEEDS).read_text())["lists"]:
        tiny = ", ".join(f"{row['after']} {tables.micros(row['tiny'])}" for row in found["rows"])
        rows.append([found["name"], tiny, _steps_after(found["rows"])])
    head = ["list", "the tiny kernels' graph after, us", "then a step in one graph / three, us"]
    return tables.table(head, rows)


def _steps_after(rows: list[dict[str, Any]]) -> str:
    found = [
        f"{row['after']} {tables.micros(row[decode.ONE])} / {tables.micros(row[decode.THREE])}"
        for row in rows
        if decode.ONE in row
    ]
    return ", ".join(found) or tables.NONE


def asked(results: Path) -> list[Target]:
    """Return the targets that small kernels are held to."""
    points: dict[str, list[Point]] = {name: [] for name in ASKED}
    if (results / SMALL).exists():
        for cell in json.loads((results / SMALL).read_text())["cells"]:
            for line in cell["contestants"]:
                if line["name"] in ASKED and "us" in line and cell["case"]["batch"] <= BATCH:
                    points[line["name"]].append(Point(line["us"], cell["name"]))
    return [
        Target(f"{title}, batch <= {BATCH}", "us", 4, 2.5, points[name], low=True)
        for name, title in ASKED.items()
    ]


#: What a page can show, by the name of its place: the record and the table.
TABLES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "gluon-tiles": (TILES, tiles),
    "gluon-chunks": (CHUNKS, chunks),
    "gluon-prompts": (CHUNKS, prompts),
    "small-ops": (SMALL, small),
    "sanitizer": (SANITIZER, sanitizer),
    "metadata": (metadata.RECORD, metadata.shown),
    "mla-variants": (LATENT, latent),
    "compiled": (COMPILED, compiled),
    "pair": (decode.RECORD, decode.shown),
    "pair-seams": (seams.RECORD, seams.shown),
    "soak": (soak.RECORD, soak.shown),
    "pair-seams-modules": (seams.MODULES, partial(seams.shown, name=seams.MODULES)),
    "two-speeds": (SPEEDS, speeds),
    "steps": (steps.RECORD, steps.shown),
    "steady": (steady.RECORD, steady.shown),
}


def blocks(results: Path) -> dict[str, str]:
    """Return the tables whose records are there."""
    return {
        name: make(results)
        for name, (record, make) in TABLES.items()
        if (results / record).exists()
    }
