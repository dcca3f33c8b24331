"""What the record of `bench.soak` says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import tables

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "soak_h200.json"
#: The runs of a record, and what they are called.
RUNS = {
    "one_setting": "one setting",
    "switching": "a setting at random for every step",
    "three": "three graphs per step",
    "halves": "two-batch overlap",
}


def shown(results: Path) -> str:
    """Return a table of the runs."""
    record = json.loads((results / RECORD).read_text())
    head = [
        "",
        "steps",
        "requests",
        "dropped in flight",
        "batch",
        "greedy texts, other than plain",
        "drawn texts, other than alone",
        "slots lost",
        "device memory grew by",
        "host memory, peak, after a tenth and at the end",
        "tokens per step, first and last",
        "s",
        "passed",
    ]
    rows = [_row(name, record[key]) for key, name in RUNS.items() if key in record]
    found = record["machine"]
    return "\n\n".join(
        [
            tables.table(head, rows),
            f"{found['device']}, {record['dtype']}, commit `{found['commit']}`. The largest margin "
            f"between the two best logits where a greedy text departs is {_margin(record)}.",
        ]
    )


def _row(name: str, run: dict[str, Any]) -> list[str]:
    whole = "memory_end" in run
    grown = held = lost = gained = tables.NONE
    if whole:
        before, after = (run[f"memory_{at}"].get("allocated", 0) for at in ("warm", "end"))
        grown, lost = f"{after - before:,} bytes", str(run["slots_lost"])
        held = " to ".join(f"{run[f'memory_{at}']['rss_kib']:,}" for at in ("warm", "end")) + " KiB"
        gained = ", ".join(f"{run[f'{part}_steps']['mean']:.2f}" for part in ("first", "last"))
    sizes = run["batch_sizes"]
    drawn = f"{run['drawn_apart']} of {run['drawn']:,}"
    if not run["drawn"]:  # where settings switch
        drawn = f"{run['requests'] - run['greedy']:,} not compared"
    return [
        name,
        f"{run['steps']:,}",
        f"{run['requests']:,}",
        str(run["dropped"]),
        f"{sizes[0]} to {sizes[-1]}",
        f"{run['greedy_apart']} of {run['greedy']:,}",
        drawn,
        lost,
        grown,
        held,
        gained,
        f"{run['seconds']:.0f}",
        "yes" if run["passed"] else "no",
    ]


def _margin(record: dict[str, Any]) -> str:
    margins = [record[key]["largest_margin"] for key in RUNS if key in record]
    return f"{max(margins):.1e}" if any(margins) else "0, for none does"
