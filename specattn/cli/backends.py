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
    rows = [_row(name, device) for device in _devices() for name in _names()]
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("backend", "device", "runs here", "CUDA graphs", "why not"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["backend"], row["device"], "yes" if row["available"] else "no",
            "yes" if row["graphs"] else "no", "; ".join(row["reasons"]),
        )
    Console(highlight=False).print(table)


def _row(name: str, device: torch.device) -> dict[str, Any]:
    from specattn.backends import available, load_backend

    reasons = available(name, None, device)
    graphs = device.type == "cuda" and load_backend(name).capabilities.graphs
    return {
        "backend": name, "device": str(device), "available": not reasons, "reasons": reasons,
        "graphs": graphs and not reasons,
    }


def _names() -> tuple[str, ...]:
    from specattn.backends import backend_names

    return backend_names()


def _devices() -> list[torch.device]:
    import torch

    found = ["cuda"] if torch.cuda.is_available() else []
    return [torch.device(name) for name in (*found, "cpu")]
