"""What the record of `bench.steady` says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import tables
from .steps import NOISY

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "steady_h200.json"


def shown(results: Path) -> str:
    """Return a table of what the host took, by setting and batch."""
    record = json.loads((results / RECORD).read_text())
    head = [
        "setting",
        "batch",
        "rehearsed",
        "a step, us",
        "host, us",
        "a tenth below",
        "a tenth above",
        "a hundredth above",
        "within 60 us",
        "of launches on a calm host",
        "of these, us",
        "within 60 us",
        "reserving slots, us",
        "a fixed loop, us",
        "steps",
        "requests joined",
        "ended",
        "allocations",
    ]
    found = record["machine"]
    return "\n\n".join(
        [
            tables.table(head, [_row(cell) for cell in record["cells"]]),
            f"{record['model']}, {record['context']} tokens when a request joins; "
            f"{found['device']}, commit `{found['commit']}`. On a calm host the fixed loop takes "
            f"{record['calm_loop_us']:.1f} us; one that takes {NOISY} times as long at the most "
            "counts as calm.",
        ]
    )


def _row(cell: dict[str, Any]) -> list[str]:
    host, sizes, calm = cell["host_us"], cell["sizes"], cell["calm"]
    least, most = sizes[0], sizes[-1]
    return [
        cell["setting"],
        f"{least} to {most}" if least < most else str(most),
        "yes" if cell["rehearsed"] else "no",
        tables.micros(cell["us"]),
        *(tables.micros(host[name]) for name in ("median", "p10", "p90", "p99")),
        tables.percent(cell["within"]),
        tables.percent(calm["share"]),
        *(
            (tables.micros(calm["median"]), tables.percent(calm["within"]))
            if "median" in calm
            else ("-", "-")
        ),
        *(tables.micros(cell[name]["median"]) for name in ("reserve_us", "loop_us")),
        f"{cell['steps']:,}",
        f"{cell['joined']:,}",
        f"{cell['ended']:,}",
        str(cell["allocations"]),
    ]
