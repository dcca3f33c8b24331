"""Read SGLang's own lines about decoding."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

LINE = re.compile(
    r"Decode batch.*?#running-req: (?P<running>\d+),"
    r"(?:.*?accept len: (?P<length>[\d.]+),)?"
    r".*?graph: (?P<graph>True|False),"
    r".*?gen throughput \(token/s\): (?P<speed>[\d.]+)"
)
# SGLang rounds accepted lengths to two places
ROUNDED = 0.05


@dataclass(frozen=True)
class Interval:
    """Steps between two of the log's lines.

    Parameters
    ----------
    running : int
        Requests at the end.
    length : float
        Tokens per request and step; 1 without speculation.
    graph : bool
        Whether the last step was a CUDA graph.
    speed : float
        Tokens per second.
    """

    running: int
    length: float
    graph: bool
    speed: float

    @property
    def ms(self) -> float:
        """Milliseconds per step."""
        return 1e3 * self.running * self.length / self.speed


def intervals(text: str) -> list[Interval]:
    """Return what a log says, in order."""
    return [
        Interval(
            int(found["running"]),
            float(found["length"] or 1),
            found["graph"] == "True",
            float(found["speed"]),
        )
        for found in LINE.finditer(text)
        if float(found["speed"]) > 0
    ]


def steady(found: list[Interval], batch: int) -> list[Interval]:
    """Keep intervals in which the whole batch decoded and nothing else ran.

    The first such interval has prompts in it, the last one may have requests that ended.
    """
    return [one for one in found if one.running == batch][1:-1]


def summary(text: str, batch: int, gained: int) -> dict[str, float]:
    """Return the median step of a batch.

    Raises
    ------
    ValueError
        If there are no steady intervals, a step was no graph, or gained other than was forced.
    """
    found = intervals(text)
    kept = steady(found, batch)
    if not kept:
        raise ValueError(f"no steady steps of {batch} requests in {len(found)} lines of the log")
    if not all(one.graph for one in kept):
        raise ValueError("steps ran without a CUDA graph")
    lengths = {one.length for one in kept}
    if any(abs(length - gained) > ROUNDED for length in lengths):
        raise ValueError(f"steps gained {sorted(lengths)} tokens, not {gained}")
    times = sorted(one.ms for one in kept)
    middle = statistics.median(times)
    return {
        "ms": round(middle, 4),
        "least_ms": round(times[0], 4),
        "most_ms": round(times[-1], 4),
        "tokens_per_s": round(1e3 * batch * gained / middle, 1),
        "intervals": len(times),
    }
