"""What a reader in a hurry wants to know: means and worst cells of the ratios to others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import tables
from .cases import K

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .results import Found, Line

FA3 = ("FA3", "FA3, schedule ahead")


@dataclass(frozen=True)
class Point:
    """A measured ratio and its cell."""

    value: float
    where: str


@dataclass(frozen=True)
class Ratio:
    """A line of the summary.

    Parameters
    ----------
    words : str
        What is compared.
    section : str
        The section of the page that has the cells.
    points : list of Point
        What was measured.
    low : bool
        Whether less is better.
    """

    words: str
    section: str
    points: list[Point]
    low: bool = False

    @property
    def worst(self) -> Point:
        pick = max if self.low else min
        return pick(self.points, key=lambda point: point.value)

    @property
    def geomean(self) -> float:
        return math.exp(sum(math.log(point.value) for point in self.points) / len(self.points))


def table(found: Iterable[Ratio]) -> str:
    """Return the geometric mean and the worst cell of every ratio that was measured."""
    rows = [
        [
            f"[{ratio.words}](#{ratio.section})",
            tables.times(ratio.geomean),
            tables.times(ratio.worst.value),
            str(len(ratio.points)),
        ]
        for ratio in found
        if ratio.points
    ]
    return tables.table(["", "geomean", "worst", "cells"], rows)


def against(cells: Iterable[Found], keep: Callable[[Line], bool], *names: str) -> list[Point]:
    """Take the ratio to the fastest of some peers from every cell whose own line is kept."""
    found = []
    for cell in cells:
        ratio = cell.against(*names)
        if ratio is not None and cell.own and keep(cell.own):
            found.append(Point(ratio, cell.name))
    return found


def attention(cells: list[Found]) -> list[Ratio]:
    """Return specattn's attention against other libraries'."""

    def mode(line: Line, name: str) -> bool:
        case = line.case
        return case["mode"] == name and not case["latent"] and not case["stored"]

    def latent(line: Line) -> bool:
        case = line.case
        return bool(case["latent"] and case["heads"][0] == 16 and case["q_len"] == 1)

    return [
        Ratio(
            "trees, against the fastest peer of each cell",
            "tree-verify",
            against(cells, lambda line: mode(line, "tree")),
        ),
        Ratio(
            "chains and decode, 64k tokens and more, against FlashAttention 3",
            "decode-and-chain-verify",
            against(cells, lambda line: mode(line, "chain") and line.tokens >= 64 * K, *FA3),
        ),
        Ratio(
            "drafts of 8 branches, against FlashInfer's decode",
            "draft-decode",
            against(
                cells,
                lambda line: mode(line, "draft") and line.case["q_len"] == 8,
                "FlashInfer decode",
            ),
        ),
        Ratio(
            "prompts over a cached prefix, against FlashAttention 3",
            "draft-extend-and-prompts",
            against(cells, lambda line: mode(line, "prompt") and line.tokens > 0, *FA3),
        ),
        Ratio(
            "latent attention, 16 heads, one node, against FlashInfer's",
            "latent-attention-mla",
            against(cells, latent, "FlashInfer MLA"),
        ),
    ]
