"""What ``auto`` takes and says, made from result files: ``specattn/backends/fastest.json``."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from .results import text
from .tables import table, times, versions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
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
    """Write the tables of the devices at hand; those of others stay."""
    found = json.loads(record.read_text()) if record.exists() else {}
    record.write_text(text(found | choices(parts)) + "\n")
    return record


def choices(parts: Iterable[PartFound]) -> dict[str, dict[str, Any]]:
    """Return what `fastest` reads by compute capability: ``auto``'s choices, and ``float8``."""
    return {
        capability: {"auto": faster(found), "float8": stored(found)}
        for capability, found in by_capability(parts).items()
    }


def by_capability(parts: Iterable[PartFound]) -> dict[str, list[PartFound]]:
    """Return parts by the compute capability they were measured on."""
    found: dict[str, list[PartFound]] = {}
    for part in parts:
        if capability := part.machine.get("capability"):
            found.setdefault(capability, []).append(part)
    return found


def faster(parts: Iterable[PartFound]) -> list[dict[str, Any]]:
    """Return the choices of parts, as `fastest.Choice` has them."""
    cells: dict[Key, list[tuple[int, float, str]]] = {}
    for part in parts:
        for key, batch, gain in measured(part.cells):
            cells.setdefault(key, []).append((batch, gain, said(part)))
    return [choice for key, points in cells.items() for choice in chosen(key, points)]


def stored(parts: Iterable[PartFound]) -> dict[str, str]:
    """Return what `fastest.float8_gains` says, by head size."""
    found: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for head_dim, q_len, tokens, gains, cards in in_float8(parts):
        slower, faster, measured = found.setdefault(str(head_dim), ([], [], []))
        cells = faster if min(gains) > 1 else slower
        cells.append(f"{q_len} over {tokens} ({span(gains)})")
        measured += cards
    return {
        head_dim: "against bfloat16, by query tokens of a request over cached tokens of the batch: "
        f"slower at {', '.join(slower) or 'none'}; faster at {', '.join(faster) or 'none'}; "
        + "; ".join(dict.fromkeys(measured))
        for head_dim, (slower, faster, measured) in found.items()
    }


def in_float8(
    parts: Iterable[PartFound],
) -> Iterator[tuple[int, int, str, tuple[float, ...], tuple[str, ...]]]:
    """Yield what float8 gains over bfloat16, where cells were timed in both.

    It is head size, query tokens of a request, cached tokens of the batch, gains and cards. Cells
    that gain are apart from those that lose.
    """
    found: dict[tuple[int, int, bool], list[tuple[int, float, str]]] = {}
    for part in parts:
        for cell in part.cells:
            if cell.own and (wide := cell.variants.get("bfloat16")):
                gain = wide.us / cell.own.us
                key = (cell.case["head_dim"], cell.case["q_len"], gain > 1)
                found.setdefault(key, []).append((cell.case["tokens"], gain, said(part)))
    for (head_dim, q_len, _), cells in sorted(found.items()):
        tokens, gains, cards = zip(*cells, strict=True)
        yield head_dim, q_len, span(tokens, "{:,}"), gains, cards


def span(values: Sequence[float], form: str = "{:.2f}x") -> str:
    """Return the smallest and the largest, or what both are."""
    return " to ".join(dict.fromkeys(form.format(one) for one in (min(values), max(values))))


def said(part: PartFound) -> str:
    """Return card, versions and date."""
    return f"{versions(part.machine)}, {part.machine['date']}"


def shown_float8(parts: Iterable[PartFound]) -> str:
    """Return what float8 gains as a table."""
    rows = [
        [capability, str(head_dim), str(q_len), tokens, f"**{span(gains)}**", str(len(gains))]
        for capability, found in by_capability(parts).items()
        for head_dim, q_len, tokens, gains, _ in in_float8(found)
    ]
    head = ["capability", "heads of", "query tokens a request", "cached tokens, all requests"]
    return table([*head, "speed over bfloat16", "cells"], rows)


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
        for capability, found in by_capability(parts).items()
        for one in faster(found)
    ]
    head = ["capability", "forwards", "layers", "of", "page size", "taken"]
    head += ["gain", "worst", "cells"]
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
