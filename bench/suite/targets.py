"""What was asked for and what was measured, line by line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import tables
from .cases import K

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .results import Found, Line

#: Operations per byte up to which a cell counts as bound by memory: half of what an H200 has.
MEMORY_BOUND = 90
FA3 = ("FA3", "FA3, schedule ahead")
FLASHINFER = ("FlashInfer causal", "FlashInfer causal, graph plan", "FlashInfer causal, FA3")
SGLANG = ("SGLang decode", "SGLang decode 64")


@dataclass(frozen=True)
class Point:
    """A measured number and its cell."""

    value: float
    where: str


@dataclass(frozen=True)
class Target:
    """A line of the table.

    Parameters
    ----------
    regime : str
        What is measured.
    unit : str
        ``%``, ``x``, ``us`` or ``TFLOP/s``; the first two are shares and ratios.
    must, aim : float
        What was asked for.
    points : list of Point
        What was measured; the worst counts.
    low : bool
        Whether less is better.
    mean : bool
        Whether the geometric mean counts in place of the worst.
    """

    regime: str
    unit: str
    must: float
    aim: float
    points: list[Point]
    low: bool = False
    mean: bool = False

    @property
    def worst(self) -> Point:
        pick = max if self.low else min
        return pick(self.points, key=lambda point: point.value)

    @property
    def geomean(self) -> float:
        return math.exp(sum(math.log(point.value) for point in self.points) / len(self.points))

    @property
    def value(self) -> float:
        return self.geomean if self.mean else self.worst.value

    @property
    def verdict(self) -> str:
        if not self.points:
            return "not measured"
        if self._reaches(self.aim):
            return "aim"
        return "must" if self._reaches(self.must) else "**below**"

    def _reaches(self, asked: float) -> bool:
        better = asked - self.value if self.low else self.value - asked
        return better > -1e-9  # what rounding does

    def show(self, value: float) -> str:
        if self.unit == "%":
            return tables.percent(value)
        if self.unit == "x":
            return tables.times(value)
        return f"{value:.3g} {self.unit}".strip()

    def row(self) -> list[str]:
        sign = "<= " if self.low else ""
        asked = [sign + self.show(self.must), sign + self.show(self.aim)]
        if not self.points:
            return [self.regime, *asked, tables.NONE, tables.NONE, self.verdict]
        where = "" if self.mean else self.worst.where
        if len(self.points) > 1:
            count = f"{len(self.points)} measured"
            mean = "" if self.mean or self.unit != "x" else f", geomean {self.show(self.geomean)}"
            where = f"{where} ({count}{mean})".strip()
        return [self.regime, *asked, self.show(self.value), where, self.verdict]


def table(found: list[Target]) -> str:
    head = ["regime", "must", "aim", "measured", "where", "reached"]
    return tables.table(head, [target.row() for target in found])


def plain(line: Line) -> bool:
    """Whether a line is of the base shape, page size 1 and without options."""
    case = line.case
    return (
        (*case["heads"], case["head_dim"], case["page_size"]) == (32, 8, 128, 1)
        and case["dtype"] == "bfloat16"
        and not _options(line)
    )


def _options(line: Line) -> bool:
    case = line.case
    return bool(
        case["window_left"] >= 0
        or case["logit_cap"]
        or case["lse"]
        or case["knobs"]
        or case["latent"]
        or case["stored"]
        or case["fixed"]
    )


def light(line: Line) -> bool:
    """Whether memory binds a line, not arithmetic."""
    return line.flops <= MEMORY_BOUND * line.moved


def points(
    cells: Iterable[Found], value: Callable[[Line], float], keep: Callable[[Line], bool]
) -> list[Point]:
    """Take a number from every line of specattn that is to be kept."""
    return [
        Point(value(line), _name(cell, line)) for cell in cells for line in cell.lines if keep(line)
    ]


def _name(cell: Found, line: Line) -> str:
    if line is cell.own:
        return cell.name
    return f"{cell.name}: {line.name.partition(' ')[2]}"


def against(cells: Iterable[Found], keep: Callable[[Line], bool], *names: str) -> list[Point]:
    """Take the ratio to the fastest of some peers from every cell whose own line is kept."""
    found = []
    for cell in cells:
        ratio = cell.against(*names)
        if ratio is not None and cell.own and keep(cell.own):
            found.append(Point(ratio, cell.name))
    return found


def mode(*modes: str, float8: bool = False) -> Callable[[Line], bool]:
    return lambda line: (
        line.case["mode"] in modes
        and not line.case["latent"]
        and (float8 or not line.case["stored"])
    )


def speeds(cells: list[Found]) -> list[Target]:
    """Shares of the copying kernel's speed, small batches, and large trees."""

    def tree(line: Line, low: int, high: float = math.inf, *, even: bool = True) -> bool:
        return (
            line.case["mode"] == "tree"
            and plain(line)
            and light(line)
            and line.batch <= 256
            and line.case["even"] == even
            and low * K <= line.tokens < high * K
        )

    def copy(low: int, high: float = math.inf, *, even: bool = True) -> list[Point]:
        return points(
            cells, lambda line: line.of_copy, lambda line: tree(line, low, high, even=even)
        )

    found = [
        Target("trees, batch x context >= 256k tokens", "%", 0.96, 0.99, copy(256)),
        Target("trees, 128k tokens, equal lengths", "%", 0.95, 0.98, copy(128, 129)),
        Target("trees, 64k tokens, equal lengths", "%", 0.84, 0.88, copy(64, 65)),
        Target("trees, ragged lengths", "%", 0.88, 0.93, copy(64, even=False)),
    ]
    for tokens, must, aim in (
        (100, 5.8, 5),
        (K, 8, 6.5),
        (4 * K, 11.5, 9.5),
        (32 * K, 42, 38),
    ):
        found.append(
            Target(
                f"trees, 1 x {tokens // K}k" if tokens >= K else f"trees, 1 x {tokens}",
                "us",
                must,
                aim,
                points(
                    cells,
                    lambda line: line.us,
                    lambda line, n=tokens: tree(line, 0) and (line.batch, line.tokens) == (1, n),
                ),
                low=True,
            )
        )

    def nodes(line: Line, paged: bool) -> bool:
        case = line.case
        return (
            case["mode"] == "tree"
            and case["q_len"] == 64
            and case["heads"] == [32, 8]
            and (line.batch, line.tokens) == (8, 64 * K)
            and (case["page_size"] >= 16) == paged
            and case["head_dim"] == 128
            and not _options(line)
        )

    for title, paged, must, aim in (
        ("64 nodes, 8 x 8k, page 1", False, 500, 560),
        ("64 nodes, 8 x 8k, pages of 16 and 64", True, 550, 620),
    ):
        found.append(
            Target(
                title,
                "TFLOP/s",
                must,
                aim,
                points(cells, lambda line: line.tflops, lambda line, p=paged: nodes(line, p)),
            )
        )
    return found


