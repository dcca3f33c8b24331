"""Compile every Triton kernel ahead of time for several GPUs, none of which is needed.

The operations run as they do on a GPU, on small CPU tensors; where they would launch, a cubin is
made for the target instead, by Triton and the ptxas it brings. What comes out says whether the
kernels compile, fit into shared memory, and spill; not whether they are right or fast there.

    python -m bench.tools.compile_targets [--quick] [--targets 80,86] [--only NAME] [--case NAME]
        [--out FILE]
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path

import triton

from bench.suite.machine import machine
from bench.suite.results import write
from bench.tools.compile_cases import CASES, QUICK
from bench.tools.compile_offline import KB, LIMITS, Compiled, compile_case


def table(records: list[Compiled]) -> str:
    """One line per kernel and case: registers, spills and shared memory for every target."""
    targets = sorted({record.target for record in records})
    lines = [
        "| kernel | case | " + " | ".join(f"SM{target}" for target in targets) + " |",
        "|---" * (2 + len(targets)) + "|",
    ]
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for r in records:
        spill = f" +{r.stack}" if r.stack else ""
        text = f"{r.registers}{spill}, {r.shared / KB:.0f} KB"
        cells.setdefault((r.kernel.strip("_").removesuffix("_kernel"), r.case), {})[r.target] = text
    for (kernel, case), row in cells.items():
        lines.append(f"| {kernel} | {case} | " + " | ".join(row.get(t, "") for t in targets) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each kernel and tile class once")
    parser.add_argument("--targets", default=",".join(map(str, LIMITS)))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--case", action="append", help="only cases of this name; repeatable")
    parser.add_argument("--out", type=Path, help="write the records there, as JSON")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    cases = QUICK if options.quick else CASES
    names = options.case or [name for name in cases if options.only in name]
    targets = [int(target) for target in options.targets.split(",")]
    records = [
        record
        for target in targets
        for name in names
        for record in compile_case(target, name, cases[name])
    ]
    print(table(records))
    if options.out:
        versions = {"triton": triton.__version__, "kernels": machine()["kernels"]}
        write({"versions": versions, "records": [asdict(one) for one in records]}, options.out)


if __name__ == "__main__":
    main()
