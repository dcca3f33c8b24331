"""What the record of `bench.acceptance` says: accepted tokens per step, by draft and tree."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import tables

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "acceptance.json"
PLAIN, LOOKUP = "plain", "lookup"
#: Names of what drafts.
DRAFTS = {
    PLAIN: "none",
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    LOOKUP: "lookup",
    f"{LOOKUP}+eagle3": "lookup, else EAGLE-3",
    f"{LOOKUP}+dflash": "lookup, else DFlash",
}
#: What names of chains begin with.
CHAIN = "chain"


def shown(results: Path) -> str:
    """Return tokens per step of every draft and tree, and how a tree compares with a chain."""
    record = json.loads((results / RECORD).read_text())
    lines = record["results"]
    gains: dict[str, dict[str, dict[float, float]]] = {}
    for draft in DRAFTS:
        for line in lines:
            if line["draft"] == draft != PLAIN:
                row = gains.setdefault(draft, {}).setdefault(line["tree"], {})
                row[line["temperature"]] = line["accepted_per_step"]
    head = ["draft", "tree", "greedy", "of its chain", "temperature 1", "of its chain"]
    body = []
    for draft, trees in gains.items():
        chain: dict[float, float] = next(
            (row for tree, row in trees.items() if tree.startswith(CHAIN)), {}
        )
        for tree, row in trees.items():
            cells = [_cells(row.get(at), chain.get(at)) for at in (0.0, 1.0)]
            body.append([DRAFTS[draft], tree, *cells[0], *cells[1]])
    return f"{_how(record)}\n\n{tables.table(head, body)}"


def _cells(gained: float | None, chain: float | None) -> tuple[str, str]:
    """Return tokens per step, and their ratio to those of the chain."""
    if gained is None:
        return tables.NONE, tables.NONE
    return f"{gained:.2f}", tables.times(gained / chain if chain else None)


def _how(record: dict[str, Any]) -> str:
    counts = {line["tokens"] for line in record["results"]}
    equal = [
        line["requests_equal_to_plain"]
        for line in record["results"]
        if "requests_equal_to_plain" in line and line["draft"] != PLAIN
    ]
    return (
        f"{record['device']}, torch {record['torch'].split('+')[0]}, {record['dtype']}: "
        f"{record['prompts']} prompts of {record['prompt_tokens']} held-out tokens, "
        f"{min(counts):,} new tokens per line. Of the greedy texts of drafts, {sum(equal):,} of "
        f"{len(equal) * record['prompts']:,} are plain decoding's."
    )
