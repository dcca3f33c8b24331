"""Which backends ``auto`` takes, made from result files: ``specattn/backends/fastest.json``."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from .results import text
from .tables import table, times, versions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from .results import Found, PartFound

#: Peers that are backends, too, and are called by them as they are called here.
BACKENDS = {("FA3", "prompts"): "fa3", ("FlashMLA", "decode"): "flashmla"}
BACKENDS["FlashMLA", "chains"] = "flashmla"
#: How much faster a peer is on the whole; less may be noise, or other lengths.
MARGIN = 1.03
#: What a cell must not have, beside latent rows: `fastest.Choice.covers` asks for the same.
PLAIN = {"window_left": -1, "logit_cap": 0.0, "sinks": False, "stored": "", "fixed": False}

Key = tuple[str, str, str, int, int, int]
#: What a key says: the first fields of a `fastest.Choice`.
NAMES = ("backend", "forwards", "dtype", "head_dim", "latent_heads", "page_size")


def write(parts: Iterable[PartFound], record: Path) -> Path:
    """Write the choices of the devices at hand; those of others stay."""
    found = json.loads(record.read_text()) if record.exists() else {}
    record.write_text(text(found | choices(parts)) + "\n")
    return record


def choices(parts: Iterable[PartFound]) -> dict[str, list[dict[str, Any]]]:
    """Return the choices by compute capability, as `fastest.recorded` reads them."""
    cells: dict[str, dict[Key, list[tuple[int, float, str]]]] = {}
    for part in parts:
        if capability := part.machine.get("capability"):
            of_device = cells.setdefault(capability, {})
            said = f"{versions(part.machine)}, {part.machine['date']}"
            for key, batch, gain in measured(part.cells):
                of_device.setdefault(key, []).append((batch, gain, said))
    return {
        capability: [choice for key, points in found.items() for choice in chosen(key, points)]
        for capability, found in cells.items()
    }


def shown(parts: Iterable[PartFound]) -> str:
    """Return the choices as a table."""
    rows = [
        [
            capability,
            f"{one['forwards']} from {one['batch']} requests on"
            if one["batch"] > 1
            else one["forwards"],
            f"{one['latent_heads']} latent heads" if one["latent_heads"] else "any heads",
            f"{one['head_dim']}, {one['dtype']}",
            str(one["page_size"]),
            f"`{one['backend']}`",
            *(times(one[name]) for name in ("gain", "least")),
            str(one["cells"]),
        ]
        for capability, found in choices(parts).items()
        for one in found
    ]
    head = [
        "capability",
        "forwards",
        "layers",
        "of",
        "page size",
        "taken",
        "gain",
        "worst",
        "cells",
    ]
    return table(head, rows)


def measured(cells: Iterable[Found]) -> Iterator[tuple[Key, int, float]]:
    """Yield what is compared, the requests, and specattn's time over the peer's."""
    for cell in cells:
        case = cell.case
        forwards = "prompts" if case["mode"] == "prompt" else "chains"
        if case["mode"] == "chain" and case["q_len"] == 1:
            forwards = "decode"
        served = case["mode"] in ("prompt", "chain") and cell.own is not None
        if not served or any(case.get(name, plain) != plain for name, plain in PLAIN.items()):
            continue
        heads = case["heads"][0] if case["latent"] else 0
        for (peer, what), backend in BACKENDS.items():
            if what == forwards and peer in cell.peers:
                shape = (case["dtype"], case["head_dim"], heads, case["page_size"])
                yield (backend, forwards, *shape), case["batch"], cell.own.us / cell.peers[peer].us


def chosen(key: Key, points: list[tuple[int, float, str]]) -> list[dict[str, Any]]:
    """Return the choice from the fewest requests on from which every cell gains; or none.

    How fast a prompt is has little to do with the requests beside it, so all of them must gain.
    """
    lost = [requests for requests, gain, _ in points if gain <= 1]
    kept = [point for point in points if point[0] > max(lost, default=0)]
    if not kept or (lost and key[1] == "prompts"):
        return []
    mean = math.exp(sum(math.log(gain) for _, gain, _ in kept) / len(kept))
    if mean < MARGIN:
        return []
    return [
        dict(zip(NAMES, key, strict=True))
        | {
            "batch": min(requests for requests, *_ in kept) if lost else 1,
            "gain": round(mean, 3),
            "least": round(min(gain for _, gain, _ in kept), 3),
            "cells": len(kept),
            "measured": "; ".join(dict.fromkeys(said for *_, said in kept)),
        }
    ]
