"""Compile every Triton kernel ahead of time for several GPUs, none of which is needed.

The launchers run as they do on a GPU, on small CPU tensors; where they would launch, a cubin is
made for the target instead, by Triton and the ptxas it brings. What comes out says whether the
kernels compile, fit into shared memory, and spill; not whether they are right or fast there.

    python -m bench.compile_targets [--quick] [--targets 80,86] [--only NAME] [--case NAME]
        [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import triton

from bench.compile_cases import CASES, QUICK
from bench.compile_offline import KB, LIMITS, Compiled, compile_case
from bench.suite.machine import machine


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
        lines = ",\n  ".join(json.dumps(asdict(record)) for record in records)
        options.out.write_text(
            f'{{"versions": {json.dumps(versions)},\n "records": [\n  {lines}\n]}}\n'
        )


if __name__ == "__main__":
    main()
