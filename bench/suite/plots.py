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
