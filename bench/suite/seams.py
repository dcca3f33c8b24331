"""What the record of `bench.decode --paired` says: is a step in one graph slower than in three?

Every time that graphs are made anew is one observation of the ratio of their speeds; the interval
is Student's for the mean of its logarithm.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import decode, tables
from .decode import ONE, THREE
from .targets import Point, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

#: Of the fused models, which is what the pair's target is about, and of transformers' modules.
RECORD, MODULES = "pair_seams_h200.json", "pair_seams_modules_h200.json"
#: How turns are timed; the device's time is that of the turns launched a step ahead.
AHEAD, DEVICE, WAITED = "ahead", "device", "waited"
TIMED = (AHEAD, DEVICE, WAITED)
#: Those that a user waits for, and so the verdict is about.
JUDGED = (AHEAD, WAITED)
NAMES = {AHEAD: "a step ahead", DEVICE: "on the device", WAITED: "waited for"}
# the quantile of Student's t that 2.5 % lie above, for 1, 2, ... degrees of freedom; the last one
# is taken for more, too, which is on the safe side
STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
#: Of 2.5 %, that so many intervals lie wholly below what is true.
TAIL = 0.025
#: The least mean that counts as equal, however wide its interval is.
LEAST = 0.99


@dataclass(frozen=True)
class Interval:
    """A geometric mean, and the 95 % confidence interval around it."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Interval:
        """Take independent observations; a single one says nothing of how far off it is."""
        logs = [math.log(ratio) for ratio in ratios]
        mean = statistics.fmean(logs)
        if len(logs) == 1:
            return cls(math.exp(mean), 0.0, math.inf)
        student = STUDENT[min(len(logs) - 1, len(STUDENT)) - 1]
        half = student * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    @property
    def below(self) -> bool:
        """Whether all of it lies below 1."""
        return self.high < 1

    @property
    def slower(self) -> bool:
        """Whether all of it lies below 1, or the mean is below `LEAST`: noise excuses nothing."""
        return self.below or self.mean < LEAST

    @property
    def faster(self) -> bool:
        """Whether all of it lies above 1."""
        return self.low > 1

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.mean:.4f}x"
        return f"{self.mean:.4f}x ({self.low:.4f} to {self.high:.4f})"


def ratios(cell: dict[str, Any], timed: str) -> list[float]:
    """Return one graph's speed over three graphs', every time they were made anew."""
    times = [seen["us"][timed] for seen in cell["rebuilds"]]
    return [us[THREE] / us[ONE] for us in times]


def interval(cell: dict[str, Any], timed: str) -> Interval:
    """Return the interval of a cell's `ratios`."""
    return Interval.of(ratios(cell, timed))


def elsewhere(cell: dict[str, Any]) -> float:
    """Return by how much the same recording's time differs when it is instantiated anew.

    The slowest over the fastest on the device, the median of all recordings.
    """
    return statistics.median(
        max(us) / min(us) for seen in cell["rebuilds"] for us in seen["placed_us"][DEVICE].values()
    )


def overall(cells: list[dict[str, Any]], timed: str) -> Interval:
    """Return the interval of the geometric mean of all cells, observation by observation."""
    by_cell = [[math.log(ratio) for ratio in ratios(cell, timed)] for cell in cells]
    return Interval.of([math.exp(statistics.fmean(logs)) for logs in zip(*by_cell, strict=True)])


def judged(cells: list[dict[str, Any]]) -> dict[str, Interval]:
    """Return what the verdict is about, by cell and how it was timed."""
    return {
        f"{cell['name']}, {NAMES[timed]}": interval(cell, timed)
        for timed in JUDGED
        for cell in cells
    }


def slower(cells: list[dict[str, Any]]) -> list[str]:
    """Say where one graph is slower than three, as `Interval.slower` has it."""
    return [f"{where}: {seen}" for where, seen in judged(cells).items() if seen.slower]


