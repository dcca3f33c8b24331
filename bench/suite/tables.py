"""Results as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .results import Found, Line, PartFound

NONE = "-"
#: The variant of a cell that the choice of ``auto`` computes.
AUTO = "auto"


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def micros(us: float | None) -> str:
    if us is None:
        return NONE
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 200 else f"{us:,.0f}"


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}x"


def machines(parts: list[PartFound]) -> str:
    """What the parts ran on."""
    return " ".join(dict.fromkeys(f"{versions(part.machine)}." for part in parts))


def versions(machine: dict[str, Any]) -> str:
    """The device, and the libraries that were there."""
    names = {"cuda": "CUDA", "flashinfer-python": "FlashInfer", "sglang-kernel": "sgl_kernel"}
    known = ("torch", "cuda", "triton", "flashinfer-python", "sglang-kernel", "sglang")
    found = [f"{names.get(name, name)} {machine[name]}" for name in known if machine.get(name)]
    return f"{machine['device']}: {', '.join(found)}"


def cells(chosen: list[Found]) -> str:
    """Everybody's time in every cell with peers."""
    found = [cell for cell in chosen if cell.own and (cell.peers or cell.refused)]
    names = list(dict.fromkeys(name for cell in found for name in cell.peers))
    by_auto = [AUTO] if any(AUTO in cell.variants for cell in found) else []
    rows = []
    for cell in found:
        own, best = cell.own, cell.best
        assert own is not None
        row = [cell.name, f"**{micros(own.us)}**", percent(own.of_copy), f"{own.tflops:.0f}"]
        auto = cell.variants.get(AUTO)
        row += [micros(auto and auto.us) for _ in by_auto]
        for name in names:
            line = cell.peers.get(name)
            row.append(f"{micros(line.us)}{' *' if line is best else ''}" if line else NONE)
        rows.append([*row, times(cell.against())])
    head = ["cell", "specattn us", "of copy", "TFLOP/s", *by_auto, *names, "best peer / specattn"]
    return table(head, rows) if rows else ""


def variants(chosen: list[Found]) -> str:
    """The lines that only specattn runs."""
    rows = []
    for cell in chosen:
        if cell.own and cell.variants:
            rows += [_variant(cell, label, line) for label, line in cell.variants.items()]
    head = ["cell", "us", "variant", "us", "of copy", "TFLOP/s", "variant / cell", "per token"]
    return table(head, rows) if rows else ""


def _variant(cell: Found, label: str, line: Line) -> list[str]:
    own = cell.own
    assert own is not None
    ratio = line.us / own.us
    return [
        cell.name,
        micros(own.us),
        label,
        micros(line.us),
        percent(line.of_copy),
        f"{line.tflops:.0f}",
        times(ratio),
        times(ratio * own.tokens / line.tokens),
    ]
