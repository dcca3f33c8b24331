"""Targets within specattn's own lines: growth, pages, options, dtypes, plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cases import K
from .targets import Point, Target, light, points

if TYPE_CHECKING:
    from collections.abc import Callable

    from .results import Found, Line

OPTIONS = ("window", "cap", "lse", "2 words")


def _growth(cells: list[Found], what: str, unit: Callable[[Line], int]) -> list[Point]:
    """How far apart the times per unit are within a cell."""
    found = []
    for cell in cells:
        if cell.name.startswith(f"growth of {what}") and len(cell.lines) > 1:
            costs = [line.us / unit(line) for line in cell.lines]
            found.append(Point(max(costs) / min(costs) - 1, cell.name))
    return found


def _labelled(
    cells: list[Found], label: str, keep: Callable[[Line], bool], *, inverse: bool = False
) -> list[Point]:
    """The price of a variant, or of the cell over its variant."""
    found = []
    for cell in cells:
        line = cell.variants.get(label)
        if cell.own and line and keep(line):
            ratio = line.us / cell.own.us
            found.append(Point((1 / ratio if inverse else ratio) - 1, cell.name))
    return found


def shapes(cells: list[Found]) -> list[Target]:
    found = [
        Target(
            "time per token, 256k to 1M tokens of context",
            "%",
            0.06,
            0.03,
            _growth(cells, "context", lambda line: line.tokens),
            low=True,
        ),
        Target(
            "time per request, batch 64 to 512",
            "%",
            0.05,
            0.03,
            _growth(cells, "batch", lambda line: line.batch),
            low=True,
        ),
        Target(
            "pages of 64 over page 1",
            "%",
            0.03,
            0,
            _labelled(
                [cell for cell in cells if cell.case["page_size"] == 64],
                "page 1",
                lambda _: True,
                inverse=True,
            ),
            low=True,
        ),
    ]
    found += [
        Target(
            f"{'a second word' if name == '2 words' else name}, bound by memory",
            "%",
            0.05,
            0.02,
            _labelled(cells, name, light),
            low=True,
        )
        for name in OPTIONS
    ]
    return [*found, *_large(cells)]


def _large(cells: list[Found]) -> list[Target]:
    """More than one word, more than 256 requests: the price per byte."""
    words, batches = [], []
    for cell in cells:
        line = cell.variants.get("2 words")
        if cell.own and line:
            words.append(Point(_per_byte(line) / _per_byte(cell.own), cell.name))
        if cell.name.startswith("growth of batch"):
            # against the largest batch that one pass of the plan holds
            base = next((line for line in cell.lines if line.batch == 256), None)
            batches += [
                Point(_per_byte(line) / _per_byte(base), f"{cell.name}: {line.batch}")
                for line in cell.lines
                if base and line.batch > 256
            ]
    return [
        Target("tails of more than 64 keys, cost per byte", "x", 1.1, 1, words, low=True),
        Target("batches of more than 256, cost per byte", "x", 1.1, 1, batches, low=True),
    ]


def _per_byte(line: Line) -> float:
    return line.us / line.moved


def float8(cells: list[Found]) -> list[Target]:
    found = []
    for cell in cells:
        line = cell.variants.get("bfloat16")
        if cell.own and line and line.tokens >= 128 * K:
            found.append(Point(line.us / cell.own.us, cell.name))
    errors = points(cells, lambda line: line.error, lambda line: bool(line.case["stored"]))
    return [
        Target("fp8 KV against bfloat16, >= 128k tokens", "x", 1.4, 1.8, found),
        Target("fp8 KV, error against the dequantised pool", "", 3e-3, 2.5e-3, errors, low=True),
    ]


def steps(cells: list[Found]) -> list[Target]:
    """What a step does once, for all layers."""
    plans = points(
        cells,
        lambda line: line.plan_us or 0.0,
        lambda line: bool(line.plan_us) and not line.case["fixed"] and line.batch <= 256,
    )
    return [Target("plan, in the cells, batch <= 256", "us", 4, 2.5, plans, low=True)]