def shown(results: Path, name: str = RECORD) -> str:
    """Return a table of the intervals, and what they come to."""
    record = json.loads((results / name).read_text())
    cells = record["cells"]
    counts = sorted({len(cell["rebuilds"]) for cell in cells})
    made = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    head = [
        "batch",
        "tokens",
        "setting",
        "one graph us/step",
        "three graphs us/step",
        *(f"one / three, {NAMES[timed]}" for timed in TIMED),
        "the same elsewhere",
    ]
    return "\n\n".join(
        [
            f"Models of {decode.MODELS[record['models']]}. Graphs made anew {made} times, "
            f"instantiated {record['places']} times each, {record['steps']} steps a turn; in "
            "brackets the 95 % interval. *The same elsewhere*: the slowest over the fastest of one "
            "recording, instantiated anew (on the device, median).",
            tables.table(head, map(_row, cells)),
            _verdict(record),
        ]
    )


def _row(cell: dict[str, Any]) -> list[str]:
    middle = [
        tables.micros(statistics.median(seen["us"][AHEAD][way] for seen in cell["rebuilds"]))
        for way in (ONE, THREE)
    ]
    tokens = "drawn" if cell["temperature"] else "greedy"
    found = [str(interval(cell, timed)) for timed in TIMED]
    return [str(cell["batch"]), tokens, cell["setting"], *middle, *found, f"{elsewhere(cell):.3f}x"]


def _verdict(record: dict[str, Any]) -> str:
    cells = record["cells"]
    found = judged(cells)
    seen, late = found.values(), slower(cells)
    worst = min(found, key=lambda where: found[where].mean)
    where = f" ({'; '.join(late)})" if late else ""
    total = [f"{overall(cells, timed)} {NAMES[timed]}" for timed in TIMED]
    apart = sum(rebuild["apart"] for cell in cells for rebuild in cell["rebuilds"])
    taken = sum(rebuild["turns"] for cell in cells for rebuild in cell["rebuilds"])
    return (
        f"Of {len(found)} means (a step ahead, and waited for), {_means_below(seen)} lie below 1; "
        f"the lowest is {found[worst].mean:.4f}x ({worst}). Of their intervals, "
        f"{sum(one.below for one in seen)} lie wholly below 1, {sum(one.faster for one in seen)} "
        f"wholly above; of equal speeds, {TAIL * len(found):.1f} would lie below by chance. One "
        f"graph counts as slower in {len(late)}{where}. Over all cells, it is {', '.join(total)}. "
        f"Of {taken} turns, {apart} gained other tokens than the first of their requests."
    )


def _means_below(found: Iterable[Interval]) -> int:
    return sum(one.mean < 1 for one in found)


@dataclass(frozen=True)
class NeverSlower(Target):
    """One graph is to be slower than three nowhere; points are means, shown with four digits.

    Parameters
    ----------
    found : tuple of Interval
        What is judged, one by one: a mean alone does not say whether it is slower.
    """

    found: tuple[Interval, ...] = ()

    @property
    def verdict(self) -> str:
        return "**below**" if any(one.slower for one in self.found) else "aim"

    def show(self, value: float) -> str:
        return f"{value:.4f}x"

    def row(self) -> list[str]:
        regime, _, _, measured, where, reached = super().row()
        below = sum(one.below for one in self.found)
        where += f"; {_means_below(self.found)} means are below 1, {below} intervals wholly"
        return [regime, "not slower", "not slower", measured, where, reached]


def asked(results: Path) -> list[Target]:
    """Return the target that a step in one graph is held to; without a record, by medians."""
    path = results / RECORD
    if not path.exists():
        return decode.asked(results)
    found = judged(json.loads(path.read_text())["cells"])
    points = [Point(seen.mean, where) for where, seen in found.items()]
    regime = (
        "the shipped pair, one graph against three (slower: the 95 % interval wholly below 1, or "
        f"the mean below {LEAST})"
    )
    return [NeverSlower(regime, "x", 1, 1, points, found=tuple(found.values()))]
