"""What deriving a step's metadata costs, phase by phase, beside SGLang's own sequence.

Metadata is what attention needs to know before a forward: slots, positions, lengths, index lists
or plans, masks. The list of what SGLang does is `bench.metadata_sglang`. Both sides are checked
before they are timed: specattn's against the table and the lengths, its plans for holding every
key tile once; SGLang's buffers against the lists that specattn's plans stand for.

GPU time is that of many calls in one CUDA graph, per call; SGLang's eager launches are recorded
too, so their gaps do not count. Host time is what Python takes to launch, without waiting for the
device: SGLang's eager operations; specattn's, called eagerly, and one replay of a graph.

    python -m bench.metadata [--batch 1,16,64,128] [--context 1024,8192] [--rounds 20] [--out FILE]
    python -m bench.metadata --check 0/8  # every eighth batch, compiled and checked, not timed
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import metadata_sglang as peer
from bench.metadata_sglang import EAGER, PHASES
from bench.metadata_sides import OneGraph, Requests, check_sglang
from bench.suite import roofs
from bench.suite.machine import machine
from bench.suite.results import write
from bench.suite.timing import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bench.metadata_sglang import Sglang

RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "metadata_h200.json"
BATCHES, CONTEXTS = (1, 16, 64, 128), (1024, 8192)
# topk, steps, nodes with the root
SETTINGS = ((4, 5, 16), (1, 5, 6))
HIDDEN = 4096
HOST_CALLS = 100
# or as many as are made in this time, but some
SECONDS, FEW = 0.3, 20
STEP = "step"


def host(call: Callable[[], object], calls: int = HOST_CALLS) -> dict[str, float]:
    """Microseconds that the host takes to launch ``call``, on an idle device."""
    times = []
    for _ in range(3):
        call()
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + SECONDS
        while len(times) < calls and (len(times) < FEW or time.perf_counter() < end):
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begin) / 1e3)
    finally:
        gc.enable()
        torch.cuda.synchronize()
    ordered = sorted(times)
    return {
        "host_us": round(statistics.median(ordered), 2),
        "host_p90_us": round(ordered[int(0.9 * len(ordered))], 2),
    }


def timed(
    who: str,
    phase: str,
    call: Callable[[], object],
    launch: Callable[[], object],
    rounds: int,
    count: bool,
) -> dict[str, Any]:
    """GPU time of ``call``, host time of ``launch``, and print both."""
    found = measure(call, rounds, count=count)
    line = {
        "name": who,
        "phase": phase,
        **host(launch),
        **{key: found[key] for key in ("us", "p10_us", "p90_us", "calls", "launches")},
    }
    print(
        f"  {who:38} {phase:8} GPU {line['us']:8.2f} us  host {line['host_us']:8.2f} us  "
        f"{line['launches'] or ''}",
        flush=True,
    )
    return line


def sides(requests: Requests, kernels: Mapping[str, Any]) -> tuple[Sglang | None, list[OneGraph]]:
    """Return what is compared, checked."""
    s = requests.sglang(kernels) if kernels else None
    if s is not None:
        check_sglang(s, requests)
    wholes = [OneGraph(requests, hidden) for hidden in (HIDDEN, 0)]
    for own in wholes:
        own.check()
    return s, wholes


def cell(
    requests: Requests, kernels: Mapping[str, Any], rounds: int, count: bool
) -> dict[str, Any]:
    """Check and time one batch; with ``count``, count launches, too."""
    print(requests.name, flush=True)
    s, wholes = sides(requests, kernels)
    lines = []
    groups = [(phase, (phase,)) for phase in PHASES] + [(STEP, PHASES)]
    for label, phases in groups if s is not None else ():
        lines.append(
            timed(
                "SGLang",
                label,
                lambda p=phases: [s.run(phase) for phase in p],
                lambda p=phases: [s.run(phase, EAGER) for phase in p],
                rounds,
                count,
            )
        )
    for whole in wholes:
        line = timed(whole.name, STEP, whole.fill, whole.submitted(), rounds, count)
        lines.append(line | {"eager_host_us": host(whole.fill)["host_us"]})
    return {"name": requests.name, "case": requests.case, "contestants": lines}


def batches(options: argparse.Namespace) -> Iterator[Requests]:
    """Every batch of the run, one setting after the other."""
    for setting in SETTINGS:
        for batch in map(int, options.batch.split(",")):
            for context in map(int, options.context.split(",")):
                yield Requests(batch, setting, context, "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default=",".join(map(str, BATCHES)))
    parser.add_argument("--context", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--check", metavar="I/N", help="compile and check batch I, I + N, ...")
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    kernels, absent = {}, []
    try:
        kernels = peer.kernels()
    except ImportError as problem:
        absent.append(f"SGLang: {problem}")
    for line in absent:
        print(line, flush=True)
    if options.check:
        first, step = map(int, options.check.split("/"))
        for requests in islice(batches(options), first, None, step):
            sides(requests, kernels)
        return
    found: dict[str, Any] = {
        "format": 1,
        "part": "metadata",
        "title": "Metadata of a step",
        "absent": "; ".join(absent),
        "machine": machine(options.commit),
        "rounds": options.rounds,
        "roofs": roofs.measure(options.rounds),
        "host_calls": HOST_CALLS,
        "operations": [
            {"phase": entry.phase, "runs": entry.runs, "place": entry.place, "what": entry.what}
            for entry in peer.OPERATIONS
        ],
        "left_out": [{"place": place, "what": what} for place, what in peer.LEFT_OUT],
        "cells": [],
    }
    for requests in batches(options):
        # a setting's launches are the same in every batch
        count = all(before["case"]["nodes"] != requests.case["nodes"] for before in found["cells"])
        found["cells"].append(cell(requests, kernels, options.rounds, count))
        torch.cuda.empty_cache()
        write(found, options.out)


if __name__ == "__main__":
    main()
