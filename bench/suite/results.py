"""What the files of a run say: parts, cells, and the lines that were timed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import matrix

if TYPE_CHECKING:
    from pathlib import Path

OWN = "specattn"
#: Characters up to which a value of a record stays on one line.
WIDTH = 480


@dataclass(frozen=True)
class Line:
    """A contestant that was timed in a cell.

    Parameters
    ----------
    name : str
        Who.
    case : dict
        What it computed, as `run.describe` says it.
    us : float
        Microseconds per layer.
    moved, flops : float
        Bytes that must move, and operations.
    copy_tb_s : float
        The part's speed of a copy.
    """

    name: str
    case: dict[str, Any]
    us: float
    moved: float
    flops: float
    copy_tb_s: float

    @property
    def of_copy(self) -> float:
        return self.moved / self.copy_tb_s / 1e6 / self.us

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6

    @property
    def tokens(self) -> int:
        return int(self.case["tokens"])


@dataclass(frozen=True)
class Found:
    """A cell: specattn's line, its variants by what differs, and everybody else."""

    part: str
    name: str
    case: dict[str, Any]
    own: Line | None = None
    variants: dict[str, Line] = field(default_factory=dict)
    peers: dict[str, Line] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> Line | None:
        """What users get: by ``auto``, where that may be another library."""
        return self.variants.get("auto", self.own)

    @property
    def best(self) -> Line | None:
        """The fastest peer."""
        return min(self.peers.values(), key=lambda line: line.us, default=None)

    def against(self, *names: str) -> float | None:
        """How many times longer than `ours` the fastest of some peers takes; of all by default."""
        lines = [self.peers[name] for name in names or self.peers if name in self.peers]
        if self.ours is None or not lines:
            return None
        return min(line.us for line in lines) / self.ours.us


@dataclass(frozen=True)
class PartFound:
    """A part's file."""

    name: str
    machine: dict[str, Any]
    cells: list[Found]


def read(folder: Path) -> list[PartFound]:
    """Read a folder's parts in the matrix's order; a quick set counts where nothing else is."""
    names = [name for name in matrix.parts() if (folder / f"{name}.json").exists()]
    if not names and (folder / "quick.json").exists():
        names = ["quick"]
    return [_part(json.loads((folder / f"{name}.json").read_text())) for name in names]


def _part(found: dict[str, Any]) -> PartFound:
    cells = [_cell(found, cell) for cell in found["cells"]]
    return PartFound(found["part"], found["machine"], cells)


def _cell(part: dict[str, Any], found: dict[str, Any]) -> Found:
    own, variants, peers, refused = None, {}, {}, {}
    for entry in found["contestants"]:
        name = entry["name"]
        label = name.removeprefix(OWN).strip() if name.startswith(OWN) else None
        if "failed" in entry:
            refused[name] = entry["failed"]
        elif label is None:
            peers[name] = _line(part, entry, found["case"])
        elif label:
            variants[label] = _line(part, entry, found["variants"][label])
        else:
            own = _line(part, entry, found["case"])
    return Found(part["part"], found["name"], found["case"], own, variants, peers, refused)


def _line(part: dict[str, Any], entry: dict[str, Any], case: dict[str, Any]) -> Line:
    return Line(
        name=entry["name"],
        case=case,
        us=entry["us"],
        moved=entry["bytes"],
        flops=entry["flops"],
        copy_tb_s=part["roofs"]["copy_tb_s"],
    )


def text(value: Any, indent: str = "") -> str:
    """Return a record as JSON, a row of its tables per line."""
    short = json.dumps(value, ensure_ascii=False)
    if len(short) + len(indent) <= WIDTH or not isinstance(value, dict | list) or not value:
        return short
    more = f"{indent} "
    if isinstance(value, list):
        lines, (begin, end) = [text(one, more) for one in value], "[]"
    else:
        lines = [f"{json.dumps(name)}: {text(one, more)}" for name, one in value.items()]
        begin, end = "{}"
    inner = f",\n{more}".join(lines)
    return f"{begin}\n{more}{inner}\n{indent}{end}"


def write(record: dict[str, Any], path: Path) -> None:
    """Write a record to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(record) + "\n")
