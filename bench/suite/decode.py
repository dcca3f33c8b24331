"""What the record of `bench.decode` says about decoding with the shipped pair."""

from __future__ import annotations

import json
import math
import statistics
from typing import TYPE_CHECKING, Any

from . import tables
from .targets import Point, Target

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

RECORD = "pair_h200.json"
PLAIN, TRANSFORMERS = "plain", "transformers"
ONE, THREE, HALVES, EAGER = "one graph", "three graphs", "two-batch overlap", "eager"
WAYS = (ONE, THREE, HALVES, EAGER)
HOW = {THREE: "in three graphs", HALVES: "with two-batch overlap", EAGER: "eager"}
MODELS = {"transformers": "transformers' modules", "fused": "`FusedTarget` and `FusedEagle3`"}

Lines = dict[tuple[str, str], dict[str, Any]]


def _lines(cell: dict[str, Any]) -> Lines:
    return {(line["setting"], line["way"]): line for line in cell["lines"]}


def gain(lines: Lines, setting: str, runs: str = "runs") -> float | None:
    """Return one graph's speed over three graphs', of medians over captures, if both were timed.

    ``runs`` are those launched a step ahead, or ``"waited"``.
    """
    one, three = lines.get((setting, ONE)), lines.get((setting, THREE))
    if one is None or three is None or runs not in one:
        return None
    return statistics.median(one[runs]) / statistics.median(three[runs])


def spread(cells: list[dict[str, Any]]) -> float:
    """Return the median, over all graphs, of the fastest capture over the slowest."""
    return statistics.median(
        max(line["runs"]) / min(line["runs"])
        for cell in cells
        for line in cell["lines"]
        if line["way"] in (ONE, THREE) and line["setting"] != PLAIN
    )


def gains(cells: list[dict[str, Any]]) -> list[Point]:
    """Return `gain` wherever it is known."""
    found = []
    for cell in cells:
        lines = _lines(cell)
        for setting in dict.fromkeys(setting for setting, _ in lines):
            ratio = gain(lines, setting)
            found += [Point(ratio, f"{cell['name']}, {setting}")] if ratio else []
    return found


def slower(cells: list[dict[str, Any]]) -> list[str]:
    """Say where one graph was slower than three, and how fast it was beside them."""
    return [f"{point.where}: {point.value:.3f}x" for point in gains(cells) if point.value < 1]


def shown(results: Path) -> str:
    """Return a table for greedy and one for drawn tokens, and how one graph compares with three."""
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
    return "\n\n".join([*texts, *_verdict(cells)])


def _table(cells: list[dict[str, Any]]) -> str:
    waited = _waited(cells)
    head = [
        "batch",
        "setting",
        "tokens per step",
        *WAYS,
        "one / three",
        *(["one / three, waited for"] if waited else []),
        "one / plain",
        "one / transformers",
    ]
    rows = []
    for cell in cells:
        lines = _lines(cell)
        best = lines.get((PLAIN, ONE))
        theirs = lines.get((TRANSFORMERS, EAGER))
        for setting in dict.fromkeys(setting for setting, _ in lines):
            own = {way: lines.get((setting, way)) for way in WAYS}
            first = next(line for line in own.values() if line)
            kept = first.get("accepted_per_step")
            name = "transformers' `generate`" if setting == TRANSFORMERS else setting
            rows.append(
                [
                    str(cell["batch"]),
                    name,
                    f"{kept:.2f}" if kept else "1.00",
                    *(_speed(line) for line in own.values()),
                    tables.times(gain(lines, setting)),
                    *([tables.times(gain(lines, setting, "waited"))] if waited else []),
                    tables.times(_ratio(own[ONE], best if setting != PLAIN else None)),
                    tables.times(_ratio(own[ONE], theirs)),
                ]
            )
    return tables.table(head, rows)


def _waited(cells: list[dict[str, Any]]) -> bool:
    """Whether steps were also timed without going ahead, and graphs captured for every turn."""
    return any("waited" in line for cell in cells for line in cell["lines"])


def _speed(line: dict[str, Any] | None) -> str:
    return tables.NONE if line is None else f"{line['tokens_per_second']:,.0f}"


def _ratio(line: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    if line is None or other is None:
        return None
    ratio: float = line["tokens_per_second"] / other["tokens_per_second"]
    return ratio


def _verdict(cells: list[dict[str, Any]]) -> list[str]:
    found, late = gains(cells), slower(cells)
    if not found:
        return []
    ratios = [point.value for point in found]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    where = f": {'; '.join(late)}" if late else ""
    texts = [
        f"Launched a step ahead, one graph is {mean:.3f}x as fast as three (geomean of "
        f"{len(found)} cells), and slower in {len(late)} of them{where}. Of the greedy texts, "
        f"{_equal(cell for cell in cells if not cell['temperature'])} are plain decoding's.",
        *_drawn([cell for cell in cells if cell["temperature"]]),
    ]
    if _waited(cells):
        texts.append(
            "Graphs are captured anew for every turn, because they differ in time: the fastest "
            f"capture of a step is {spread(cells):.3f}x as fast as the slowest (median). *Waited "
            "for* is without going ahead: every step is read before the next is launched."
        )
    return texts


def _equal(cells: Iterable[dict[str, Any]], way: str | None = None) -> str:
    """Count the texts that are what they are compared with, and all that are; of one way or all."""
    counts = [
        (line["equal"], cell["batch"])
        for cell in cells
        for line in cell["lines"]
        if line["equal"] is not None and way in (None, line["way"])
    ]
    same, asked = (sum(column) for column in zip(*counts, strict=True))
    return f"{same} of {asked}"


def _drawn(cells: list[dict[str, Any]]) -> list[str]:
    """Say how many drawn texts are those of the first run of their setting in one graph."""
    found = [
        f"batch {cell['batch']}: {_equal([cell], way)} {how}"
        for cell in cells
        for way, how in HOW.items()
        if any(line["way"] == way and line["equal"] is not None for line in cell["lines"])
    ]
    return (
        [
            "Of the drawn texts, as many are those of their setting's first run in one graph, in "
            f"the turn in which fewest are: {'; '.join(found)}."
        ]
        if found
        else []
    )


def asked(results: Path) -> list[Target]:
    """Return the target that a step in one graph is held to."""
    path = results / RECORD
    points = gains(json.loads(path.read_text())["cells"]) if path.exists() else []
    return [Target("the shipped pair, one graph against three", "x", 1, 1, points)]
