"""What the record of `bench.verify_len` says about requests that share rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import tables

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "verify_len.json"
# settings of whole trees begin with it
_WHOLE = "DFlash"


def shown(results: Path) -> str:
    """Return tokens per step, times and goodput by batch, and what sharing costs by itself."""
    found = json.loads((results / RECORD).read_text())
    us = {(cell["setting"], cell["batch"]): cell["us"] for cell in found["cells"]}
    parts = []
    for batch in dict.fromkeys(gain["batch"] for gain in found["gains"]):
        rows = [gain for gain in found["gains"] if gain["batch"] == batch]
        timed = [row for row in rows if (row["setting"], batch) in us]
        speeds = {row["setting"]: _speed(row, us) for row in timed}
        best = max(speed for name, speed in speeds.items() if name.startswith(_WHOLE))
        body = [
            [
                row["setting"],
                f"{row['verified_p10']:.0f} to {row['verified_p90']:.0f}",
                f"{row['tokens_per_step']:.2f}",
                *_speeds(us.get((row["setting"], batch)), speeds.get(row["setting"]), best),
            ]
            for row in rows
        ]
        head = [f"batch {batch}", "nodes verified", "tokens per step", "ms", "tokens/s", "of best"]
        parts.append(tables.table(head, body))
    return "\n\n".join(
        [
            f"{found['model']} with a DFlash head, {found['context']} tokens of context; tokens "
            f"per step are those of {found['texts']} texts of the shipped pair, of "
            f"{found['tokens']} tokens each, in float32 (on {found['texts_device']}). "
            f"Times: {tables.versions(found['machine'])}.",
            *parts,
            *_alone(found["cells"], us),
        ]
    )


def _speeds(us: float | None, speed: float | None, best: float) -> list[str]:
    """Return milliseconds, tokens per second, and their share of the best."""
    if us is None or speed is None:
        return [tables.NONE] * 3
    return [f"{us / 1e3:.2f}", f"{speed:,.0f}", f"{speed / best:.3f}"]


def _speed(row: dict[str, Any], us: dict[tuple[str, int], float]) -> float:
    return row["batch"] * row["tokens_per_step"] / us[row["setting"], row["batch"]] * 1e6


def _alone(cells: list[dict[str, Any]], us: dict[tuple[str, int], float]) -> list[str]:
    """Compare equal shares with whole trees of as many nodes."""
    found = []
    for cell in cells:
        rows, _, rest = cell["setting"].partition(" of ")
        if rest.endswith(" each"):
            whole = us[f"{_WHOLE} {cell['steps']}-{rows}", cell["batch"]]
            more = tables.percent(cell["us"] / whole - 1)
            found.append(f"{more} for {rows} nodes at batch {cell['batch']}")
    if not found:
        return []
    costs = ", ".join(found)
    return [f"Sharing rows evenly, beside whole trees of as many nodes, costs {costs}."]
