"""What the record of `bench.soak` says about the memory that proposers need."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import tables

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "soak_proposers.json"
_KIB, _MIB = 2**10, 2**20


def shown(results: Path) -> str:
    """Return draft KV, states and graphs per proposer."""
    found = json.loads((results / RECORD).read_text())
    parts: dict[str, dict[str, Any]] = found["proposers"]
    buckets = " and ".join(map(str, next(iter(parts.values()))["buckets"]))
    body = [
        [
            name,
            f"{one['kv_bytes_per_token'] / _KIB:.0f} KiB",
            f"{one['state_bytes_per_request'] / _KIB:.1f} KiB",
            f"{sum(one['graph_bytes'].values()) / _MIB:.1f} MiB",
        ]
        for name, one in parts.items()
    ]
    head = ["proposer", "draft KV per token", "state per request", "graphs"]
    return (
        f"The shipped pair in {found['dtype']}, contexts of {found['context']} tokens, graphs for "
        f"{buckets} requests that are greedy, drawn or have processors. "
        f"{tables.versions(found['machine'])}.\n\n{tables.table(head, body)}"
    )
