"""What the records of `bench.step` say about whole steps at the real size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import tables
from .summary import Point, Ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

RECORD, HOST_RECORD = "step_h200.json", "step_host.json"
PLAIN, HELD = "plain", "tree 4-5-16"
#: The batch and context whose time is held to its bytes.
PLACE = (1, 4096)
#: Of the batches and contexts, those that the page shows; and of gains, the shortest and longest.
PLACES = ("1 x 1k", "1 x 4k", "1 x 32k", "4 x 4k", "16 x 4k", "16 x 32k", "64 x 4k")
ENDS = ("1 x 1k", "1 x 32k")
Cell = dict[str, Any]


@dataclass(frozen=True)
class Public:
    """Tokens per step that somebody has measured with Llama-3.1-8B and its EAGLE-3 head."""

    setting: str
    tokens: float
    source: str


#: All of MT-bench at temperature 0. Settings are the nearest to theirs.
MODEL = "Llama-3.1-8B"
ACCEPTED = (
    Public(
        "tree 4-5-16",
        4.68,
        "[SGLang #4247](https://github.com/sgl-project/sglang/pull/4247), 5 steps",
    ),
    Public("tree 8-7-64", 5.39, "the same, 8 steps"),
    Public("tree 8-7-64", 6.13, "[EAGLE-3](https://arxiv.org/abs/2503.01840), table 1"),
)


def read(results: Path) -> list[Cell]:
    """Return the cells that were measured, each with the time of its products alone."""
    return measured(json.loads((results / RECORD).read_text()))


def measured(record: dict[str, Any]) -> list[Cell]:
    """Return a record's cells that were measured, each with the time of its products alone."""
    speed = record["roofs"]["matmul_tflops"] * 1e6
    return [
        cell | {"products_us": cell["operations"] / speed}
        for cell in record["cells"]
        if "skipped" not in cell
    ]


def shown(results: Path) -> str:
    """Return steps over their bytes, and what speculation gains."""
    cells = [cell for cell in read(results) if cell["model"] == MODEL]
    rows = by_place(cell for cell in cells if place(cell) in PLACES)
    return "\n\n".join(
        [
            f"{MODEL}, ms and ratio to the bytes at the speed of a copy (with *: to the "
            "products at the speed of a large square one, where these take longer):",
            times(rows, [name for name in settings_of(rows) if name != PLAIN]),
            f"{MODEL} against plain decoding, batch 1, at tokens per step measured elsewhere:",
            gains([cell for cell in cells if place(cell) in ENDS]),
        ]
    )


def shown_host(results: Path) -> str:
    """Return, of trees that the host drafts, steps of the device alone, round trips, and waits."""
    found = json.loads((results / HOST_RECORD).read_text())
    body = []
    for cell in (cell for cell in found["cells"] if cell["steps"]):
        device, trip = cell["us"], cell["round_trip_us"]
        waits = trip - device
        spans = (f"{us / 1e3:.2f}" for us in (device, trip, waits))
        body.append([place(cell), str(cell["nodes"]), *spans, tables.percent(waits / trip)])
    head = ["batch x context", "nodes", "step, ms", "round trip, ms", "device waits, ms", "of it"]
    return (
        f"{found['model']}, trees that are at hand: the step by itself, and from handing trees "
        f"over to reading tokens. {tables.versions(found['machine'])}.\n\n"
        f"{tables.table(head, body)}"
    )


def place(cell: Cell) -> str:
    return f"{cell['batch']} x {cell['context'] // 1024}k"


def by_place(cells: Iterable[Cell]) -> dict[str, dict[str, Cell]]:
    """Return cells by batch and context, then by setting."""
    rows: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault(place(cell), {})[cell["setting"]] = cell
    return rows


def settings_of(rows: dict[str, dict[str, Cell]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows.values() for name in row))


def times(rows: dict[str, dict[str, Cell]], compared: Sequence[str] = ()) -> str:
    """A row per batch and context, a column per setting, then those compared with plain."""
    settings = settings_of(rows)
    head = ["batch x context", *settings, *(f"{name} = plain" for name in compared)]
    body = [
        [
            name,
            *(over_floor(row.get(setting)) for setting in settings),
            *(_even(row, setting) for setting in compared),
        ]
        for name, row in rows.items()
    ]
    return tables.table(head, body)


def over_floor(cell: Cell | None) -> str:
    """Milliseconds, and the ratio to the bytes, or with * to the products that take longer."""
    if cell is None:
        return tables.NONE
    floor, products = cell["floor_us"], cell["products_us"]
    ratio = tables.times(cell["us"] / max(floor, products))
    return f"{cell['us'] / 1e3:.2f}, {ratio}{' *' if products > floor else ''}"


def _even(row: dict[str, Cell], setting: str) -> str:
    """The tokens per step from which on speculation is faster."""
    if PLAIN not in row or setting not in row:
        return tables.NONE
    return f"{row[setting]['us'] / row[PLAIN]['us']:.2f}"


def gains(cells: list[Cell]) -> str:
    """A row per public measurement and context."""
    rows = []
    for found in ACCEPTED:
        for step, plain in _pairs(cells, found.setting, MODEL):
            rows.append(
                [
                    found.setting,
                    f"{found.tokens:.2f}",
                    found.source,
                    place(step),
                    f"{1e6 / plain['us']:.0f}",
                    f"{1e6 * found.tokens / step['us']:.0f}",
                    tables.times(gain(found, step, plain)),
                ]
            )
    head = [
        "setting",
        "tokens per step",
        "measured by",
        "batch x context",
        "plain tokens/s",
        "tokens/s",
        "gain",
    ]
    return tables.table(head, rows)


def gain(found: Public, step: Cell, plain: Cell) -> float:
    """How many times faster than plain decoding a step is at what is accepted."""
    return float(found.tokens * plain["us"] / step["us"])


def _pairs(cells: list[Cell], setting: str, model: str) -> Iterable[tuple[Cell, Cell]]:
    """Return single requests' steps of a setting, each with plain decoding's."""
    plain = {
        cell["context"]: cell
        for cell in cells
        if (cell["model"], cell["setting"], cell["batch"]) == (model, PLAIN, 1)
    }
    for cell in cells:
        here = (cell["model"], cell["setting"], cell["batch"]) == (model, setting, 1)
        if here and cell["context"] in plain:
            yield cell, plain[cell["context"]]


def ratios(results: Path) -> list[Ratio]:
    """Return what speculation gains, and one step over its bytes."""
    cells = read(results) if (results / RECORD).exists() else []
    held = [
        Point(cell["us"] / cell["floor_us"], f"{cell['model']}, {place(cell)} {cell['setting']}")
        for cell in cells
        if cell["setting"] == HELD and (cell["batch"], cell["context"]) == PLACE
    ]
    faster = [
        Point(gain(found, step, plain), f"{place(step)} {found.setting}, {found.tokens:.2f} tokens")
        for found in ACCEPTED
        for step, plain in _pairs(cells, found.setting, MODEL)
    ]
    return [
        Ratio(
            "EAGLE-3 at 8B, one request, forced to the acceptance that is published, against plain",
            "whole-steps",
            faster,
        ),
        Ratio(
            "its step, 4k tokens, 16 nodes, over the reading of its bytes (less is better)",
            "whole-steps",
            held,
            low=True,
        ),
    ]
