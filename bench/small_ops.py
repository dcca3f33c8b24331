"""Latency of everything a speculative step does besides attention and the models.

Each operation is held to its torch implementation, then recorded many times in one CUDA graph; the
figure is the median replay over the number of calls, a graph node's own cost (``empty_1_us``)
included. Operations on the KV pool rotate over slots, so that they meet a cold cache; the others
read what a step has just written. Bytes are what must be read and written once.

    python -m bench.small_ops [--batch 1,16,64,256,512] [--only NAME] [--rounds 20] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.small_ops_cases import GROUPS
from bench.small_ops_plans import planning, plans
from bench.small_ops_step import Op, Step
from bench.small_ops_timing import check, measure
from bench.suite import roofs
from bench.suite.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 16, 64, 256, 512)
# topk, steps, nodes with the root
TREES = ((4, 5, 16), (8, 7, 64))
# operations that the target of a few microseconds is about, at batches up to 256
TARGETED = ("plan", "plans of a step", "tree", "beams", "accept greedy", "kv move, 1 layer")


def cell(s: Step, rounds: int, only: str, count: bool) -> dict[str, Any]:
    """Check and time everything on one batch and tree."""
    name = f"batch {s.batch}, topk {s.topk}, {s.steps} steps, {s.nodes} nodes"
    print(name, flush=True)
    found: list[dict[str, Any]] = []

    def attempt(label: str, run: Callable[[], dict[str, Any]]) -> None:
        try:
            found.append(run())
        # an operation may fail in any way, and the others still count
        except Exception as problem:
            traceback.print_exc()
            failed = f"{type(problem).__name__}: {str(problem)[:300]}"
            found.append({"name": label, "failed": failed})
        line = found[-1]
        text = line.get("failed") or (
            f"{line['us']:9.2f} us  {line['p10_us']:.2f}..{line['p90_us']:.2f}  "
            f"{line['launches'] or ''}  {line['bytes'] / line['us'] / 1e6:6.3f} TB/s"
        )
        print(f"  {label:26} {text}", flush=True)

    def timed(op: Op) -> dict[str, Any]:
        check(op)
        kernels = importlib.import_module(f"specattn.kernels.{op.module}")
        return measure(op.name, op.moved, lambda i: op.run(kernels, i), op.sets, rounds, count)

    for label, (kernels, apart) in planning(s).items():
        if only in label:
            attempt(label, lambda at=(label, s, kernels, apart): plans(*at, rounds, count))
    for group in GROUPS:
        for op in group(s):
            if only in op.name:
                attempt(op.name, lambda o=op: timed(o))
        torch.cuda.empty_cache()
    case = {
        "batch": s.batch,
        "topk": s.topk,
        "steps": s.steps,
        "nodes": s.nodes,
        "context": s.context,
        "vocab": s.vocab,
        "layers": s.layers,
    }
    return {"name": name, "case": case, "contestants": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", help="default: 1,16,64,256,512")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=RESULTS / "small_ops_h200.json")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batch.split(",")] if options.batch else None
    found: dict[str, Any] = {
        "format": 1,
        "part": "small_ops",
        "title": "Small kernels",
        "machine": machine(options.commit),
        "rounds": options.rounds,
        "roofs": roofs.measure(options.rounds),
        "cells": [],
    }
    print(found["machine"]["device"], found["roofs"], flush=True)
    for tree in TREES:
        for batch in batches or BATCHES:
            torch.manual_seed(0)
            step = Step(batch, *tree, "cuda")
            # no batch has other launches than the first
            count = not found["cells"]
            found["cells"].append(cell(step, options.rounds, options.only, count))
            del step
            torch.cuda.empty_cache()
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    worst: dict[str, float] = {}
    for done in found["cells"]:
        for line in done["contestants"]:
            if line["name"] in TARGETED and done["case"]["batch"] <= 256 and "us" in line:
                worst[line["name"]] = max(worst.get(line["name"], 0.0), line["us"])
    print("slowest up to batch 256:", worst)


if __name__ == "__main__":
    main()
