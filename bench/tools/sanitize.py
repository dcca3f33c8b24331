"""Run tests of kernels under compute-sanitizer: out-of-bounds, races in shared memory, stray reads.

A group is a room of kernels, whose GPU tests are sampled evenly. It runs plainly, then under each
tool, with every tensor in an allocation of its own, so that no neighbour hides an access past the
end. What the tools said goes to ``bench/results/sanitizer.json``; explanations of reports are
written into that file by hand, and kept by later runs.

    python -m bench.tools.sanitize [--tools memcheck,racecheck,initcheck] [--groups attention,mla]
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
from typing import Any

from bench.tools.trees import HERE

RESULTS = HERE / "bench" / "results" / "sanitizer.json"
TESTS = HERE / "tests" / "kernels"
GROUPS = sorted(one.parent.name for one in TESTS.glob("*/__init__.py"))
TOOLS = ("memcheck", "racecheck", "initcheck")
# a tool that never ends is killed after this
SECONDS = 600
# torch's own kernels, memory that only a whole GPU has, compilers without a GPU
UNFIT = "not naive and not beyond and not compile and not fuzz"


def sample(names: list[str], most: int) -> list[str]:
    """Return every n-th of the tests, ``most`` at the most."""
    return names[:: max(1, -(-len(names) // most))]


def collected(group: str, most: int) -> list[str]:
    """Return the tests of a group that run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0", "-m", "gpu"]
    done = subprocess.run(
        [*command, "-k", UNFIT, str(TESTS / group)],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE,
    )
    return sample([line for line in done.stdout.splitlines() if "::" in line], most)


def parse(output: str) -> dict[str, Any]:
    """Return numbers of a tool's summary, and its reports without addresses, each once."""
    found: dict[str, Any] = {"errors": None, "warnings": 0}
    if match := re.search(r"ERROR SUMMARY: (\d+) error", output):
        found["errors"] = int(match[1])
    if match := re.search(r"RACECHECK SUMMARY: .*?(\d+) error\w*, (\d+) warning", output):
        found["errors"], found["warnings"] = int(match[1]), int(match[2])
    if match := re.search(r"(\d+) passed", output):
        found["passed"] = int(match[1])
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


def sanitize(tool: str | None, group: str, tests: list[str]) -> dict[str, Any]:
    """Run tests in a process of their own, under ``tool``."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    if tool:
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "50", *command]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            cwd=HERE,
        )
    except subprocess.TimeoutExpired as problem:
        out = problem.stdout or b""
        text, code = out if isinstance(out, str) else out.decode(errors="replace"), None
    else:
        text, code = done.stdout, done.returncode
    return {
        "tool": tool or "none",
        "group": group,
        "returncode": code,
        "seconds": round(time.perf_counter() - begin, 1),
        "tests": len(tests),
        **parse(text),
        "tail": text[-1500:] if code else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--most", type=int, default=40, help="tests of a group at the most")
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not shutil.which("compute-sanitizer"):
        raise SystemExit("compute-sanitizer is not on the PATH")
    from bench.suite.machine import machine
    from bench.suite.results import write

    here = machine(options.commit)
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    if options.out.exists():
        for record in json.loads(options.out.read_text())["runs"]:
            kept[record["tool"], record["group"]] = record
    for group in options.groups.split(","):
        tests = collected(group, options.most)
        for tool in (None, *options.tools.split(",")):
            record = sanitize(tool, group, tests)
            before = kept.get((record["tool"], group), {})
            kept[record["tool"], group] = record | {
                "commit": here["commit"],
                "explanation": before.get("explanation", ""),
            }
            print(
                f"{record['tool']:10} {group:10} {record['seconds']:6.1f} s  "
                f"{record.get('passed', 0)} of {record['tests']} passed, {record['errors']} "
                f"errors, {record['warnings']} warnings, exit {record['returncode']}",
                flush=True,
            )
            for report in record["reports"][:5]:
                print(f"    {report['times']} x {report['text'][:150]}", flush=True)
            write({"machine": here, "runs": list(kept.values())}, options.out)


if __name__ == "__main__":
    main()
