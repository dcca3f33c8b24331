"""What makes the site of pages that are also read in the repository.

The changelog and the guide for contributors lie at the repository's root. The site has them as
pages, and a link to any other file outside of ``docs`` becomes plain text there.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config) -> Files:
    """Add the root's pages."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        for other, its_page in PAGES.items():
            text = text.replace(f"]({other}", f"]({its_page}")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(text: str, page, config, files: Files) -> str:
    """Lead links to the root's pages to the site's, and drop links that leave ``docs``."""
    up = "../" * (page.file.src_uri.count("/") + 1)

    def led(match: re.Match[str]) -> str:
        label, name, anchor = match.groups("")
        home = "../" * page.file.src_uri.count("/")
        return f"[{label}]({home}{PAGES[name]}{anchor})" if name in PAGES else label

    return re.sub(rf"\[([^\]]*)\]\({re.escape(up)}((?!\.\./)[^)#]*)(#[^)]*)?\)", led, text)
