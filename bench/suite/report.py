"""The tables and pictures of a documentation page, made from result files.

A page says where with ``<!-- results: NAME -->`` and ``<!-- end -->``; what stands between them is
replaced. Names are ``machines``, ``summary``, ``targets``, those of parts, and those of `records`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from . import growth, metadata, plots, records, seams, steps, summary, tables, targets
from .results import read

if TYPE_CHECKING:
    from pathlib import Path

    from .results import PartFound

PAGE = "performance.md"
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write(folder: Path, docs: Path) -> list[Path]:
    """Make the page and its pictures anew; return what was written."""
    parts = read(folder)
    page = docs / PAGE
    page.write_text(rendered(page.read_text(), folder, parts))
    made = [page]
    for part in parts:
        made.append(picture(docs, part.name))
        plots.bars(part, made[-1])
    if parts:
        made.append(picture(docs, "latency"))
        plots.latency(parts, made[-1])
    return made


def picture(docs: Path, name: str) -> Path:
    return docs / "img" / f"attention_{name}.svg"


def rendered(page: str, folder: Path, parts: list[PartFound]) -> str:
    """Return the page with every marked place filled in."""
    texts = blocks(folder, parts)

    def fill(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        text = texts.get(name, "No results yet.")
        return f"{begin}\n{text}\n\n{end}"

    return MARKED.sub(fill, page)


def blocks(folder: Path, parts: list[PartFound]) -> dict[str, str]:
    """Return the text of every name."""
    cells = [cell for part in parts for cell in part.cells]
    found = records.blocks(folder.parent)
    if not parts:
        return found
    found["machines"] = "\n\n".join([tables.machines(parts), *records.machines(folder.parent)])
    asked = [
        *targets.speeds(cells),
        *targets.ratios(cells),
        *targets.latent(cells),
        *growth.float8(cells),
        *growth.shapes(cells),
        *growth.steps(cells),
        *records.asked(folder.parent),
        *metadata.asked(folder.parent),
        *seams.asked(folder.parent),
        *steps.asked(folder.parent),
    ]
    found["summary"], found["targets"] = summary.table(asked), targets.table(asked)
    found["latency"] = "![Time over tokens](img/attention_latency.svg)"
    for part in parts:
        shown = f"![{part.title}](img/attention_{part.name}.svg)"
        found[part.name] = f"{shown}\n\n{tables.section(part)}"
    return found
