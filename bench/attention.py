"""Latency of tree attention and prompt attention, per layer, in a stack of layers.

Correctness first: a case whose result is off prints its error and no time. A stack is one CUDA
graph of calls over distinct KV pools (too large together for the L2 cache) that share one slot
table and one plan; the figure is the median replay over the number of calls. Bytes are those of
the live keys and values, of q and of out; bandwidth is given relative to a copy measured in the
same process.

    python bench/attention.py [--quick] [--only NAME] [--tiles] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from specattn.kernels.extend_attention import extend_attention
from specattn.kernels.tile_config import TileConfig
from specattn.kernels.tree_attention import TreeAttention

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results"
DTYPE = torch.bfloat16
MB = 2**20
# pools of a stack hold at least this much together
CYCLED = 384 * MB
LIMIT = 8e-3


@dataclass(frozen=True)
class Case:
    """A batch of one mode; ``lengths`` are prefixes, the tail not counted."""

    name: str
    lengths: tuple[int, ...]
    q_len: int
    tail_len: int = 0
    mode: str = "tree"
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    window_left: int = -1
    quick: bool = False

    @property
    def tail(self) -> int:
        return self.tail_len or self.q_len


def _ragged(count: int, low: int, high: int) -> tuple[int, ...]:
    rng = random.Random(0)
    return tuple(rng.randrange(low, high) for _ in range(count))


K = 1024
CASES = [
    Case("1 x 100 T8", (100,), 8, quick=True),
    Case("1 x 1k T8", (K,), 8),
    Case("1 x 4k T8", (4 * K,), 8, quick=True),
    Case("1 x 32k T16", (32 * K,), 16, quick=True),
    Case("1 x 128k T8", (128 * K,), 8),
    Case("8 x 1k T8", (K,) * 8, 8),
    Case("8 x 8k T16", (8 * K,) * 8, 16, quick=True),
    Case("8 x 32k T16", (32 * K,) * 8, 16),
    Case("32 x 4k T8", (4 * K,) * 32, 8, quick=True),
    Case("32 x 16k T8", (16 * K,) * 32, 8),
    Case("ragged 1 x 64k + 31 x 2k T8", (64 * K,) + (2 * K,) * 31, 8, quick=True),
    Case("ragged 32 x 0.8k..8k T8", _ragged(32, 800, 8 * K), 8),
    Case("64 x 1k T8", (K,) * 64, 8),
    Case("128 x 512 T4", (512,) * 128, 4, quick=True),
    Case("256 x 512 T4", (512,) * 256, 4),
    Case("8 x 8k T32", (8 * K,) * 8, 32),
    Case("8 x 8k T64", (8 * K,) * 8, 64, quick=True),
    Case("1 x 32k T64", (32 * K,), 64),
    Case("8 x 8k T100 (2 words)", (8 * K,) * 8, 100),
    Case("draft 1 x 8k topk 8 step 2", (8 * K,), 8, 24, "draft"),
    Case("draft 8 x 8k topk 8 step 2", (8 * K,) * 8, 8, 24, "draft", quick=True),
    Case("draft 8 x 8k topk 8 step 9", (8 * K,) * 8, 8, 80, "draft"),
    Case("chain 1 x 8k T8", (8 * K,), 8, mode="chain"),
    Case("chain 8 x 8k T8", (8 * K,) * 8, 8, mode="chain"),
    Case("decode 1 x 8k", (8 * K,), 1, mode="chain"),
    Case("decode 32 x 4k", (4 * K,) * 32, 1, mode="chain"),
    Case("hd64 16 x 8k T8", (8 * K,) * 16, 8, head_dim=64, quick=True),
    Case("hd256 16/4 16 x 4k T8", (4 * K,) * 16, 8, heads=(16, 4), head_dim=256, quick=True),
    Case("hd256 16/4 16 x 4k T2", (4 * K,) * 16, 2, heads=(16, 4), head_dim=256),
    Case("hd256 16/4 8 x 4k T64", (4 * K,) * 8, 64, heads=(16, 4), head_dim=256),
    Case("hd96 16 x 4k T8", (4 * K,) * 16, 8, head_dim=96),
    Case("TP8 8/1 8 x 32k T8", (32 * K,) * 8, 8, heads=(8, 1), quick=True),
    Case("64/8 8 x 8k T8", (8 * K,) * 8, 8, heads=(64, 8)),
    Case("MHA 32/32 8 x 4k T8", (4 * K,) * 8, 8, heads=(32, 32)),
    Case("window 1023 32 x 8k T8", (8 * K,) * 32, 8, window_left=1023),
]
# other tiles worth a try with --tiles, by packed rows
CANDIDATES = {
    16: [TileConfig(16, 64, ctas_per_sm=2), TileConfig(16, 32, ctas_per_sm=4),
         TileConfig(64, 64, max_regs=168)],
    64: [TileConfig(64, 64, max_regs=168), TileConfig(64, 64, max_regs=192), TileConfig(64, 64),
         TileConfig(64, 64, max_regs=168, short=4), TileConfig(64, 64, max_regs=168, short=1000),
         TileConfig(64, 64, ctas_per_sm=3, max_regs=168), TileConfig(64, 32, ctas_per_sm=2),
         TileConfig(64, 64, stages=2, ctas_per_sm=1), TileConfig(64, 32, ctas_per_sm=1),
         TileConfig(64, 64, warps=8, stages=2, ctas_per_sm=1), TileConfig(32, 32, ctas_per_sm=2)],
    10**9: [TileConfig(128, 64, warps=8, ctas_per_sm=1), TileConfig(64, 64, max_regs=168),
            TileConfig(128, 64, warps=8, stages=4, ctas_per_sm=1),
            TileConfig(128, 32, warps=8, ctas_per_sm=1)],
}


def words_of(case: Case, rng: random.Random) -> tuple[list[int], list[int]]:
    """Ancestor bits and depths of the tail's nodes; the query tokens are the last ones."""
    bits, depths = [], []
    for j in range(case.tail):
        if case.mode == "chain":
            parent = j - 1
        elif case.mode == "draft":
            parent = (j // case.q_len - 1) * case.q_len + rng.randrange(case.q_len)
            parent = parent if j >= case.q_len else -1
        else:
            parent = rng.randrange(max(0, j - 8), j) if j else -1
        bits.append(1 << j | (bits[parent] if parent >= 0 else 0))
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return bits, depths


class Batch:
    """The tensors of a case: one slot table and plan, many pools."""

    def __init__(self, case: Case, tile: TileConfig | None = None) -> None:
        rng = random.Random(1)
        self.case = case
        batch, tail, q_len = len(case.lengths), case.tail, case.q_len
        heads, kv_heads = case.heads
        total = sum(case.lengths) + batch * tail
        self.order = (torch.randperm(total, device="cuda") + 1).to(torch.int32)
        width = max(case.lengths) + tail
        self.table = torch.zeros(batch + 1, width, dtype=torch.int32, device="cuda")
        self.tails = torch.empty(batch, tail, dtype=torch.int32, device="cuda")
        at = 0
        for b, length in enumerate(case.lengths):
            own = self.order[at : at + length + tail]
            self.table[b + 1, : length + tail] = own
            self.tails[b] = own[length:]
            at += length + tail
        self.lens = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        self.rows = torch.arange(1, batch + 1, device="cuda")
        trees = [words_of(case, rng) for _ in range(batch)]
        self.bits = [bits[tail - q_len :] for bits, _ in trees]
        self.words = torch.tensor(
            [[[_signed(b >> 64 * w & 2**64 - 1) for w in range(-(-tail // 64))] for b in row]
             for row in self.bits], device="cuda",
        )
        depths = torch.tensor([d for _, d in trees], device="cuda")
        self.tail_positions = self.lens[:, None] + depths
        self.positions = self.tail_positions[:, tail - q_len :].contiguous()
        slot_bytes = kv_heads * case.head_dim * DTYPE.itemsize * 2
        live = sum(min(n, case.window_left) if case.window_left >= 0 else n for n in case.lengths)
        self.bytes = (live + batch * tail) * slot_bytes
        self.bytes += 2 * batch * q_len * heads * case.head_dim * DTYPE.itemsize
        pools = min(64, max(2, math.ceil(CYCLED / (live * slot_bytes))))
        self.pools = [
            torch.randn(2, total + 1, kv_heads, case.head_dim, dtype=DTYPE, device="cuda")
            for _ in range(pools)
        ]
        self.layers = max(pools, 8)
        self.q = torch.randn(batch * q_len, heads, case.head_dim, dtype=DTYPE, device="cuda")
        self.out = torch.full_like(self.q, math.nan)
        self.lse = torch.empty(batch * q_len, heads, device="cuda")
        self.kernel = TreeAttention(
            batch=batch, q_len=q_len, tail_len=tail, num_qo_heads=heads, num_kv_heads=kv_heads,
            head_dim=case.head_dim, v_head_dim=case.head_dim, dtype=DTYPE, device="cuda",
            sm_scale=case.head_dim**-0.5, window_left=case.window_left, tile=tile,
        )

    def plan(self) -> None:
        self.kernel.plan(self.lens, self.rows, self.table.stride(0))

    def run(self, pool: Tensor, lse: Tensor | None = None) -> None:
        self.kernel.run(
            self.q, pool[0], pool[1], self.out, lse, indices=self.table,
            positions=self.positions, tail_slots=self.tails,
            tail_positions=self.tail_positions, tail_words=self.words,
        )

    def check(self) -> float:
        """Largest relative error over a few requests, in float64."""
        self.plan()
        self.run(self.pools[-1], self.lse)
        batch = len(self.case.lengths)
        picks = {0, batch - 1, batch // 2, max(range(batch), key=self.case.lengths.__getitem__)}
        return max(self._error(b) for b in picks)

    def _error(self, b: int) -> float:
        case, n = self.case, self.case.lengths[b]
        slots = self.table[b + 1, : n + case.tail].long()
        group = case.heads[0] // case.heads[1]
        k, v = (self.pools[-1][i][slots].double() for i in (0, 1))
        q = self.q.view(len(case.lengths), case.q_len, case.heads[1], group, -1)[b].double()
        logits = torch.einsum("thgd,nhd->thgn", q, k) * case.head_dim**-0.5
        seen = torch.ones(case.q_len, n + case.tail, dtype=torch.bool, device="cuda")
        rows = [[bits >> j & 1 for j in range(case.tail)] for bits in self.bits[b]]
        seen[:, n:] = torch.tensor(rows, device="cuda").bool()
        if case.window_left >= 0:
            place = torch.cat([torch.arange(n, device="cuda"), self.tail_positions[b]])
            distance = self.positions[b][:, None] - place
            seen &= (distance >= 0) & (distance <= case.window_left)
        logits.masked_fill_(~seen[:, None, None], -math.inf)
        want = torch.einsum("thgn,nhd->thgd", logits.softmax(-1), v)
        got = self.out.view(len(case.lengths), *q.shape)[b].double()
        lse = self.lse.view(len(case.lengths), *q.shape[:3])[b]
        off = (lse - logits.logsumexp(-1)).abs().max().item()
        error = ((got - want).norm() / want.norm()).item()
        return error if off < 1e-3 else math.inf


def _signed(x: int) -> int:
    return x - 2**64 if x >> 63 else x


def time_graph(stack: Callable[[], None], replays: int) -> float:
    """Median microseconds of one replay of ``stack``."""
    stack()  # compiles, which a capture must not
    torch.cuda.synchronize()
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


def copy_bandwidth(replays: int) -> float:
    """Bytes per microsecond of a copying kernel, read and write counted."""
    source = torch.randn(256 * MB, device="cuda")
    target = torch.empty_like(source)
    # a graph's memcpy node is slower than a kernel that does the same
    took = time_graph(lambda: torch.mul(source, 1.0, out=target), replays)
    return 2 * source.nbytes / took


def bench_tree(case: Case, copy: float, replays: int, tile: TileConfig | None) -> dict[str, Any]:
    batch = Batch(case, tile)
    error = batch.check()
    if not error < LIMIT:
        raise ArithmeticError(f"relative error {error:.2e}")
    calls = [batch.pools[i % len(batch.pools)] for i in range(batch.layers)]

    def stack() -> None:
        for pool in calls:
            batch.run(pool)

    def plans() -> None:
        for _ in range(32):
            batch.plan()

    us = time_graph(stack, replays) / len(calls)
    flops = 4 * case.heads[0] * case.head_dim * case.q_len * sum(case.lengths)
    return {
        "case": case.name, "us": us, "floor_us": batch.bytes / copy,
        "of_copy": batch.bytes / copy / us, "tflops": flops / us / 1e6,
        "plan_us": time_graph(plans, replays) / 32, "error": error,
        "tile": asdict(batch.kernel.shape.tile), "chunks": batch.kernel.shape.max_chunks,
    }


# name, cached prefixes, new tokens each
PROMPTS = [
    ("1 x 4k", (0,), 4 * K), ("8 x 512 on 8k", (8 * K,) * 8, 512), ("16 x 64", (0,) * 16, 64),
]


def bench_prompt(
    name: str, prefixes: tuple[int, ...], new: int, replays: int, tile: TileConfig | None
) -> dict[str, Any]:
    heads, kv_heads, dim, batch = 32, 8, 128, len(prefixes)
    total = sum(prefixes) + batch * new
    order = (torch.randperm(total, device="cuda") + 1).to(torch.int32)
    table = torch.zeros(batch + 1, max(prefixes) + new, dtype=torch.int32, device="cuda")
    at = 0
    for b, prefix in enumerate(prefixes):
        table[b + 1, : prefix + new] = order[at : at + prefix + new]
        at += prefix + new
    pool = torch.randn(2, total + 1, kv_heads, dim, dtype=DTYPE, device="cuda")
    q = torch.randn(batch * new, heads, dim, dtype=DTYPE, device="cuda")
    out = torch.full_like(q, math.nan)
    arguments: dict[str, Any] = {
        "qo_indptr": torch.arange(batch + 1, dtype=torch.int32, device="cuda") * new,
        "seq_lens": torch.tensor(prefixes, dtype=torch.int32, device="cuda"),
        "req_pool_indices": torch.arange(1, batch + 1, device="cuda"), "req_to_token": table,
        "max_q_len": new, "sm_scale": dim**-0.5, "window_left": -1, "logit_cap": 0.0,
        "tile": tile,
    }
    extend_attention(q, pool[0], pool[1], out, None, **arguments)
    slots = table[batch].long()[: prefixes[-1] + new]
    k, v = (pool[i][slots].double().repeat_interleave(heads // kv_heads, 1) for i in (0, 1))
    rows = torch.arange(max(0, new - 64), new, device="cuda")
    logits = torch.einsum("thd,nhd->htn", q[-len(rows) :].double(), k) * dim**-0.5
    place = torch.arange(len(slots), device="cuda")
    logits.masked_fill_(place > (prefixes[-1] + rows)[:, None], -math.inf)
    want = torch.einsum("htn,nhd->thd", logits.softmax(-1), v)
    error = ((out[-len(rows) :] - want).norm() / want.norm()).item()
    if not error < LIMIT:
        raise ArithmeticError(f"relative error {error:.2e}")

    def stack() -> None:
        for _ in range(4):
            extend_attention(q, pool[0], pool[1], out, None, **arguments)

    us = time_graph(stack, replays) / 4
    pairs = sum(prefix * new + new * (new + 1) / 2 for prefix in prefixes)
    return {
        "case": f"prompt {name}", "us": us, "tflops": 4 * heads * dim * pairs / us / 1e6,
        "error": error,
    }


def report(run: Callable[[], dict[str, Any]], name: str) -> dict[str, Any]:
    """Run one case and print its line, or its exception."""
    try:
        record = run()
    except Exception as problem:
        traceback.print_exc()
        record = {"case": name, "failed": f"{type(problem).__name__}: {problem}"[:500]}
    if "failed" in record:
        print(f"{name:34} FAILED {record['failed'][:120]}", flush=True)
    else:
        share = f"{record['of_copy']:6.1%} of copy" if "of_copy" in record else " " * 14
        plan = f"plan {record['plan_us']:.2f}" if "plan_us" in record else ""
        print(f"{record['case']:34} {record['us']:9.2f} us  {share}  {record['tflops']:6.1f} TF  "
              f"error {record['error']:.1e}  {plan}", flush=True)
    torch.cuda.empty_cache()
    return record


def variants(case: Case) -> list[TileConfig]:
    rows = case.q_len * case.heads[0] // case.heads[1]
    return next(tiles for limit, tiles in CANDIDATES.items() if rows <= limit)


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "commit": commit.stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third of the cases, fewer replays")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--tiles", action="store_true", help="other tile shapes, too")
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.json")
    options = parser.parse_args()
    replays = 8 if options.quick else 20
    torch.manual_seed(0)
    copy = copy_bandwidth(replays)
    print(f"{machine()}  copy {copy / 1e6:.2f} TB/s", flush=True)
    records = []
    for case in CASES:
        if (options.quick and not case.quick) or options.only not in case.name:
            continue
        records.append(report(lambda c=case: bench_tree(c, copy, replays, None), case.name))
        for tile in variants(case) if options.tiles else []:
            label = (f"  {tile.block_m}x{tile.block_n} w{tile.warps} s{tile.stages} "
                     f"c{tile.ctas_per_sm} r{tile.max_regs} short{tile.short}")
            named = replace(case, name=label)
            record = report(lambda c=named, t=tile: bench_tree(c, copy, replays, t), label)
            records.append(record | {"of": case.name, "tile": asdict(tile)})
    for name, prefixes, new in PROMPTS:
        if options.only in f"prompt {name}":
            for tile in [None, TileConfig(128, 64, warps=8)] if options.tiles else [None]:
                records.append(report(
                    lambda a=(name, prefixes, new, replays, tile): bench_prompt(*a), name
                ))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(
        {"machine": machine(), "copy_tb_s": copy / 1e6, "records": records}, indent=1
    ))


if __name__ == "__main__":
    main()
