"""What the record of `bench.step --dflash` says about blocks of one forward."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import tables
from .steps import PLAIN, by_place, measured, settings_of, times

if TYPE_CHECKING:
    from pathlib import Path

RECORD = "step_dflash.json"
#: What the settings of blocks begin with.
DRAFT = "DFlash"
#: What the kernel that builds a block's tree has in its name.
DRAFTING = "best_first"
Cell = dict[str, Any]


def shown(results: Path) -> str:
    """Return times over bytes, what building a tree takes, and from where on blocks win."""
    found = json.loads((results / RECORD).read_text())
    rows = by_place(measured(found))
    return "\n\n".join(
        [
            f"{tables.versions(found['machine'])}.",
            f"{found['model']}, ms and ratio to the bytes at the speed of "
            "a copy (with *: to the products, where these take longer):",
            times(rows),
            f"{DRAFT} against the others: building the tree, launches of a step, the tokens per "
            "step at which it is plain decoding's equal, and how many times an EAGLE-3 "
            "setting's tokens it must gain to be that one's:",
            _even(rows),
        ]
    )


def _even(rows: dict[str, dict[str, Cell]]) -> str:
    """A row per place and tree of a block."""
    others = [name for name in settings_of(rows) if not name.startswith(DRAFT)]
    head = ["batch x context", "setting", "tree, us", "of the step", "launches"]
    head += [f"= {name}" if name == PLAIN else f"x {name}" for name in others]
    body = []
    for name, row in rows.items():
        for setting, cell in row.items():
            if not setting.startswith(DRAFT):
                continue
            tree, found = cell.get("tree_us"), cell.get("trace", {})
            body.append(
                [
                    name,
                    setting,
                    tables.NONE if tree is None else f"{tree:.2f}",
                    tables.NONE if tree is None else f"{tree / cell['us']:.2%}",
                    f"{found['kernels']:.0f}" if found else tables.NONE,
                    *(_ratio(cell, row.get(other)) for other in others),
                ]
            )
    return tables.table(head, body)


def _ratio(cell: Cell, other: Cell | None) -> str:
    return tables.NONE if other is None else f"{cell['us'] / other['us']:.2f}"
