"""``specattn graphs``."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from specattn.cli.errors import ArgumentError
from specattn.cli.options import RUNNING, EngineCommand, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.cuda_graph import GraphReport

_BUCKETS = "1,2,3,4,6,8,10,12,16,20,24,28,32,40,48,64"
_SAMPLED = "Also capture steps of requests that draw."
_MIB = 2**20
#: Stands below the command's options.
EPILOG = (
    "The column memory is what the pool that all graphs share grew by. The largest bucket comes "
    "first and takes most of it; where others have 0.0 MiB, they use what is there. Buckets of "
    "prompts are tokens; first tokens have one of 8 pieces, and an order of their own. KV pools, "
    "input buffers and what the driver keeps of a graph are not in it."
)


@dataclass(frozen=True, kw_only=True)
class Graphs(EngineCommand):
    """Capture a speculative config's graphs; show the time and memory of each."""

    buckets: Annotated[str, option(RUNNING, "Batch sizes to capture.", metavar="N,N,...")] = (
        _BUCKETS
    )
    max_context: Annotated[int, option(RUNNING, "Longest context.", min=1)] = 1024
    sampled: Annotated[bool, option(RUNNING, _SAMPLED, "--sampled")] = False

    def run(self) -> None:
        """Capture, and print a table or JSON."""
        from specattn.cli.running import Setup
        from specattn.speculative.prompts.launch import of_prompts

        sizes, config = _sizes(self.buckets), self.config()
        if self.draft_sampling and not self.sampled:
            raise ArgumentError("--draft-sampling", "needs --sampled: greedy steps draw no drafts")
        options, models = self.engine_options, self.load_for(config)
        options = options | {"buckets": sizes, "sampled": self.sampled}
        setup = Setup(models, (), self.max_context, max(sizes), options)
        began = time.perf_counter()
        engine = setup.engine(config)
        captures, seconds = engine.graphs()[engine.config], time.perf_counter() - began
        found = {"device": str(self.place), **_taken(captures), "seconds_with_buffers": seconds}
        found["prompts"] = _taken([one for one in captures if of_prompts(one.part)])
        kept = engine.target.by_row().values()
        found["state_nbytes_per_row"] = sum(held[:, :1].nbytes for held in kept)
        found["captures"] = [asdict(one) for one in captures]
        if self.as_json:
            print(json.dumps(found))
        else:
            show(found)


def _taken(captures: Sequence[GraphReport]) -> dict[str, Any]:
    """Return what captures took together."""
    return {
        "recorded": sum(one.recorded for one in captures),
        "seconds": sum(one.seconds for one in captures),
        "nbytes": sum(one.nbytes for one in captures),
    }


def _sizes(text: str) -> tuple[int, ...]:
    """Return the batch sizes of a list with commas."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(1 <= size <= 1024 for size in sizes):
        raise ArgumentError("--buckets", f"must be batch sizes 1..1024 with commas, got {text!r}")
    return sizes


def show(found: dict[str, Any]) -> None:
    """Print a table of captures, as JSON has them, and their totals."""
    from rich.console import Console

    from specattn.cli.report import table

    columns = ("order", "part", "bucket", "time", "memory", "graph", "fingerprint")
    rows = (
        (
            one["order"],
            one["part"],
            one["bucket"],
            f"{1000 * one['seconds']:.0f} ms",
            f"{one['nbytes'] / _MIB:.1f} MiB",
            "yes" if one["recorded"] else "no",
            one["digest"],
        )
        for one in found["captures"]
    )
    console = Console(highlight=False)
    console.print(table(columns, rows, left=("part", "graph", "fingerprint")))
    console.print()
    console.print(_totals(found), soft_wrap=True)
    if states := found.get("state_nbytes_per_row"):
        console.print(f"layers with states keep {states / _MIB:.1f} MiB per request")


def _totals(found: dict[str, Any]) -> str:
    device, recorded = found["device"], found["recorded"]
    seconds, everything = found["seconds"], found["seconds_with_buffers"]
    times = f"{seconds:.1f} s ({everything:.1f} s with KV pools and buffers)"
    if not recorded:
        return (
            f"no graphs were captured on {device}: steps run over the same buffers "
            f"without; {len(found['captures'])} buckets ran once in {times}"
        )
    line = f"{recorded} graphs on {device} in {times}, {found['nbytes'] / _MIB:.1f} MiB in one pool"
    prompts = found.get("prompts", {})
    if not prompts.get("recorded"):
        return line
    return (
        f"{line}\nof these {prompts['recorded']} of prompts in {prompts['seconds']:.1f} s, "
        f"{prompts['nbytes'] / _MIB:.1f} MiB more than steps take"
    )
