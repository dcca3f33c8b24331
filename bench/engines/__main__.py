"""Whole engines beside each other: SGLang, SGLang with parts of ours, and `Engine`.

SGLang runs with its own attention, with ours (side ``specattn``), and with our whole steps (sides
``steps`` and ``fused``: ``--speculative-algorithm SPECATTN``, over its modules and fused).

A Llama of 8B and its EAGLE-3 head, in the setting ``block`` a DFlash head, in ``mtp-chain`` and
``mtp-tree`` a Qwen3.5 of 9B and its MTP layer (beside SGLang's NEXTN). Weights are random,
and every step is made to gain the same number of tokens. With ``--smoke`` everything starts once,
with a short model, and the tokens of the shipped pair are compared, which nothing is forced for.
``--weights`` has a target of FP8 weights, in blocks or by channels. It needs a GPU and SGLang
0.5.15; `make_bundle` packs that for a machine without a package index (``--hybrids`` for the last
two settings with FA3).

    python -m bench.engines --smoke --together 6 --seconds 180 --out FOLDER
    python -m bench.engines --together 2 --seconds 400 --out FOLDER
    python -m bench.engines --weights fp8 --sides fa3,fused,own --settings tree \\
        --places 16x4096,1x4096 --out FOLDER
    python -m bench.engines --settings mtp-chain,mtp-tree --out FOLDER
    python -m bench.engines --table FOLDER/engines.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.engines import cells, report
from bench.engines.processes import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.engines.cells import Job


def chosen(options: argparse.Namespace) -> list[Job]:
    """Return the jobs that are asked for."""
    jobs = cells.smoke_jobs() if options.smoke else cells.bench_jobs()
    sides, settings = options.sides.split(","), options.settings.split(",")
    if options.tp > 1:
        few = cells.PLACES[::2]
        # ranks take long to start
        jobs = [
            replace(job, tp=options.tp, places=few, seconds=options.seconds)
            for job in jobs
            if job.side != cells.OWN
        ]
    if options.places:
        jobs = [replace(job, places=options.places) if job.places else job for job in jobs]
    if options.weights:
        # of the pair, texts are compared
        jobs = [replace(job, weights=options.weights) for job in jobs if job.kind != "tokens"]
    return [
        job
        for job in jobs
        if (not options.sides or job.side in sides)
        and (not options.settings or job.setting in settings)
    ]


def places(text: str) -> tuple[tuple[int, int], ...]:
    """Return batches and contexts as options name them."""
    pairs = (one.split("x") for one in text.split(","))
    return tuple((int(batch), int(context)) for batch, context in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of results and logs")
    parser.add_argument("--seconds", type=float, default=400.0, help="what all may take")
    parser.add_argument("--sides", default="", help=", ".join(report.SIDES))
    parser.add_argument("--settings", default="", help=", ".join(cells.SETTINGS))
    parser.add_argument("--together", type=int, default=1, help="processes that start together")
    parser.add_argument(
        "--tp", type=int, default=1, help="GPUs that SGLang takes; at 1 and 16 x 4k"
    )
    parser.add_argument(
        "--places", type=places, help="batches and contexts, like 16x4096,1x4096; else all"
    )
    parser.add_argument(
        "--weights", default="", choices=("", *cells.QUANTISED), help="FP8: the target's format"
    )
    parser.add_argument("--smoke", action="store_true", help="start everything; compare tokens")
    parser.add_argument("--table", type=Path, help="print the table of results")
    options = parser.parse_args(arguments)
    if options.table:
        print(report.table(report.read(options.table)))
        return
    if options.out is None:
        parser.error("--out is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    timed = not options.smoke
    name = "engines" if timed else "smoke"
    lines = []
    with (options.out / f"{name}.jsonl").open("a") as file:
        jobs = chosen(options)
        together = options.together
        for job, found in run(jobs, options.out, options.seconds, together=together, in_turn=timed):
            for line in found:
                file.write(json.dumps(line) + "\n")
                file.flush()
                shown = {key: value for key, value in line.items() if key != "tokens"}
                print(f"{time.time() - begin:6.1f} s {job.name} {json.dumps(shown)}", flush=True)
            lines += found
    if options.smoke:
        print("\n".join(report.compared(lines)))


if __name__ == "__main__":
    main()
