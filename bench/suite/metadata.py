"""What the record of `bench.metadata` says about the metadata of a step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import tables
from .targets import Point, Target

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "metadata_h200.json"
PEER, SEAMS, WHOLE = "SGLang", "specattn, by phase", "specattn, one graph"
PLANNED = "specattn, FlashInfer"
PHASES, STEP = ("draft", "verify", "extend"), "step"
#: Times a table shows: the key of a line, and what it is.
GPU, HOST = "us", "host_us"
TIMES = {GPU: "GPU us", HOST: "host us"}


def shown(results: Path) -> str:
    """Return GPU and host time of every phase, and of all."""
    cells = json.loads((results / RECORD).read_text())["cells"]
    texts = [_by_phase(cells, key, title) for key, title in TIMES.items()]
    return "\n\n".join([*texts, *_planned(cells)])


def _by_phase(cells: list[dict[str, Any]], key: str, title: str) -> str:
    head = [
        title,
        *(f"{PEER} {phase}" for phase in PHASES),
        f"{PEER} all",
        *(f"by phase: {phase}" for phase in PHASES),
        "one graph, all",
        f"{PEER} / one graph" + (", of all and sum the less" if key == HOST else ""),
    ]
    rows = []
    for cell in cells:
        times = _times(cell, key)
        columns = [(PEER, phase) for phase in (*PHASES, STEP)]
        columns += [(SEAMS, phase) for phase in PHASES] + [(WHOLE, STEP)]
        rows.append(
            [
                cell["name"],
                *(tables.micros(times.get(column)) for column in columns),
                tables.times(_gain(times, key)),
            ]
        )
    return tables.table(head, rows)


def _planned(cells: list[dict[str, Any]]) -> list[str]:
    """Return what planning on the host costs beside one graph, if it was measured."""
    columns = (*PHASES, STEP)
    head = [
        "FlashInfer, us",
        *(f"host: {phase}" for phase in PHASES),
        "host, all",
        "one graph, host",
        "copies of plans",
        "copies, GPU",
        "lists and masks, GPU",
        "one graph, GPU",
    ]
    rows = []
    for cell in cells:
        lines = {(line["name"], line["phase"]): line for line in cell["contestants"]}
        own, whole = [lines.get((PLANNED, phase)) for phase in columns], lines.get((WHOLE, STEP))
        if None in own or whole is None:
            continue
        step = lines[PLANNED, STEP]
        rows.append(
            [
                cell["name"],
                *(tables.micros(line["host_us"]) for line in own if line),
                tables.micros(whole["host_us"]),
                f"{step['sent']:g}",
                tables.micros(step["sent_us"]),
                tables.micros(step["us"]),
                tables.micros(whole["us"]),
            ]
        )
    return [tables.table(head, rows)] if rows else []


def _times(cell: dict[str, Any], key: str) -> dict[tuple[str, str], float]:
    return {(line["name"], line["phase"]): line[key] for line in cell["contestants"]}


def _gain(times: dict[tuple[str, str], float], key: str) -> float | None:
    """SGLang's time over one graph's; of the host's, disturbed at times, the smaller measurement.

    All three phases were timed in one go and one by one: the same work, twice.
    """
    ours, theirs = times.get((WHOLE, STEP)), times.get((PEER, STEP))
    if not ours or not theirs:
        return None
    if key == HOST:
        theirs = min(theirs, sum(times[PEER, phase] for phase in PHASES))
    return theirs / ours


def asked(results: Path) -> list[Target]:
    """Return the targets that metadata is held to, that of all three phases together."""
    alone: list[Point] = []
    gains: dict[str, list[Point]] = {key: [] for key in TIMES}
    if (results / RECORD).exists():
        for cell in json.loads((results / RECORD).read_text())["cells"]:
            for key, points in gains.items():
                times = _times(cell, key)
                gain = _gain(times, key)
                points += [Point(gain, cell["name"])] if gain else []
                if key == GPU and (WHOLE, STEP) in times:
                    alone.append(Point(times[WHOLE, STEP], cell["name"]))
    return [
        # 5 us per phase were asked for
        Target(
            "metadata of three phases, in one graph, batch <= 128", "us", 15, 5, alone, low=True
        ),
        Target("metadata against SGLang's operations, GPU", "x", 3, 5, gains[GPU]),
        Target("metadata against SGLang's operations, host", "x", 10, 20, gains[HOST]),
    ]
