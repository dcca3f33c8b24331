"""The tables of documentation pages, made from result files.

A page says where with ``<!-- results: NAME -->`` and ``<!-- end -->``; what stands between them is
replaced. Names are ``summary``, ``machines``, ``auto``, ``float8-gains``, ``steps``, ``dflash``,
``acceptance``, ``host``, and those of `SHOWN`. Cells that are not shown are in the
result files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from . import acceptance, choices, steps, summary, tables
from . import blocks as drafted
from .results import read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .results import Found, PartFound

PAGE = "performance.md"
#: Every page with marked places.
PAGES = (PAGE, "proposers.md", "pair.md", "backends.md", "quantised_kv.md")
#: Of a part, what the page shows: the table, and which cells it has.
SHOWN: dict[str, tuple[Callable[[list[Found]], str], str]] = {
    "trees": (
        tables.cells,
        "1 x 100 tree 4-3-8; 1 x 4k tree 4-3-8; 1 x 128k tree 4-3-8; 32 x 32k tree 4-3-8; "
        "256 x 1k tree 4-3-8; 1 x 64k + 31 x 2k tree 4-3-8; 8 x 8k tree 4-5-16; "
        "8 x 8k tree 8-7-64; 32 x 4k tree 8-7-64",
    ),
    "chains": (
        tables.cells,
        "1 x 1k decode; 1 x 8k decode; 8 x 8k decode; 32 x 4k decode; 512 x 512 decode; "
        "1 x 64k + 31 x 2k decode; 1 x 8k chain 8; 32 x 8k chain 8",
    ),
    "drafts": (
        tables.cells,
        "1 x 1k draft topk 8 step 2; 8 x 8k draft topk 4 step 2; "
        "8 x 8k draft topk 8 step 2; 32 x 4k draft topk 8 step 2; "
        "1 x 64k + 31 x 2k draft topk 8 step 2",
    ),
    "extends": (
        tables.cells,
        "1 x 8k extend 1..6; 8 x 8k extend 1..6; 8 x 8k prompt 512; 1 x 8k prompt 8k; "
        "1 x 64k prompt 512; 1 x 0 prompt 8k",
    ),
    "latent": (
        tables.cells,
        "1 x 8k decode mla16 page 64; 16 x 16k decode mla16 page 64; "
        "8 x 32k chain 4 mla16 page 64; 1 x 8k decode mla128 page 64; "
        "16 x 16k decode mla128 page 64; 64 x 4k decode mla128 page 64; "
        "32 x 8k chain 4 mla128 page 64",
    ),
    "float8": (
        tables.variants,
        "1 x 4k tree 4-3-8 fp8; 1 x 128k tree 4-3-8 fp8; 8 x 8k tree 8-7-64 fp8; "
        "8 x 32k tree 4-3-8 fp8; 16 x 8k tree 4-3-8 hd64 fp8; 32 x 4k decode fp8; "
        "8 x 8k prompt 512 fp8",
    ),
    "fixed": (
        tables.variants,
        "1 x 4k tree 4-3-8, two orders; 8 x 8k tree 4-5-16, two orders; "
        "8 x 8k tree 8-7-64, two orders; 8 x 8k decode, two orders; "
        "8 x 8k draft topk 8 step 2, two orders",
    ),
}
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write(folder: Path, docs: Path) -> list[Path]:
    """Make the pages anew; return what was written."""
    parts = read(folder)
    made = [docs / name for name in PAGES]
    for page in made:
        page.write_text(rendered(page.read_text(), folder, parts))
    return made


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
    results = folder.parent
    records = {
        "steps": (steps.RECORD, steps.shown),
        "dflash": (drafted.RECORD, drafted.shown),
        "acceptance": (acceptance.RECORD, acceptance.shown),
        "host": (steps.HOST_RECORD, steps.shown_host),
    }
    found = {
        name: shown(results)
        for name, (record, shown) in records.items()
        if (results / record).exists()
    }
    if not parts:
        return found
    cells = [cell for part in parts for cell in part.cells]
    ratios = [*summary.attention(cells), *steps.ratios(results)]
    found["summary"], found["machines"] = summary.table(ratios), tables.machines(parts)
    found["auto"], found["float8-gains"] = choices.shown(parts), choices.shown_float8(parts)
    for part in parts:
        if part.name in SHOWN:
            table, names = SHOWN[part.name]
            chosen = [cell for cell in part.cells if cell.name in names.split("; ")]
            found[part.name] = table(chosen)
    return found
