"""Programs that run in another checkout: its folder is the working directory and on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parents[2]


def start(tree: Path, arguments: Sequence[str], log: Path | None = None) -> subprocess.Popen[str]:
    """Start Python in a checkout, over pipes or with all that it prints in a log."""
    path = str(tree.resolve())
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with open(log or os.devnull, "a") as kept:
        if log is not None:
            streams = {"stdin": subprocess.DEVNULL, "stdout": kept, "stderr": kept}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=path,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
            **streams,
        )
