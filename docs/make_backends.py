"""Write the table of docs/backends.md from what backends declare."""

from __future__ import annotations

import re
from pathlib import Path

from specattn.backends import backend_names, load_backend

PAGE = Path(__file__).resolve().parent / "backends.md"
COLUMNS = {
    "CUDA graphs": "graphs",
    "trees": "trees",
    "index lists": "lists",
    "prompts": "extend",
    "window": "window",
    "cap": "cap",
    "lse": "lse",
    "deterministic": "deterministic",
    "sinks": "sinks",
}


def table() -> str:
    """Return a Markdown table of what every backend can do."""
    lines = [
        f"| backend | plans on | {' | '.join(COLUMNS)} | pages of | dtypes | also stored as |",
        "|---" * (len(COLUMNS) + 5) + "|",
    ]
    for name in backend_names():
        found = load_backend(name).capabilities
        marks = ["yes" if getattr(found, item) else "no" for item in COLUMNS.values()]
        dtypes, stored = (
            ", ".join(str(dtype).removeprefix("torch.") for dtype in listed)
            for listed in (found.dtypes, found.kv_dtypes)
        )
        plans = "host" if found.host_plan else "device"
        pages = "any size" if found.page_size == 1 else f"{found.page_size} n"
        marks += [pages, dtypes, stored]
        lines.append(f"| `{name}` | {plans} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the table of today."""
    return re.sub(
        r"(?m)^\| backend \| plans on .*\n(?:\|.*\n)+", lambda _: table(), PAGE.read_text()
    )


if __name__ == "__main__":
    PAGE.write_text(page())
