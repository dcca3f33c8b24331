"""Run tests of kernels under compute-sanitizer: out-of-bounds, races in shared memory, stray reads.

A few GPU tests of every room of kernels run plainly, which compiles what they launch, then under
each tool, all in one process, for its start takes longest. Every tensor has an allocation of its
own, so that no neighbour hides an access past the end. What runs is printed as it runs.

    python -m bench.tools.sanitize [--tools memcheck,racecheck,initcheck] [--rooms attention,mla]
        [--most 3] [--seconds 300] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.suite.machine import machine
from bench.suite.results import write
from bench.tools.trees import HERE

TESTS = HERE / "tests" / "kernels"
ROOMS = sorted(one.parent.name for one in TESTS.glob("*/__init__.py"))
TOOLS = ("memcheck", "racecheck", "initcheck")
# torch's own kernels, memory that only a whole GPU has, compilers without a GPU
_ELSEWHERE = "naive", "many_rows", "beyond", "compile", "fuzz"
# a graph cannot be recorded where every tensor has an allocation of its own
_RECORDED = "replay", "recorded", "equal_bits", "before_the_wait", "any_commit", "from_a_graph"
UNFIT = " and ".join(f"not {name}" for name in (*_ELSEWHERE, *_RECORDED))
PYTEST = (sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider")


def sample(names: list[str], most: int) -> list[str]:
    """Return every n-th of the tests, ``most`` at the most."""
    return names[:: max(1, -(-len(names) // most))]


def collected(rooms: list[str], most: int) -> list[str]:
    """Return the tests that run, ``most`` of every room."""
    folders = [str(TESTS / room) for room in rooms]
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-m", "gpu", "-k", UNFIT, *folders],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE,
    )
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if not names:
        raise SystemExit(f"no test to run under a tool:\n{done.stdout[-2000:]}")
    by_room = [[name for name in names if f"kernels/{room}/" in name] for room in rooms]
    return [name for found in by_room for name in sample(found, most)]


def parse(output: str) -> dict[str, Any]:
    """Return numbers of a tool's summary, and its reports without addresses, each once."""
    found: dict[str, Any] = {"errors": None, "warnings": 0, "passed": 0}
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


def watched(command: list[str], seconds: float) -> tuple[int, str]:
    """Run a command and print its lines as they come; kill it when its time is over."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"},
        cwd=HERE,
    )
    assert process.stdout is not None
    begin, lines = time.perf_counter(), []
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    for line in process.stdout:
        lines.append(line)
        print(f"{time.perf_counter() - begin:6.1f} s  {line.rstrip()[:150]}", flush=True)
    code = process.wait()
    limit.cancel()
    return code, "".join(lines)


def sanitize(tool: str | None, tests: list[str], seconds: float) -> dict[str, Any]:
    """Run tests in a process of their own, under ``tool``."""
    under = ["compute-sanitizer", "--tool", tool, "--print-limit", "50"] if tool else []
    print(f"{tool or 'no tool'}: {len(tests)} tests, at most {seconds:.0f} s", flush=True)
    begin = time.perf_counter()
    code, text = watched([*under, *PYTEST, "-v", "--tb=short", *tests], seconds)
    took = round(time.perf_counter() - begin, 1)
    record = {"tool": tool, "returncode": code, "seconds": took, "tests": len(tests)}
    return record | parse(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--most", type=int, default=3, help="tests of a room at the most")
    parser.add_argument("--seconds", type=float, default=300, help="of a tool at the most")
    parser.add_argument("--out", type=Path, help="where a record goes")
    options = parser.parse_args()
    if not shutil.which("compute-sanitizer"):
        raise SystemExit("compute-sanitizer is not on the PATH")
    print("collecting", flush=True)
    tests, runs = collected(options.rooms.split(","), options.most), list[dict[str, Any]]()
    for tool in (None, *options.tools.split(",")):
        runs.append(sanitize(tool, tests, options.seconds))
        if options.out:
            write({"machine": machine(), "tests": tests, "runs": runs}, options.out)
    for run in runs:
        print(
            f"{run['tool'] or 'no tool':10} {run['seconds']:6.1f} s  {run['passed']} of "
            f"{run['tests']} passed, {run['errors']} errors, {run['warnings']} warnings, "
            f"exit {run['returncode']}"
        )
        for report in run["reports"]:
            print(f"    {report['times']} x {report['text'][:150]}")


if __name__ == "__main__":
    main()
