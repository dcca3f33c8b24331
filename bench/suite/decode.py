"""What the record of `bench.decode` says about decoding with the shipped pair."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

from . import tables

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

RECORD = "pair_h200.json"
PLAIN, TRANSFORMERS = "plain", "transformers"
ONE, THREE, HALVES, EAGER = "one graph", "three graphs", "two-batch overlap", "eager"
WAYS = (ONE, THREE, HALVES, EAGER)
MODELS = {"transformers": "transformers' modules", "fused": "`FusedTarget`"}

Lines = dict[tuple[str, str], dict[str, Any]]


def _lines(cell: dict[str, Any]) -> Lines:
    return {(line["setting"], line["way"]): line for line in cell["lines"]}


def gain(lines: Lines, setting: str) -> float | None:
    """Return one graph's speed over three graphs', of medians over captures, if both were timed."""
    one, three = lines.get((setting, ONE)), lines.get((setting, THREE))
    if one is None or three is None:
        return None
    return statistics.median(one["runs"]) / statistics.median(three["runs"])


def shown(results: Path) -> str:
    """Return a table for greedy and one for drawn tokens, and how many greedy texts are equal."""
    record = json.loads((results / RECORD).read_text())
    cells = record["cells"]
    texts = [
        f"Models of {MODELS[record['models']]}, {record['dtype']}; transformers' `generate` runs "
        "transformers' modules."
    ]
    for title, chosen in {
        "Greedy": [cell for cell in cells if not cell["temperature"]],
        "Temperature 1": [cell for cell in cells if cell["temperature"]],
    }.items():
        texts += [f"{title}, tokens per second:", _table(chosen)] if chosen else []
    equal = _equal(cell for cell in cells if not cell["temperature"])
    return "\n\n".join([*texts, f"Of the greedy texts, {equal} are plain decoding's."])


def _table(cells: list[dict[str, Any]]) -> str:
    head = [
        "batch",
        "setting",
        "tokens per step",
        *WAYS,
        "one / three",
        "one / plain",
        "one / transformers",
    ]
    rows = []
    for cell in cells:
        lines = _lines(cell)
        best = lines.get((PLAIN, ONE))
        theirs = lines.get((TRANSFORMERS, EAGER))
        for setting in dict.fromkeys(setting for setting, _ in lines):
            if setting == TRANSFORMERS:
                continue
            own = {way: lines.get((setting, way)) for way in WAYS}
            first = next(line for line in own.values() if line)
            kept = first.get("accepted_per_step")
            rows.append(
                [
                    str(cell["batch"]),
                    setting,
                    f"{kept:.2f}" if kept else "1.00",
                    *(_speed(line) for line in own.values()),
                    tables.times(gain(lines, setting)),
                    tables.times(_ratio(own[ONE], best if setting != PLAIN else None)),
                    tables.times(_ratio(own[ONE], theirs)),
                ]
            )
    return tables.table(head, rows)


def _speed(line: dict[str, Any] | None) -> str:
    return tables.NONE if line is None else f"{line['tokens_per_second']:,.0f}"


def _ratio(line: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    if line is None or other is None:
        return None
    ratio: float = line["tokens_per_second"] / other["tokens_per_second"]
    return ratio


def _equal(cells: Iterable[dict[str, Any]]) -> str:
    """Count the texts that are what they are compared with, and all that are."""
    counts = [
        (line["equal"], cell["batch"])
        for cell in cells
        for line in cell["lines"]
        if line["equal"] is not None
    ]
    same, asked = (sum(column) for column in zip(*counts, strict=True))
    return f"{same} of {asked}"
