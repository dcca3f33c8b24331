"""Hardware counters of the attention kernels, by Nsight Compute, one launch per case.

The launch reads a pool that no cache holds (ncu flushes them before every pass); clocks are left
alone. What `ncu` says in the sections below is written to ``bench/results/counters_h200.json``.

    python -m bench.counters [--out FILE]
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import torch

from bench.suite import cases
from bench.suite.batch import Arena, Batch
from bench.suite.machine import machine
from bench.suite.peers.ours import Ours

RESULTS = Path(__file__).parent / "results"
K = 1024
CASES = {
    "1 x 4k, 8 nodes": cases.tree((4 * K,), 4, 3, 8),
    "8 x 8k, 16 nodes": cases.tree((8 * K,) * 8, 4, 5, 16),
    "32 x 4k, 8 nodes": cases.tree((4 * K,) * 32, 4, 3, 8),
    "256 x 1k, 8 nodes": cases.tree((K,) * 256, 4, 3, 8),
    "8 x 8k, 64 nodes": cases.tree((8 * K,) * 8, 8, 7, 64),
    "8 x 8k, 64 nodes, pages of 64": cases.tree((8 * K,) * 8, 8, 7, 64, page_size=64),
    "32 x 4k, 8 nodes, float8": cases.float8(cases.tree((4 * K,) * 32, 4, 3, 8)),
    "8 x 32k, 4 tokens, MLA": cases.mla(cases.chain((32 * K,) * 8, 4), 16),
}
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "WarpStateStats",
)


def launches() -> None:
    """Run every case twice, the second time under the profiler."""
    arena = Arena(torch.device("cuda"))
    arena.reserve(list(CASES.values()))
    for case in CASES.values():
        batch = Batch(case, arena)
        ours = Ours(batch)
        ours.plan()
        ours.run(0)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        ours.run(1)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def parse(text: str) -> list[dict[str, object]]:
    """One record per launch, in order: kernel and its metrics, ``name: [value, unit]``."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    found: dict[str, dict[str, object]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        record = found.setdefault(row["ID"], {"kernel": row["Kernel Name"], "metrics": {}})
        if row["Metric Name"]:
            record["metrics"][row["Metric Name"]] = [row["Metric Value"], row["Metric Unit"]]
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="make the launches, without ncu")
    parser.add_argument("--out", type=Path, default=RESULTS / "counters_h200.json")
    options = parser.parse_args()
    if options.run:
        launches()
        return
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--csv",
        "--page",
        "details",
        "--kernel-name",
        "regex:gluon",
    ]
    for section in SECTIONS:
        command += ["--section", section]
    done = subprocess.run(
        [*command, sys.executable, "-m", "bench.counters", "--run"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"ncu failed: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    records = parse(done.stdout)
    if len(records) != len(CASES):
        sys.exit(f"{len(records)} launches for {len(CASES)} cases")
    named = [{"case": case} | record for case, record in zip(CASES, records, strict=True)]
    options.out.write_text(json.dumps({"machine": machine(), "launches": named}, indent=1) + "\n")
    for record in named:
        metrics = record["metrics"]
        print(
            record["case"],
            *(
                f"{name} {metrics[name][0]} {metrics[name][1]};"
                for name in (
                    "Duration",
                    "DRAM Throughput",
                    "Memory Throughput",
                    "Compute (SM) Throughput",
                    "Achieved Occupancy",
                    "Registers Per Thread",
                )
                if name in metrics
            ),
        )


if __name__ == "__main__":
    main()
