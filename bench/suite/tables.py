"""Results as Markdown."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .results import Found, Line, PartFound

NONE = "-"


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
    """What every part ran on, and its roofs."""
    rows = []
    for part in parts:
        roofs, found = part.roofs, part.machine
        rows.append(
            [
                part.title,
                *(f"{roofs[f'{name}_tb_s']:.2f}" for name in ("copy", "read", "gather")),
                f"{roofs['matmul_tflops']:.0f}" if "matmul_tflops" in roofs else NONE,
                *(f"{roofs[f'empty_{count}_us']:.2f}" for count in (1, 264, 1056)),
                f"`{found['commit']}`",
                f"`{found['kernels']}`",
                found["date"],
            ]
        )
    head = [
        "part",
        "copy TB/s",
        "read TB/s",
        "gather TB/s",
        "matmul TFLOP/s",
        "empty node us, 1 CTA",
        "264 CTAs",
        "1,056 CTAs",
        "commit",
        "kernels",
        "date",
    ]
    return "\n\n".join([_versions(parts), table(head, rows)])


def _versions(parts: list[PartFound]) -> str:
    return " ".join(dict.fromkeys(f"{versions(part.machine)}." for part in parts))


def versions(machine: dict[str, Any]) -> str:
    """The device, and the libraries that were there."""
    names = {"cuda": "CUDA", "flashinfer-python": "FlashInfer", "sglang-kernel": "sgl_kernel"}
    known = ("torch", "cuda", "triton", "flashinfer-python", "sglang-kernel", "sglang")
    found = [f"{names.get(name, name)} {machine[name]}" for name in known if machine.get(name)]
    return f"{machine['device']}: {', '.join(found)}"


def cells(part: PartFound) -> str:
    """Everybody's time in every cell with peers."""
    found = [cell for cell in part.cells if cell.own and (cell.peers or cell.refused)]
    names = list(dict.fromkeys(name for cell in found for name in cell.peers))
    rows = []
    for cell in found:
        own, best = cell.own, cell.best
        assert own is not None
        row = [cell.name, f"**{micros(own.us)}**", percent(own.of_copy), f"{own.tflops:.0f}"]
        for name in names:
            line = cell.peers.get(name)
            row.append(f"{micros(line.us)}{' *' if line is best else ''}" if line else NONE)
        rows.append([*row, times(cell.against())])
    head = ["cell", "specattn us", "of copy", "TFLOP/s", *names, "best peer / specattn"]
    return table(head, rows) if rows else ""


def variants(part: PartFound) -> str:
    """The lines that only specattn runs."""
    rows = []
    for cell in part.cells:
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


def plans(part: PartFound) -> str:
    """What a step costs before its first layer, and what else is worth knowing of everybody."""
    lines = [line for cell in part.cells for line in [*cell.lines, *cell.peers.values()]]
    grouped: dict[str, list[Line]] = {}
    for line in lines:
        grouped.setdefault(line.name.split()[0] if _own(line) else line.name, []).append(line)
    rows = []
    for name, group in grouped.items():
        spread = max((line.high - line.low) / 2 / line.us for line in group)
        rows.append(
            [
                name,
                group[0].setting or NONE,
                str(len(group)),
                _range(line.plan_us for line in group),
                _range(line.plan_wall_us for line in group),
                f"{max(line.error for line in group):.1e}",
                percent(spread),
            ]
        )
    head = [
        "kernel",
        "setting",
        "lines",
        "plan us, in a graph",
        "plan us, host waits",
        "largest error",
        "widest spread",
    ]
    return table(head, rows)


def _own(line: Line) -> bool:
    return line.name.split()[0] == "specattn"


def _range(values: Iterable[float | None]) -> str:
    found = sorted(value for value in values if value)
    if not found:
        return NONE
    low, high = micros(found[0]), micros(found[-1])
    return low if low == high else f"{low} to {high}"


def missing(part: PartFound) -> str:
    """Who did not run, and why."""
    counts: Counter[Any] = Counter(
        (name, reason) for cell in part.cells for name, reason in cell.refused.items()
    )
    found = [f"{name}: {reason}" for name, reason in part.absent.items()]
    found += [
        f"{name} in {count} {'cell' if count == 1 else 'cells'}: {reason}"
        for (name, reason), count in counts.items()
    ]
    return f"Not there: {'; '.join(found)}." if found else ""


def section(part: PartFound) -> str:
    """All of a part, without its picture."""
    found = [cells(part), variants(part), plans(part), missing(part)]
    return "\n\n".join(text for text in found if text)
