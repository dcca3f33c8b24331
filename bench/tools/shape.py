"""Measure how large a checkout is, and how many files and calls a step goes through.

Lines are counted as they stand and as if code were refilled to 100 columns, which a formatter does
not change. The step is traced on the CPU with the shipped pair: up to the replay it is what the
host does per step, within the replay what a CUDA graph would have recorded, but for the kernels.

    python -m bench.tools.shape [--tree PATH] [--against PATH] [--json]
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import re
import tokenize
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.tools.trees import HERE, start

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH = 100
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
#: The folders whose classes are counted, as checkouts call them.
ROOMS = ("speculative", "engine", "attention", "backends", "spec")
#: Records of tensors or numbers, and what only holds them: no part of a step's machinery.
RECORDS = re.compile(r"\.(states|step_buffers|host_buffers|landing|request|sampling)\.")
STEP = re.compile(r"\.(speculative|spec|attention)\.|\.backends\.(layers|multi_step|tbo)\.")
#: What a CPU runs in place of kernels, and the operations that choose between them.
KERNELS = re.compile(r"^kernels/|torch_native")
TRACE = """
import json, os, sys
import torch
from bench.shipped import pair
from specattn import Engine, Request, SpecConfig

root = os.path.realpath("specattn") + os.sep
engine = Engine(*pair("cpu", torch.float32), SpecConfig(3, 4, 8, 512, 2), buckets=[2])
engine.add([Request([5, 9, 31, 2, 8], 400, ignore_eos=True) for _ in range(2)])
for _ in range(4):
    engine.step(ahead=True)
calls = {"launch": [], "recorded": []}
part = "launch"
def seen(frame, event, arg):
    global part
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(root) or part is None:
        return
    if event == "call":
        own = frame.f_locals.get("self") if "self" in code.co_varnames[:1] else None
        name = "" if own is None else f"{type(own).__module__}.{type(own).__name__}"
        calls[part].append([code.co_filename[len(root):], code.co_qualname, name])
    if code.co_qualname == "Captured.replay":
        part = "recorded" if event == "call" else None
sys.setprofile(seen)
engine.step(ahead=True)
sys.setprofile(None)
print(json.dumps(calls))
"""


def refilled(source: str) -> int:
    """Count lines as if every statement were refilled; strings, comments and blanks as they are."""
    count, kept, inside = 0, list[tokenize.TokenInfo](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:  # a string's lines are its statement's
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        if token.type == tokenize.NEWLINE:
            count += _statement(kept)
            kept = []
        elif token.type not in SKIPPED:
            kept.append(token)
    return count + sum(
        not line.strip() or line.lstrip().startswith("#")
        for at, line in enumerate(source.splitlines(), 1)
        if at not in inside
    )


def _statement(tokens: list[tokenize.TokenInfo]) -> int:
    """Return the lines that a statement takes when it is written on as few as possible."""
    length, broken, before = tokens[0].start[1], 0, None
    for at, token in enumerate(tokens):
        closes = at + 1 < len(tokens) and tokens[at + 1].string in ")]}"
        if token.string == "," and closes and tokens[at + 1].start[0] > token.start[0]:
            continue
        if before is not None:
            if token.start[0] == before.end[0]:
                length += token.start[1] - before.end[1]
            else:
                length += before.string not in "([{" and token.string not in ")]}"
        inside = token.end[0] - token.start[0]
        broken += inside
        length += len(token.string) if not inside else WIDTH // 2
        before = token
    return max(1, math.ceil(length / WIDTH)) + broken


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def classes(paths: Iterable[Path]) -> int:
    trees = (ast.parse(path.read_text()) for path in paths)
    return sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))


def traced(tree: Path) -> dict[str, Any]:
    """Run a steady step of a checkout; returns what its two parts go through."""
    process = start(tree, ["-c", TRACE])
    out, _ = process.communicate()
    calls = json.loads(out.splitlines()[-1])
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for part, entered in calls.items():
        seen |= {name for _, _, name in entered if name}
        files = [file for file, _, _ in entered if not KERNELS.search(file)]
        changes = sum(a != b for a, b in pairwise(files))
        name = {"launch": "launch path", "recorded": "recorded path, kernels aside"}[part]
        found[f"{name}: files"] = len(set(files))
        found[f"{name}: calls"] = len(files)
        found[f"{name}: changes of file"] = changes
    own = {name for name in seen if STEP.search(name) and not RECORDS.search(name)}
    found["classes of one step"] = len(own)
    found["which"] = sorted(name.rpartition(".")[2] for name in own)
    return found


def measure(tree: Path) -> dict[str, Any]:
    """Return the measures of a checkout by their names."""
    library = sorted((tree / "specattn").rglob("*.py"))
    bench = sorted((tree / "bench").rglob("*.py"))
    rooms = [path for room in ROOMS for path in (tree / "specattn" / room).rglob("*.py")]
    backends = sorted((tree / "specattn" / "backends").rglob("*.py"))
    return {
        "library: lines": lines(library),
        "library: lines, refilled": sum(refilled(path.read_text()) for path in library),
        "library: files": len(library),
        "library: classes": classes(library),
        "classes of speculative, engine, attention, backends": classes(rooms),
        "backends: lines": lines(backends),
        "backends: lines, refilled": sum(refilled(path.read_text()) for path in backends),
        "bench: lines": lines(bench),
        "bench: lines, refilled": sum(refilled(path.read_text()) for path in bench),
        "bench: lines of results": lines((tree / "bench").rglob("*.json")),
        "docs/performance.md: lines": lines([tree / "docs" / "performance.md"]),
        **traced(tree),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=HERE, help="a checkout")
    parser.add_argument("--against", type=Path, help="another one, shown on its left")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options = parser.parse_args()
    trees = [tree for tree in (options.against, options.tree) if tree is not None]
    found = [measure(tree.resolve()) for tree in trees]
    if options.json:
        print(json.dumps(dict(zip(map(str, trees), found, strict=True)), indent=1))
        return
    for name in found[-1]:
        if name != "which":
            print(f"{name:46}" + "".join(f"{one[name]:>9,}" for one in found))
    for tree, one in zip(trees, found, strict=True):
        print(f"{tree}: {', '.join(one['which'])}")


if __name__ == "__main__":
    main()
