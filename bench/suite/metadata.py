"""What the record of `bench.metadata` says about the metadata of a step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .summary import Point, Ratio

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "metadata_h200.json"
PEER, WHOLE = "SGLang", "specattn, one graph"
PHASES, STEP = ("draft", "verify", "extend"), "step"
#: The keys of a line that have its times.
GPU, HOST = "us", "host_us"


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


def ratios(results: Path) -> list[Ratio]:
    """Return SGLang's time for all three phases over one graph's, on the device and on the host."""
    points: dict[str, list[Point]] = {GPU: [], HOST: []}
    if (results / RECORD).exists():
        for cell in json.loads((results / RECORD).read_text())["cells"]:
            for key, found in points.items():
                gain = _gain(_times(cell, key), key)
                found += [Point(gain, cell["name"])] if gain else []
    words = "metadata of a step, GPU time, against SGLang's operations"
    return [
        Ratio(words, "the-metadata-of-a-step", points[GPU]),
        Ratio("the same, host time", "the-metadata-of-a-step", points[HOST]),
    ]
