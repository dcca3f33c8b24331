"""``specattn graphs``."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer  # noqa: TC002 - Typer evaluates annotations

from specattn.cli import options
from specattn.cli.errors import ArgumentError
from specattn.cli.options import RUNNING, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.cuda_graph import GraphReport

_BUCKETS = "1,2,3,4,6,8,10,12,16,20,24,28,32,40,48,64"
_MIB = 2**20
#: Stands below the command's options.
EPILOG = (
    "The column memory is what the pool that all graphs share grew by. The largest bucket comes "
    "first and takes most of it; where others have 0.0 MiB, they use what is there. KV pools, "
    "input buffers and what the driver keeps of a graph are not in it."
)


def graphs(
    ctx: typer.Context,
    target: options.TargetOption = None,
    draft: options.DraftOption = None,
    draft_kind: options.DraftKindOption = "eagle3",
    lookup_first: options.LookupFirstOption = False,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    topk: options.TopkOption = None,
    steps: options.StepsOption = None,
    draft_tokens: options.DraftTokensOption = None,
    draft_sampling: options.DraftSamplingOption = False,
    backend: options.BackendOption = "auto",
    page_size: options.PageSizeOption = 1,
    kv_cache_dtype: options.KvDtypeOption = "auto",
    deterministic: options.DeterministicOption = False,
    cudagraph: options.CudagraphOption = "auto",
    no_fused: options.NoFusedOption = False,
    buckets: Annotated[
        str, option(RUNNING, "Batch sizes to capture.", metavar="N,N,...")
    ] = _BUCKETS,
    max_context: Annotated[int, option(RUNNING, "Longest context.", min=1)] = 1024,
    sampled: Annotated[
        bool, option(RUNNING, "Also capture steps of requests that draw.", "--sampled")
    ] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Capture a speculative config's graphs; show the time and memory of each."""
    sizes = _sizes(buckets)
    config = options.speculation(
        topk,
        steps,
        draft_tokens,
        kind=draft_kind,
        lookup_first=lookup_first,
        page_size=page_size,
        draft_sampling=draft_sampling,
    )
    if draft_sampling and not sampled:
        raise ArgumentError("--draft-sampling", "needs --sampled: greedy steps draw no drafts")
    recorded = options.pick_cudagraph(cudagraph)

    from specattn.cli.loading import models_for, pick_device, pick_kv_dtype
    from specattn.cli.running import Setup

    place, stored = pick_device(device), pick_kv_dtype(kv_cache_dtype)
    models = models_for(
        ctx,
        place,
        target,
        draft,
        dtype,
        backend,
        deterministic=deterministic,
        kv_dtype=stored,
        speculative=config.num_steps > 0,
        kind=draft_kind,
        lookup_first=lookup_first,
        fused=not no_fused,
    )
    setup = Setup(
        models,
        (),
        max_context,
        max(sizes),
        backend,
        graphs=True,
        warm_up=False,
        kv_dtype=stored,
        deterministic=deterministic,
        cudagraph=recorded,
        buckets=sizes,
    )
    began = time.perf_counter()
    engine = setup.engine(config)
    decoder = engine.decoder(engine.config)
    if sampled:
        decoder.capture(sampled=True)
    captures, seconds = decoder.report(), time.perf_counter() - began
    if as_json:
        print(json.dumps(_object(captures, seconds, str(place))))
    else:
        show(captures, seconds, str(place))


def _sizes(text: str) -> tuple[int, ...]:
    """Return the batch sizes of a list with commas."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(1 <= size <= 1024 for size in sizes):
        raise ArgumentError("--buckets", f"must be batch sizes 1..1024 with commas, got {text!r}")
    return sizes


def _object(captures: Sequence[GraphReport], seconds: float, device: str) -> dict[str, Any]:
    return {
        "device": device,
        "recorded": sum(one.recorded for one in captures),
        "seconds": sum(one.seconds for one in captures),
        "seconds_with_buffers": seconds,
        "nbytes": sum(one.nbytes for one in captures),
        "captures": [asdict(one) for one in captures],
    }


def show(captures: Sequence[GraphReport], seconds: float, device: str) -> None:
    """Print a table of captures and their totals.

    ``seconds`` is for all of them with KV pools and buffers.
    """
    from rich.console import Console

    from specattn.cli.report import table

    columns = ("order", "part", "bucket", "time", "memory", "graph", "fingerprint")
    shown = table(*columns, left=("part", "graph", "fingerprint"))
    for one in captures:
        shown.add_row(
            str(one.order),
            one.part,
            str(one.bucket),
            f"{1000 * one.seconds:.0f} ms",
            f"{one.nbytes / _MIB:.1f} MiB",
            "yes" if one.recorded else "no",
            one.digest,
        )
    console = Console(highlight=False)
    console.print(shown)
    console.print()
    console.print(_totals(_object(captures, seconds, device)), soft_wrap=True)


def _totals(found: dict[str, Any]) -> str:
    device, recorded = found["device"], found["recorded"]
    seconds, everything = found["seconds"], found["seconds_with_buffers"]
    times = f"{seconds:.1f} s ({everything:.1f} s with KV pools and buffers)"
    if not recorded:
        return (
            f"no graphs were captured on {device}: steps run over the same buffers "
            f"without; {len(found['captures'])} buckets ran once in {times}"
        )
    return f"{recorded} graphs on {device} in {times}, {found['nbytes'] / _MIB:.1f} MiB in one pool"
