"""What the record of `bench.step --host` says about steps whose trees the host drafts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from . import tables
from .steps import place

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "step_host.json"


def shown(results: Path) -> str:
    """Return steps of the device alone, round trips, and what the device waits."""
    found = json.loads((results / RECORD).read_text())
    body = []
    for cell in (cell for cell in found["cells"] if cell["steps"]):
        device, trip = cell["us"], cell["round_trip_us"]
        waits = trip - device
        body.append(
            [
                place(cell),
                str(cell["nodes"]),
                *(f"{us / 1e3:.2f}" for us in (device, trip, waits)),
                tables.percent(waits / trip),
            ]
        )
    head = ["batch x context", "nodes", "step, ms", "round trip, ms", "device waits, ms", "of it"]
    return (
        f"{found['model']}, trees that are at hand: the step by itself, and from handing trees "
        f"over to reading tokens. {tables.versions(found['machine'])}.\n\n"
        f"{tables.table(head, body)}"
    )
