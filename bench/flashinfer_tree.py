"""How FlashInfer should attend trees: one masked pass, two passes merged by lse, or index lists.

Microseconds per layer of one draft step (or verify), in one CUDA graph of calls over distinct KV
pools that together exceed the L2 cache, after a check against float64. What a recorded step does
per layer is inside: packing the mask, both passes, the merge. ``host`` is `schedule`, milliseconds.
Where "two" beats "mask" from some context on, that context is
`FlashInferBackend.two_passes_from`.

    python -m bench.flashinfer_tree [--only TEXT] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.backends import load_backend
from specattn.backends.flashinfer import FlashInferBackend
from specattn.batch import Phase, RowLayout
from specattn.config import AttnConfig
from specattn.plan import AttnPlan, CsrPlan, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.backends.base import BackendFactory

DTYPE, LIMIT, CYCLED = torch.bfloat16, 8e-3, 256 << 20
HEADS, KV_HEADS, DIM = 32, 8, 128


class OnePass(FlashInferBackend):
    two_passes_from = None


class TwoPasses(FlashInferBackend):
    two_passes_from = 0


@dataclass(frozen=True)
class Case:
    """``nodes`` query tokens per request, the last of a tail of ``tail`` keys."""

    batch: int
    length: int
    nodes: int
    tail: int

    @property
    def name(self) -> str:
        kind = f"topk {self.nodes} step {self.tail // self.nodes - 1}"
        kind = kind if self.tail > self.nodes else f"tree of {self.nodes}"
        return f"{self.batch} x {self.length}, {kind}"


CASES = [
    Case(batch, length, nodes, tail)
    for (nodes, tail), batch, length in itertools.product(
        ((4, 12), (8, 24), (16, 16)), (1, 8, 32), (128, 512, 1024, 2048, 4096, 8192, 32768)
    )
    if batch * length <= 1 << 18
]


class Batch:
    """The tensors of a case: one slot table, many pools."""

    def __init__(self, case: Case) -> None:
        self.case, batch, row = case, case.batch, case.length + case.tail
        slots = (torch.randperm(batch * row, device="cuda") + 1).int().view(batch, row)
        self.table = torch.cat([torch.zeros_like(slots[:1]), slots])
        # a draft: step-major, every branch of a step extends one of the step before; a tree of
        # siblings costs what any tree does
        step = torch.arange(case.tail) // case.nodes
        self.seen = torch.zeros(case.tail, case.tail, dtype=torch.bool)
        for node in range(case.tail):
            if node >= case.nodes:
                parent = node - case.nodes - int(torch.randint(node % case.nodes + 1, ()))
                self.seen[node] = self.seen[parent]
            self.seen[node, node] = True
        self.seen = self.seen[case.tail - case.nodes :]
        words = (self.seen.long() << torch.arange(case.tail)).sum(1)
        self.lens = torch.full((batch,), case.length, dtype=torch.int32, device="cuda")
        depth = (case.length + step).to("cuda").expand(batch, -1)
        self.layout = RowLayout(case.nodes, case.tail, Phase.DRAFT)
        self.tail_slots = slots[:, case.length :].contiguous()
        self.plan = AttnPlan(
            self.layout,
            self.table,
            torch.arange(1, batch + 1, device="cuda"),
            self.lens,
            depth[:, case.tail - case.nodes :].contiguous(),
            self.tail_slots,
            depth.contiguous(),
            words.to("cuda")[None, :, None].expand(batch, -1, -1).contiguous(),
        )
        size = 2 * batch * row * KV_HEADS * DIM * DTYPE.itemsize
        count = min(32, max(2, math.ceil(CYCLED / size)))
        self.pools = [
            torch.randn(2, batch * row + 1, KV_HEADS, DIM, dtype=DTYPE, device="cuda")
            for _ in range(count)
        ]
        self.q = torch.randn(batch * case.nodes, HEADS, DIM, dtype=DTYPE, device="cuda")
        self.out = torch.empty_like(self.q)

    def lists(self) -> CsrPlan:
        """Return the same step as a list per branch."""
        case, seen = self.case, self.seen.to("cuda")
        rows = [
            torch.cat([self.table[b + 1, : case.length], self.tail_slots[b][seen[i]]])
            for b in range(case.batch)
            for i in range(case.nodes)
        ]
        lens = torch.tensor([0, *map(len, rows)], device="cuda")
        return CsrPlan(
            self.layout,
            lens.cumsum(0).int(),
            torch.cat(rows),
            self.tail_slots[:, case.tail - case.nodes :],
        )

    def error(self) -> float:
        """Relative error of the last request in float64, on the last pool."""
        case, n = self.case, self.case.length
        keys, values = (
            self.pools[-1][i][self.table[-1].long()]
            .double()
            .repeat_interleave(HEADS // KV_HEADS, 1)
            for i in (0, 1)
        )
        q, out = (t[-case.nodes :].double() for t in (self.q, self.out))
        logits = torch.einsum("thd,nhd->htn", q, keys) * DIM**-0.5
        logits[:, :, n:].masked_fill_(~self.seen.to("cuda"), -math.inf)
        want = torch.einsum("htn,nhd->thd", logits.softmax(-1), values)
        return float((out - want).norm() / want.norm())


def time_graph(stack: Callable[[], None], replays: int = 15) -> float:
    """Median microseconds of one replay of ``stack``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stack()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stack()
    times = []
    for _ in range(3 + replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def measure(batch: Batch, factory: BackendFactory, plan: Plan) -> dict[str, float]:
    """Check, then time."""
    config = AttnConfig(HEADS, KV_HEADS, DIM, dtype=DTYPE)
    bound = factory(config, torch.device("cuda")).bind(plan)
    on_host = batch.lens.cpu()
    bound.schedule(on_host)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        bound.schedule(on_host)
    host = (time.perf_counter() - began) / 5 * 1e3
    bound.fill()

    def run(pool: Tensor) -> None:
        bound.run(batch.q, pool[0], pool[1], batch.out)

    batch.out.fill_(math.nan)
    run(batch.pools[-1])
    if not (error := batch.error()) < LIMIT:
        raise ArithmeticError(f"relative error {error:.2e}")
    calls = batch.pools * max(1, 8 // len(batch.pools))

    def stack() -> None:
        for pool in calls:
            run(pool)

    return {"us": time_graph(stack) / len(calls), "host_ms": host, "error": error}


def bench(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    batch = Batch(case)
    kinds: dict[str, Callable[[], dict[str, float]]] = {
        "mask": lambda: measure(batch, OnePass, batch.plan),
        "two": lambda: measure(batch, TwoPasses, batch.plan),
        "lists": lambda: measure(batch, OnePass, batch.lists()),
        "triton": lambda: measure(batch, load_backend("triton"), batch.plan),
    }
    found: dict[str, Any] = {"case": case.name}
    for name, run in kinds.items():
        try:
            found[name] = run()
        except Exception as problem:
            found[name] = {"failed": f"{type(problem).__name__}: {problem}"[:300]}
    return found


def line(found: dict[str, Any]) -> str:
    cells = [
        f"{name} {r['us']:8.1f} us (host {r['host_ms']:.2f})"
        if "us" in r
        else f"{name} FAILED {r['failed'][:90]}"
        for name, r in found.items()
        if name != "case"
    ]
    return f"{found['case']:28} " + "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    records = []
    for case in CASES:
        if options.only in case.name:
            records.append(bench(case))
            print(line(records[-1]), flush=True)
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(
            json.dumps(
                {
                    "device": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "records": records,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
