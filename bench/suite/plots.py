"""Results as SVG. Text stays text, and equal results give equal files."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from .results import Found, Line, PartFound

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specattn",
    "font.size": 8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
OURS, PALE, FLOOR = "#c0392b", "#efb8b1", "#7f8c8d"
COLORS = ["#2471a3", "#1e8449", "#b7950b", "#6c3483", "#117a65", "#a04000", "#34495e", "#d98880"]
MARKERS = "osD^vP*X"
RATIOS = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def digest(part: PartFound) -> str:
    """Return what a picture of the part depends on, in short."""
    numbers: list[Any] = [part.title, part.roofs]
    for cell in part.cells:
        lines = [*cell.lines, *cell.peers.values()]
        numbers.append([cell.name, [[x.name, x.us, x.moved, x.flops, x.tokens] for x in lines]])
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


def digest_of(parts: list[PartFound]) -> str:
    return hashlib.sha256("".join(map(digest, parts)).encode()).hexdigest()[:16]


def stamp(path: Path) -> str | None:
    """Return the digest a picture was made for."""
    if not path.exists():
        return None
    _, _, rest = path.read_text().partition("results ")
    return rest[:16] or None


def save(figure: Any, path: Path, made_for: str) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path,
        bbox_inches="tight",
        metadata={
            "Date": None,
            "Creator": None,
            "Description": f"results {made_for}",
        },
    )
    plt.close(figure)
    # matplotlib leaves blanks at the ends of lines, and more digits than anybody sees
    text = "\n".join(line.rstrip() for line in path.read_text().splitlines())
    path.write_text(re.sub(r"(\.\d\d)\d+", r"\1", text) + "\n")


def bars(part: PartFound, path: Path) -> None:
    """Draw a part's cells: how much of the roof, and how long the others take."""
    import matplotlib
    import matplotlib.pyplot as plt

    found = [(cell, line) for cell in part.cells for line in cell.lines]
    with matplotlib.rc_context(STYLE):
        figure, (roof, ratio) = plt.subplots(
            1,
            2,
            sharey=True,
            figsize=(10, 1.1 + 0.21 * len(found)),
            width_ratios=(1, 1.2),
        )
        places = range(len(found))
        roof.barh(places, [line.of_roof for _, line in found], color=PALE, height=0.62)
        roof.set_yticks(places, [_label(cell, line) for cell, line in found])
        roof.set_ylim(len(found) - 0.4, -0.6)
        roof.axvline(1, color=FLOOR, linewidth=1)
        roof.set_xlabel("share of the roof (bar: specattn, marks: peers)")
        roof.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
        roof.set_title(f"{part.title}, {part.machine['device']}", loc="left")
        _marks(found, roof, ratio)
        if ratio.get_legend_handles_labels()[0]:
            figure.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4)
        figure.tight_layout()
        save(figure, path, digest(part))


def _marks(found: list[tuple[Found, Line]], roof: Any, ratio: Any) -> None:
    """Draw the peers."""
    names = dict.fromkeys(name for cell, _ in found for name in cell.peers)
    ratio.axvline(1, color=OURS, linewidth=1.2)
    for i, name in enumerate(names):
        mine = [
            (place, cell.peers[name], line)
            for place, (cell, line) in enumerate(found)
            if name in cell.peers and line is cell.own
        ]
        look = {
            "color": COLORS[i % len(COLORS)],
            "linestyle": "none",
            "markersize": 4,
            "marker": MARKERS[(i + i // len(COLORS)) % len(MARKERS)],
        }
        at = [place for place, _, _ in mine]
        roof.plot([peer.of_roof for _, peer, _ in mine], at, **look)
        ratio.plot([peer.us / own.us for _, peer, own in mine], at, label=name, **look)
    ratio.set_xscale("log")
    low, high = ratio.get_xlim()
    shown = [x for x in RATIOS if low <= x <= high]
    ratio.set_xticks(shown, [f"{x:g}x" for x in shown])
    ratio.set_xticks([], minor=True)
    ratio.set_xlabel("time of a peer / time of specattn")
    ratio.tick_params(axis="y", length=0)


def _label(cell: Found, line: Line) -> str:
    return cell.name if line is cell.own else f"({line.name.partition(' ')[2]})"


def latency(parts: list[PartFound], path: Path) -> None:
    """Draw every cell's time over the tokens of its batch, a panel per part."""
    import matplotlib
    import matplotlib.pyplot as plt

    rows = -(-len(parts) // 3)
    with matplotlib.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows,
            min(3, len(parts)),
            figsize=(11, 3.2 * rows),
            squeeze=False,
            layout="tight",
        )
        for part, panel in zip(parts, axes.flat, strict=False):
            _panel(part, panel)
        for panel in list(axes.flat)[len(parts) :]:
            panel.set_visible(False)
        figure.legend(
            *axes.flat[0].get_legend_handles_labels(),
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            ncols=4,
        )
        save(figure, path, digest_of(parts))


def _panel(part: PartFound, panel: Any) -> None:
    own = [line for cell in part.cells for line in cell.lines]
    best = [cell.best for cell in part.cells if cell.best]
    rest = [line for cell in part.cells for line in cell.peers.values() if line is not cell.best]
    floors = [line.us * line.of_roof for line in own]

    def dots(lines: list[Line], marker: str, color: str, label: str, size: float) -> None:
        panel.plot(
            [max(line.tokens, 1) for line in lines],
            [line.us for line in lines],
            marker,
            color=color,
            label=label,
            markersize=size,
            alpha=0.85,
        )

    panel.plot(
        [max(line.tokens, 1) for line in own],
        floors,
        "_",
        color=FLOOR,
        markersize=9,
        label="roof: bytes at the speed of a copy, or operations at that of a matmul",
    )
    dots(rest, ".", "#c5c9cc", "other peers", 4)
    dots(best, "o", COLORS[0], "best peer", 4.5)
    for lines in _series(part):
        panel.plot(
            [line.tokens for line in lines], [line.us for line in lines], color=OURS, linewidth=0.8
        )
    dots(own, "D", OURS, "specattn", 3.5)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
    panel.set(title=part.title, xlabel="tokens of the batch", ylabel="us per layer")


def _series(part: PartFound) -> list[list[Line]]:
    """Own lines that differ in their lengths alone, three or more."""
    found: dict[str, list[Line]] = {}
    for cell in part.cells:
        for line in cell.lines:
            if line.case["even"]:
                rest = {
                    key: value
                    for key, value in line.case.items()
                    if key not in ("lengths", "tokens", "size")
                }
                found.setdefault(json.dumps(rest), []).append(line)
    return [
        sorted(lines, key=lambda line: line.tokens) for lines in found.values() if len(lines) > 2
    ]
