"""Write docs/regressions.md from the docstrings of tests/regressions.

A test module of a row starts with three paragraphs: its number and the public threads, what broke
there, and what holds here.
"""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS.parent / "tests" / "regressions"
REPOS = {
    "EAGLE": "SafeAILab/EAGLE",
    "flashinfer": "flashinfer-ai/flashinfer",
    "mlx-lm": "ml-explore/mlx-lm",
    "sglang": "sgl-project/sglang",
    "vllm": "vllm-project/vllm",
    "vllm-ascend": "vllm-project/vllm-ascend",
}
HEAD = """# Regressions

What broke in other engines' speculative decoding, by public thread, and the tests that show that
it does not break here. The tests run on a CPU; on a GPU the same tests run over CUDA graphs.
A pending row is not shown by any test: it waits for a feature.

This page is written by `python docs/make_regressions.py`.
"""
TAIL = """
Trees of topk > 1 also have a recipe of their own, in
[test_topk_recipe.py](../tests/regressions/test_topk_recipe.py): beams that cross or collapse, ties
at probability 1, verified against each path alone, committed, and decoded on.
"""


def modules() -> dict[str, Path]:
    """Return the test module of every tested row."""
    found = {}
    for path in sorted(FOLDER.glob("test_r[0-9][0-9]_*.py")):
        row = f"R{path.name[6:8]}"
        if row in found:
            raise ValueError(f"{row} has two modules: {found[row].name}, {path.name}")
        found[row] = path
    return found


def story(path: Path) -> tuple[str, str, str]:
    """Return a module's threads, what broke, and what holds here.

    Raises
    ------
    ValueError
        If its docstring does not say so in three paragraphs.
    """
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    start = f"R{path.name[6:8]}: "
    if len(parts) < 3 or not parts[0].startswith(start) or "#" not in parts[0]:
        raise ValueError(f"{path.name}: the docstring must be '{start}threads', a bug, a promise")
    return parts[0].removeprefix(start).rstrip("."), parts[1], " ".join(parts[2:])


def linked(threads: str) -> str:
    """Link every ``repository#number`` whose repository is known."""

    def link(match: re.Match[str]) -> str:
        name, number = match.groups()
        repo = name if "/" in name else REPOS.get(name)
        shown = f"{name}#{number}"
        return f"[{shown}](https://github.com/{repo}/issues/{number})" if repo else shown

    return re.sub(r"([\w./-]+)#(\d+)", link, threads)


def page() -> str:
    """Return the page."""
    notes = runpy.run_path(str(FOLDER / "pending.py"))
    pending, partly, tested = notes["PENDING"], notes["PARTLY"], modules()
    lines = [
        HEAD,
        f"{len(tested)} rows are tested, {len(partly)} of them in part; "
        f"{len(pending)} are pending.\n",
        "| | what broke | what holds here | status |",
        "|---|---|---|---|",
    ]
    for row in sorted(tested | pending):
        if row in pending:
            threads, broke, waits = pending[row]
            holds, status = "", f"pending: {waits}"
        else:
            threads, broke, holds = story(tested[row])
            name = tested[row].name
            status = f"[{name[5:-3]}](../tests/regressions/{name})"
            if row in partly:
                status += f"; not yet: {partly[row]}"
        cells = [row, f"{broke} ({linked(threads)})", holds, status]
        cells = [cell.replace("|", "\\|").replace("``", "`") for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    (DOCS / "regressions.md").write_text(page())
