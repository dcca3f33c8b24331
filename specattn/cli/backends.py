"""``specattn backends``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the attention backends, whether each can run here, and why not."""
    from specattn.backends import backend_names

    rows = [_row(name, device) for device in _devices() for name in backend_names()]
    autos = [_auto(device) for device in _devices()]
    if as_json:
        rows += autos
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.padding import Padding

    from specattn.cli.report import table

    columns = ("backend", "device", "runs here", "CUDA graphs", "why not")
    shown = [
        (
            row["backend"],
            row["device"],
            "yes" if row["available"] else "no",
            "yes" if row["graphs"] else "no",
            "; ".join(row["reasons"]),
        )
        for row in rows
    ]
    console = Console(highlight=False)
    console.print(table(columns, shown, left=columns))
    for auto in autos:
        console.print(f"\nauto on {auto['device']}")
        for line in auto["takes"]:
            console.print(Padding(line, (0, 0, 0, 2)))


def _auto(device: torch.device) -> dict[str, Any]:
    """Return the row of ``auto``, with a line for everything that it takes or does not."""
    from specattn.backends import AUTO
    from specattn.backends.fastest import considered, float8_gains

    rows = {name: row for name in AUTO[device.type] if (row := _row(name, device))["available"]}
    lines = [f"{name} where none before it serves: {AUTO[device.type][name]}" for name in rows]
    lines += [choice.told(reasons) for choice, reasons in considered(None, device).items()]
    lines += float8_gains(None, device)
    return {**next(iter(rows.values())), "backend": "auto", "takes": lines}


def found() -> dict[str, list[str]]:
    """Return the names of the backends that run here, by device."""
    from specattn.backends import backend_names

    return {
        str(device): [name for name in backend_names() if _row(name, device)["available"]]
        for device in _devices()
    }


def _row(name: str, device: torch.device) -> dict[str, Any]:
    from specattn.backends import available, load_backend
    from specattn.errors import UnsupportedError

    try:
        reasons = available(name, None, device)
    except UnsupportedError as error:
        reasons = list(error.reasons)
    graphs = not reasons and device.type == "cuda" and load_backend(name).capabilities.graphs
    return {
        "backend": name,
        "device": str(device),
        "available": not reasons,
        "reasons": reasons,
        "graphs": graphs,
    }


def _devices() -> list[torch.device]:
    import torch

    found = ["cuda"] if torch.cuda.is_available() else []
    return [torch.device(name) for name in (*found, "cpu")]
