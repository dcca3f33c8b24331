"""Write the site of pages that are also read in the repository: `python docs/make_site.py`.

`build/pages` gets the pages as the site has them. The changelog and the guide for contributors lie
at the repository's root and become pages. A link to a module leads to its entry in the API
reference, a link to any other file outside of ``docs`` becomes plain text. Then zensical builds
``build/site`` and fails at a broken link.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "pages"
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


@cache
def entries() -> dict[str, tuple[str, list[str]]]:
    """Return what the API pages document: page, and patterns of modules inside to leave out."""
    found = {}
    for page in sorted((DOCS / "api").glob("*.md")):
        text = page.read_text()
        for name, options in re.findall(r"^::: (\S+)\n((?: .*\n)*)", text, re.MULTILINE):
            alone = "show_submodules: false" in options
            found[name] = f"api/{page.name}", [""] if alone else re.findall(r'"!([^"]+)"', options)
    return found


def reference(file: str, name: str) -> str | None:
    """Return the entry of a name in a module, from ``docs``, or its package's; None without one.

    ``file`` is the module's, from the root; ``name`` is ``#`` and a name in it, or empty.
    """
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    owner = module
    while owner not in entries():
        if "." not in owner:
            return None
        owner = owner.rpartition(".")[0]
    page, left_out = entries()[owner]
    inside = module.removeprefix(owner).split(".")[1:]
    if any(re.search(pattern, part) for pattern in left_out for part in inside):
        return f"{page}#{owner}"
    return f"{page}#{module}{name.replace('#', '.')}"


def site_text(text: str, depth: int) -> str:
    """Return a page's text with the links of the site; it lies ``depth`` folders deep."""

    def led(match: re.Match[str]) -> str:
        label, file, name = match.groups("")
        there = reference(file, name) if file.endswith(".py") else None
        if file in ROOT_PAGES:
            there = ROOT_PAGES[file] + name
        return label if there is None else f"[{label}]({'../' * depth}{there})"

    up = re.escape("../" * (depth + 1))
    return re.sub(rf"\[([^\]]*)\]\({up}((?!\.\./)[^)#]*)(#[^)]*)?\)", led, text)


def main() -> int:
    """Write the pages and build the site."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES, ignore=shutil.ignore_patterns("make_*.py", "__pycache__"))
    for page in sorted(PAGES.rglob("*.md")):
        depth = len(page.relative_to(PAGES).parts) - 1
        page.write_text(site_text(page.read_text(), depth))
    for name, page in ROOT_PAGES.items():
        # links from the root: those into docs lose the folder
        text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", (ROOT / name).read_text())
        (PAGES / page).write_text(site_text(text.replace("](docs/", "]("), 0))
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
