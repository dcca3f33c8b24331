"""What the results say: a table of measurements, and whether tokens are equal."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from bench.suite import tables

if TYPE_CHECKING:
    from pathlib import Path

Line = dict[str, Any]
#: Sides of SGLang's own, then those with ours in them.
THEIRS, OURS = ("fa3", "triton", "flashinfer"), ("specattn", "steps", "fused")
SIDES = (*THEIRS, *OURS, "own")
HEADS = {
    "fa3": "SGLang fa3",
    "triton": "SGLang triton",
    "flashinfer": "SGLang flashinfer",
    "specattn": "SGLang specattn",
    "steps": "SGLang SPECATTN, its modules",
    "fused": "SGLang SPECATTN, fused",
    "own": "our `Engine`",
}


def read(path: Path) -> list[Line]:
    """Return the lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(lines: list[Line]) -> str:
    """Return the measurements as Markdown: milliseconds per step, and tokens per second."""
    cells: dict[tuple[str, int, int], dict[str, Line]] = {}
    for line in lines:
        if "ms" in line:
            said = [line["setting"], line.get("weights", "")]
            if draft := line.get("draft_weights"):
                said.append(f"draft {draft}")
            if ranks := line.get("tp"):
                said.append(f"on {ranks} GPUs")
            place = " ".join(filter(None, said)), line["batch"], line["context"]
            cells.setdefault(place, {})[line["side"]] = line
    sides = [side for side in SIDES if any(side in cell for cell in cells.values())]
    ours = [side for side in OURS if side in sides]
    heads = [*(HEADS[side] for side in sides), *(f"best / {side}" for side in ours)]
    rows = []
    for (setting, batch, context), cell in sorted(cells.items()):
        texts = [_cell(cell.get(side)) for side in sides]
        gains = (_gain(cell, side) for side in ours)
        rows.append([setting, f"{batch} x {context}", *texts, *gains])
    return tables.table(["setting", "batch x context", *heads], rows)


def _cell(line: Line | None) -> str:
    return "" if line is None else f"{line['ms']:.2f} ms, {line['tokens_per_s']:.0f}/s"


def _gain(cell: dict[str, Line], side: str) -> str:
    """Return how many times as fast a side is as the best of SGLang's own."""
    others = [cell[their]["ms"] for their in THEIRS if their in cell]
    if side not in cell or not others:
        return ""
    return f"{min(others) / cell[side]['ms']:.2f}"


def compared(lines: list[Line]) -> list[str]:
    """Compare texts with plain decoding's, line by line; verified steps beside them.

    Sums of another order flip near ties in bfloat16, so a text may leave the other one late.
    """
    found = {(line["side"], line["setting"]): line for line in lines if "tokens" in line}
    plain = next((line for (_, setting), line in found.items() if setting == "plain"), None)
    if plain is None:
        return ["plain decoding gave no tokens: nothing to compare with"]
    rows = []
    for (side, setting), line in found.items():
        if line is plain:
            continue
        same = [_common(a, b) for a, b in zip(plain["tokens"], line["tokens"], strict=True)]
        whole = sum(n == len(text) for n, text in zip(same, plain["tokens"], strict=True))
        rows.append(
            f"{side} {setting}: {whole} of {len(same)} texts equal, common tokens {same}, "
            f"verified {line['verified']}"
        )
    return rows


def _common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
