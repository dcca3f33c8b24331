"""Compiling what FlashInfer has not built yet, before anything is timed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from .peers import PEERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .cases import Cell


def missing(cells: Iterable[Cell]) -> dict[str, Any]:
    """Return the modules that peers lack for the cells, by name."""
    found: dict[str, Any] = {}
    here = [kind for kind in PEERS if not kind.absent()]
    for cell in cells:
        for kind in here if cell.peers else ():
            if cell.case.mode in kind.modes:
                found |= {m.name: m for m in kind.modules(cell.case) if not m.is_compiled}
    return found


def build(cells: Iterable[Cell], log: Callable[[str], None]) -> None:
    """Build them side by side with nvcc, which takes minutes."""

    def one(module: Any) -> str:
        try:
            module.build(verbose=False)
        # no compiler, no headers, ...: the peer is refused by name later
        except Exception as problem:
            return f"{module.name}: {type(problem).__name__}"
        return f"{module.name}: built"

    with ThreadPoolExecutor(8) as pool:
        for line in pool.map(one, missing(cells).values()):
            log(line)