def ratios(cells: list[Found]) -> list[Target]:
    """Peers, within a cell."""
    trees = against(cells, mode("tree"))
    chains = mode("chain")
    long = against(cells, lambda line: chains(line) and line.tokens >= 64 * K, *FA3)
    short = against(cells, lambda line: chains(line) and line.tokens < 16 * K, *FA3)

    def wide(line: Line) -> bool:
        return mode("draft")(line) and line.case["q_len"] == 8

    prompts = mode("prompt")
    everywhere = mode("tree", "chain", "draft", "extend", float8=True)
    return [
        Target("trees against the best peer, geomean", "x", 1.6, 2, trees, mean=True),
        Target("trees against the best peer, worst", "x", 1.08, 1.15, trees),
        Target("chains and decode against FA3, >= 64k tokens", "x", 1, 1.05, long),
        Target("chains and decode against FA3, < 16k tokens", "x", 1.25, 1.5, short),
        Target(
            "draft decode, topk 8, against FlashInfer per branch",
            "x",
            2,
            2.6,
            against(cells, wide, "FlashInfer decode"),
        ),
        Target(
            "draft decode, topk 8, against SGLang per branch",
            "x",
            5,
            7,
            against(cells, wide, *SGLANG),
        ),
        Target(
            "prompts over a cached prefix against FA3",
            "x",
            0.8,
            1,
            against(cells, lambda line: prompts(line) and line.tokens > 0, *FA3),
        ),
        Target(
            "prompts over a cached prefix against FlashInfer",
            "x",
            0.8,
            1,
            against(cells, lambda line: prompts(line) and line.tokens > 0, *FLASHINFER),
        ),
        Target(
            "verify, draft decode, draft extend and decode against the best peer",
            "x",
            1,
            1,
            against(cells, everywhere),
        ),
    ]


def latent(cells: list[Found]) -> list[Target]:
    def some(q_len: int) -> Callable[[Line], bool]:
        return lambda line: bool(
            line.case["latent"] and line.case["heads"][0] == 16 and line.case["q_len"] == q_len
        )

    name = "FlashInfer MLA"
    four = against(cells, some(4), name)
    for cell in cells:
        # trees, which FlashInfer does not serve, beside its chain
        if name in cell.peers:
            four += [
                Point(cell.peers[name].us / line.us, f"{cell.name}: {label}")
                for label, line in cell.variants.items()
                if some(4)(line) and line.case["mode"] == "tree"
            ]
    return [
        Target(
            "MLA, 16 heads, 1 node, against FlashInfer (FA3)",
            "x",
            1,
            1.1,
            against(cells, some(1), name),
        ),
        Target(
            "MLA, 16 heads, 4 nodes, against FlashInfer (FA3; chain only)", "x", 0.95, 1.05, four
        ),
    ]
