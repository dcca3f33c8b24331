"""Run every kernel under compute-sanitizer: out-of-bounds, races in shared memory, stray reads.

Without arguments: the driver. It runs each group plainly, then under each tool, and writes what
the tools said to ``bench/results/sanitizer_h200.json``. Explanations of reports are written into
that file by hand, and kept by later runs. Tensors are allocated one by one and exactly as large
as they need to be, so that a neighbour does not hide an access past the end; slots of the pools
that nobody uses hold NaN, and every result is checked to be finite.

    python -m bench.tools.sanitize [--tools memcheck,racecheck,initcheck] [--groups tree,latent,...]
    compute-sanitizer --tool memcheck python -m bench.tools.sanitize --run tree
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.tools.sanitize_attention import LATENT, PROMPT, TREE, TRITON
from bench.tools.sanitize_small import SMALL
from bench.tools.sanitize_step import MODELS, STEP

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parents[1] / "results"
TOOLS = ("memcheck", "racecheck", "initcheck")
# a group is killed after this; on an H200 none took more than 30
SECONDS = 300
# by kernel
GROUPS: dict[str, dict[str, Callable[[], None]]] = {
    "tree": TREE,
    "triton": TRITON,
    "prompt": PROMPT,
    "latent": LATENT,
    "small": SMALL,
    "step": STEP,
    "models": MODELS,
}


def run(group: str) -> None:
    """Run a group in this process."""
    torch.manual_seed(0)
    for name, call in GROUPS[group].items():
        call()
        torch.cuda.synchronize()
        print(f"ran {group}: {name}", flush=True)


def parse(output: str) -> dict[str, Any]:
    """Numbers of a tool's summary, and its reports without addresses, each once."""
    found: dict[str, Any] = {"errors": None, "warnings": 0}
    if match := re.search(r"ERROR SUMMARY: (\d+) error", output):
        found["errors"] = int(match[1])
    if match := re.search(r"RACECHECK SUMMARY: .*?(\d+) error\w*, (\d+) warning", output):
        found["errors"], found["warnings"] = int(match[1]), int(match[2])
    lines = [
        line.removeprefix("=========").strip()
        for line in output.splitlines()
        if line.startswith("=========")
    ]
    reports: dict[str, int] = {}
    for line, following in itertools.pairwise([*lines, ""]):
        if re.match(r"(Invalid|Uninitialized|Error|Warning|Potential|Race|Program hit)", line):
            text = re.sub(r"0x[0-9a-f]+", "0x…", f"{line} / {following}")
            reports[text] = reports.get(text, 0) + 1
    found["reports"] = [{"text": text, "times": times} for text, times in reports.items()][:20]
    return found


def sanitize(tool: str | None, group: str) -> dict[str, Any]:
    """Run a group in a process of its own, under ``tool``."""
    command = [sys.executable, "-m", "bench.tools.sanitize", "--run", group]
    if tool:
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "50", *command]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
    except subprocess.TimeoutExpired as problem:
        out = problem.stdout or b""
        text = out if isinstance(out, str) else out.decode(errors="replace")
        code = None
    else:
        text, code = done.stdout + done.stderr, done.returncode
    return {
        "tool": tool or "none",
        "group": group,
        "returncode": code,
        "seconds": round(time.perf_counter() - begin, 1),
        "ran": re.findall(rf"ran {group}: (.*)", text),
        "cases": len(GROUPS[group]),
        **parse(text),
        "tail": text[-1500:] if code else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=GROUPS, help="run this group here, without the driver")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=RESULTS / "sanitizer_h200.json")
    options = parser.parse_args()
    if options.run:
        run(options.run)
        return
    if not shutil.which("compute-sanitizer"):
        raise SystemExit("compute-sanitizer is not on the PATH")
    from bench.suite.machine import machine
    from bench.suite.results import write

    here = machine(options.commit)
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    if options.out.exists():
        for record in json.loads(options.out.read_text())["runs"]:
            kept[record["tool"], record["group"]] = record
    version = (
        subprocess.run(
            ["compute-sanitizer", "--version"], capture_output=True, text=True, check=False
        )
        .stdout.strip()
        .splitlines()[-1:]
    )
    for tool in (None, *options.tools.split(",")):
        for group in options.groups.split(","):
            record = sanitize(tool, group)
            before = kept.get((record["tool"], group), {})
            kept[record["tool"], group] = record | {
                "commit": here["commit"],
                "explanation": before.get("explanation", ""),
            }
            print(
                f"{record['tool']:10} {group:8} {record['seconds']:6.1f} s  "
                f"{len(record['ran'])} of {record['cases']} cases, {record['errors']} errors, "
                f"{record['warnings']} warnings, exit {record['returncode']}",
                flush=True,
            )
            for report in record["reports"][:5]:
                print(f"    {report['times']} x {report['text'][:150]}", flush=True)
            if record["tail"]:
                print(record["tail"], flush=True)
            found = {"machine": here, "compute_sanitizer": version, "runs": list(kept.values())}
            write(found, options.out)


if __name__ == "__main__":
    main()
