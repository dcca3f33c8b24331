"""Run every kernel under compute-sanitizer: out-of-bounds, races in shared memory, stray reads.

Without arguments: the driver. It runs each group plainly, then under each tool, and writes what
the tools said to ``bench/results/sanitizer_h200.json``. Explanations of reports are written into
that file by hand, and kept by later runs. Tensors are allocated one by one and exactly as large
as they need to be, so that a neighbour does not hide an access past the end; slots of the pools
that nobody uses hold NaN, and every result is checked to be finite.

    python -m bench.sanitize [--tools memcheck,racecheck,initcheck] [--groups tree,latent,...]
    compute-sanitizer --tool memcheck python -m bench.sanitize --run tree
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.sanitize_step import BF16, DEVICE, F8, F16, F32, MODELS, STEP, finite

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results"
TOOLS = ("memcheck", "racecheck", "initcheck")
# a group is killed after this; on an H200 none took more than 30
SECONDS = 300


class World:
    """A batch of trees over a pool of which every slot that nobody uses holds NaN."""

    def __init__(
        self, q_len: int, tail: int, *, lens: tuple[int, ...] = (0, 7, 130, 300), page: int = 1
    ) -> None:
        rng = random.Random(q_len)
        self.batch, self.q_len, self.tail, self.page = len(lens), q_len, tail, page
        pages = [-(-(n + tail) // page) for n in lens]
        order = rng.sample(range(1, sum(pages) + 3), sum(pages))
        self.slots = (sum(pages) + 3) * page
        self.width = max(pages) * page
        table = torch.zeros(self.batch + 1, self.width, dtype=torch.int32)
        tails = torch.zeros(self.batch, tail, dtype=torch.int32)
        self.used = torch.zeros(self.slots, dtype=torch.bool)
        at = 0
        for b, n in enumerate(lens):
            firsts = torch.tensor(order[at : at + pages[b]]) * page
            own = (firsts[:, None] + torch.arange(page)).flatten()
            at += pages[b]
            table[b + 1, : len(own)] = own
            tails[b] = own[n : n + tail]
            self.used[own] = True
        parent = [rng.randrange(max(0, j - 4), j) if j else -1 for j in range(tail)]
        seen = torch.eye(tail, dtype=torch.bool)
        depth = [0] * tail
        for j in range(1, tail):
            seen[j] |= seen[parent[j]]
            depth[j] = depth[parent[j]] + 1
        words = torch.zeros(tail, -(-tail // 64), dtype=torch.int64)
        for j in range(tail):
            for k in seen[j].nonzero().flatten().tolist():
                words[j, k // 64] |= (1 << k % 64) - (2**64 if k % 64 == 63 else 0)
        self.lens = torch.tensor(lens, dtype=torch.int32).to(DEVICE)
        self.rows = torch.arange(1, self.batch + 1).to(DEVICE)
        self.table, self.tails = table.to(DEVICE), tails.to(DEVICE)
        # the last nodes are the query tokens
        self.words = words[-q_len:].expand(self.batch, -1, -1).contiguous().to(DEVICE)
        places = torch.tensor(lens)[:, None] + torch.tensor(depth)
        self.tail_positions = places.to(DEVICE)
        self.positions = places[:, -q_len:].contiguous().to(DEVICE)

    def pool(self, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        pool = torch.randn(self.slots, heads, dim)
        pool[~self.used] = float("nan")
        # float8 knows NaN, and no assignment through a mask
        return pool.to(dtype).to(DEVICE)


def attend(
    q_len: int, tail: int, dtype: torch.dtype, *, heads: tuple[int, int] = (8, 2), dim: int = 64,
    window: int = -1, cap: float = 0.0, page: int = 1, triton: bool = False,
    stored: torch.dtype | None = None,
) -> None:
    """Tree attention by the kernel of the table, or by the Triton kernel in any case."""
    from specattn.kernels.tile_config import tile_config
    from specattn.kernels.tree_attention import TreeAttention

    world = World(q_len, tail, page=page)
    rows = q_len * heads[0] // heads[1]
    tile = tile_config(rows, dim, dim, stored or dtype, world.batch) if triton else None
    kernel = TreeAttention(
        batch=world.batch, q_len=q_len, tail_len=tail, num_qo_heads=heads[0],
        num_kv_heads=heads[1], head_dim=dim, v_head_dim=dim, dtype=dtype, device=DEVICE,
        sm_scale=dim**-0.5, window_left=window, logit_cap=cap, page_size=page, tile=tile,
        kv_dtype=stored,
    )
    q = torch.randn(world.batch * q_len, heads[0], dim).to(dtype).to(DEVICE)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan")).to(DEVICE) if window >= 0 or triton else None
    k, v = (world.pool(heads[1], dim, stored or dtype) for _ in range(2))
    kernel.plan(world.lens, world.rows, world.width)
    kernel.run(
        q, k, v, out, lse, indices=world.table, positions=world.positions,
        tail_slots=world.tails, tail_positions=world.tail_positions, tail_words=world.words,
    )
    finite(out, lse)


def attend_lists(dtype: torch.dtype, *, triton: bool = False) -> None:
    from specattn.kernels.tile_config import tile_config
    from specattn.kernels.tree_attention import TreeAttention

    world = World(1, 1)
    tile = tile_config(4, 64, 64, dtype, world.batch) if triton else None
    kernel = TreeAttention(
        batch=world.batch, q_len=1, tail_len=0, num_qo_heads=8, num_kv_heads=2, head_dim=64,
        v_head_dim=64, dtype=dtype, device=DEVICE, sm_scale=0.1, csr=True, tile=tile,
    )
    lens = (world.lens + 1).tolist()
    lists = torch.cat([world.table[b + 1, :n] for b, n in enumerate(lens)])
    starts = [sum(lens[:b]) for b in range(len(lens) + 1)]
    indptr = torch.tensor(starts, dtype=torch.int32).to(DEVICE)
    q = torch.randn(world.batch, 8, 64).to(dtype).to(DEVICE)
    out = torch.full_like(q, float("nan"))
    k, v = (world.pool(2, 64, dtype) for _ in range(2))
    kernel.plan_csr(indptr)
    kernel.run(
        q, k, v, out, None, indices=lists, positions=None, tail_slots=None, tail_positions=None,
        tail_words=None,
    )
    finite(out)


def attend_fixed(q_len: int, tail: int, dtype: torch.dtype) -> None:
    from specattn.kernels.fixed_attention import FixedAttention

    world = World(q_len, tail)
    kernel = FixedAttention(
        batch=world.batch, q_len=q_len, tail_len=tail, num_qo_heads=8, num_kv_heads=2,
        head_dim=64, v_head_dim=64, dtype=dtype, device=DEVICE, sm_scale=0.1,
        max_keys=world.width, split_keys=128,
    )
    kernel.plan(world.lens, world.rows, world.width)
    kernel.trace(
        indices=world.table, positions=world.positions, tail_slots=world.tails,
        tail_positions=world.tail_positions, tail_words=world.words,
    )
    q = torch.randn(world.batch * q_len, 8, 64).to(dtype).to(DEVICE)
    out = torch.full_like(q, float("nan"))
    k, v = (world.pool(2, 64, dtype) for _ in range(2))
    kernel.run(q, k, v, out, None, indices=world.table, positions=world.positions)
    finite(out)


def attend_latent(
    q_len: int, tail: int, dtype: torch.dtype, heads: int = 16, *, triton: bool = False
) -> None:
    from specattn.kernels.mla_attention import MlaAttention, mla_tile_config

    world = World(q_len, tail, lens=(0, 7, 130))
    kernel = MlaAttention(
        batch=world.batch, q_len=q_len, tail_len=tail, num_qo_heads=heads, head_dim=576,
        v_head_dim=512, dtype=dtype, device=DEVICE, sm_scale=0.1,
        tile=mla_tile_config(q_len * heads, dtype) if triton else None,
    )
    q = torch.randn(world.batch * q_len, heads, 576).to(dtype).to(DEVICE)
    out = torch.full((*q.shape[:2], 512), float("nan"), dtype=dtype).to(DEVICE)
    cache = world.pool(1, 576, dtype)
    kernel.plan(world.lens, world.rows, world.width)
    kernel.run(
        q, cache, cache[..., :512], out, None, indices=world.table, positions=world.positions,
        tail_slots=world.tails, tail_positions=world.tail_positions, tail_words=world.words,
    )
    finite(out)


def prompt(
    dtype: torch.dtype, *, dim: int = 64, window: int = -1, cap: float = 0.0, page: int = 1,
    triton: bool = False,
) -> None:
    from specattn.kernels.extend_attention import extend_attention
    from specattn.kernels.tile_config import extend_tile_config

    world, q, arguments = _prompt(dtype, 8, dim, page)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan")).to(DEVICE)
    k, v = (world.pool(2, dim, dtype) for _ in range(2))
    tile = extend_tile_config(dim, dim, dtype) if triton else None
    extend_attention(
        q, k, v, out, lse, **arguments, window_left=window, logit_cap=cap, tile=tile
    )
    finite(out, lse)


def prompt_latent(dtype: torch.dtype) -> None:
    from specattn.kernels.mla_extend import mla_extend

    world, q, arguments = _prompt(dtype, 16, 576, 1)
    out = torch.full((*q.shape[:2], 512), float("nan"), dtype=dtype).to(DEVICE)
    cache = world.pool(1, 576, dtype)
    mla_extend(q, cache, cache[..., :512], out, None, **arguments)
    finite(out)


def _prompt(
    dtype: torch.dtype, heads: int, dim: int, page: int
) -> tuple[World, Tensor, dict[str, Any]]:
    """New tokens of 40, 1 and 17 over prefixes, in the tail's slots, which the table holds."""
    world = World(40, 40, lens=(0, 130, 65), page=page)
    new = (40, 1, 17)
    q = torch.randn(sum(new), heads, dim).to(dtype).to(DEVICE)
    starts = torch.tensor([sum(new[:b]) for b in range(len(new) + 1)], dtype=torch.int32)
    return world, q, {
        "qo_indptr": starts.to(DEVICE), "seq_lens": world.lens, "req_pool_indices": world.rows,
        "req_to_token": world.table, "max_q_len": max(new), "sm_scale": dim**-0.5,
    }


def small() -> None:
    """The operations of `bench.small_ops_cases`, on two trees."""
    from bench.small_ops_cases import GROUPS as OPERATIONS
    from bench.small_ops_step import Step

    for topk, steps, nodes in ((3, 3, 7), (8, 7, 64)):
        step = Step(3, topk, steps, nodes, DEVICE, context=90, vocab=1201, layers=2)
        for group in OPERATIONS:
            for op in group(step):
                op.run(import_module(f"specattn.kernels.{op.module}"), op.sets - 1)


def pool_dtypes() -> None:
    """Stores and moves of elements of every size, at widths that are no power of two."""
    from specattn.kernels.kv_move import commit_kv
    from specattn.kernels.kv_store import store_kv
    from specattn.kernels.merge_lse import merge_lse
    from specattn.kernels.slot_write import write_slots

    slots = torch.tensor([[5, 2, 7], [1, 4, 8]], dtype=torch.int32).to(DEVICE)
    path = torch.tensor([[0, 2, -1], [0, 1, 2]], dtype=torch.int32).to(DEVICE)
    for dtype in (F32, F16, BF16, F8):
        pools = [torch.zeros(2, 9, 3, 40).to(dtype).to(DEVICE) for _ in range(2)]
        new = torch.randn(6, 3, 40).to(BF16 if dtype == F8 else dtype).to(DEVICE)
        store_kv(new, new, pools[0][0], pools[1][0], slots)
        commit_kv(*pools, slots, path)
        finite(*pools)
    table = torch.zeros(3, 1500, dtype=torch.int32).to(DEVICE)
    pieces = [[2, 1], [0, 1496], [1030, 4], [10, 20], [1030, 1500], *[[p, p + 1] for p in range(9)]]
    packed = torch.tensor(pieces, dtype=torch.int32).view(-1).to(DEVICE)
    write_slots(packed, table, table[0], pieces=2, longest=1030, page_size=128)
    parts = [torch.randn(2, 3, 5, 40).to(DEVICE) for _ in range(2)]
    logs = [torch.randn(2, 3, 5).to(DEVICE) for _ in range(2)]
    keys = slots[:, 0].contiguous()
    merge_lse(parts[0], logs[0], keys, parts[1], logs[1], slots, parts[0], logs[0])
    finite(parts[0], logs[0])


# by kernel, then by what the tile tables and the compiler make differ
GROUPS: dict[str, dict[str, Callable[[], None]]] = {
    "tree": {
        "16 rows, bf16": partial(attend, 4, 4, BF16),
        "64 rows, page 16, f16": partial(attend, 8, 8, F16, page=16),
        "64 rows, window, cap, f16": partial(attend, 8, 24, F16, window=20, cap=9.0),
        "256 rows, page 64, bf16": partial(attend, 64, 64, BF16, page=64, dim=128),
        "280 rows, 2 words, bf16": partial(attend, 70, 70, BF16, dim=128),
        "head 256, bf16": partial(attend, 8, 8, BF16, dim=256),
        "lists, bf16": partial(attend_lists, BF16),
        "f8": partial(attend, 8, 8, BF16, stored=F8),
    },
    "triton": {
        "16 rows, bf16": partial(attend, 4, 4, BF16, triton=True),
        "64 rows, window, cap, f16": partial(attend, 8, 24, F16, window=20, cap=9.0, triton=True),
        "256 rows, bf16": partial(attend, 64, 64, BF16, dim=128, triton=True),
        "head 96, bf16": partial(attend, 8, 8, BF16, dim=96, triton=True),
        "f32": partial(attend, 8, 8, F32, window=20),
        "lists, f16": partial(attend_lists, F16, triton=True),
        "fixed, bf16": partial(attend_fixed, 8, 8, BF16),
    },
    "prompt": {
        "bf16": partial(prompt, BF16, dim=128),
        "window, cap, f16": partial(prompt, F16, window=20, cap=9.0),
        "page 16, bf16": partial(prompt, BF16, page=16),
        "triton, bf16": partial(prompt, BF16, triton=True),
        "f32": partial(prompt, F32),
    },
    "latent": {
        "16 rows, bf16": partial(attend_latent, 1, 1, BF16),
        "64 rows, f16": partial(attend_latent, 4, 4, F16),
        "512 rows, bf16": partial(attend_latent, 4, 4, BF16, heads=128),
        "f32": partial(attend_latent, 1, 1, F32),
        "triton, 16 rows, bf16": partial(attend_latent, 1, 1, BF16, triton=True),
        "triton, 64 rows, f16": partial(attend_latent, 4, 4, F16, triton=True),
        "prompt, bf16": partial(prompt_latent, BF16),
    },
    "small": {"operations": small, "dtypes": pool_dtypes},
    "step": STEP,
    "models": MODELS,
}


def run(group: str) -> None:
    """Run a group in this process."""
    torch.manual_seed(0)
    for name, call in GROUPS[group].items():
        call()
        torch.cuda.synchronize()
        print(f"ran {group}: {name}", flush=True)


def parse(output: str) -> dict[str, Any]:
    """Numbers of a tool's summary, and its reports without addresses, each once."""
    found: dict[str, Any] = {"errors": None, "warnings": 0}
    if match := re.search(r"ERROR SUMMARY: (\d+) error", output):
        found["errors"] = int(match[1])
    if match := re.search(r"RACECHECK SUMMARY: .*?(\d+) error\w*, (\d+) warning", output):
        found["errors"], found["warnings"] = int(match[1]), int(match[2])
    lines = [line.removeprefix("=========").strip() for line in output.splitlines()
             if line.startswith("=========")]
    reports: dict[str, int] = {}
    for line, following in itertools.pairwise([*lines, ""]):
        if re.match(r"(Invalid|Uninitialized|Error|Warning|Potential|Race|Program hit)", line):
            text = re.sub(r"0x[0-9a-f]+", "0x…", f"{line} / {following}")
            reports[text] = reports.get(text, 0) + 1
    found["reports"] = [{"text": text, "times": times} for text, times in reports.items()][:20]
    return found


def sanitize(tool: str | None, group: str) -> dict[str, Any]:
    """Run a group in a process of its own, under ``tool``."""
    command = [sys.executable, "-m", "bench.sanitize", "--run", group]
    if tool:
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "50", *command]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS,
            env=environment, cwd=Path(__file__).parents[1],
        )
    except subprocess.TimeoutExpired as problem:
        out = problem.stdout or b""
        text = out if isinstance(out, str) else out.decode(errors="replace")
        code = None
    else:
        text, code = done.stdout + done.stderr, done.returncode
    return {
        "tool": tool or "none", "group": group, "returncode": code,
        "seconds": round(time.perf_counter() - begin, 1),
        "ran": re.findall(rf"ran {group}: (.*)", text), "cases": len(GROUPS[group]),
        **parse(text), "tail": text[-1500:] if code else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=GROUPS, help="run this group here, without the driver")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--out", type=Path, default=RESULTS / "sanitizer_h200.json")
    options = parser.parse_args()
    if options.run:
        run(options.run)
        return
    if not shutil.which("compute-sanitizer"):
        raise SystemExit("compute-sanitizer is not on the PATH")
    from bench.suite.machine import machine

    kept: dict[tuple[str, str], dict[str, Any]] = {}
    if options.out.exists():
        for record in json.loads(options.out.read_text())["runs"]:
            kept[record["tool"], record["group"]] = record
    version = subprocess.run(
        ["compute-sanitizer", "--version"], capture_output=True, text=True, check=False
    ).stdout.strip().splitlines()[-1:]
    for tool in (None, *options.tools.split(",")):
        for group in options.groups.split(","):
            record = sanitize(tool, group)
            before = kept.get((record["tool"], group), {})
            kept[record["tool"], group] = record | {"explanation": before.get("explanation", "")}
            print(f"{record['tool']:10} {group:8} {record['seconds']:6.1f} s  "
                  f"{len(record['ran'])} of {record['cases']} cases, {record['errors']} errors, "
                  f"{record['warnings']} warnings, exit {record['returncode']}", flush=True)
            for report in record["reports"][:5]:
                print(f"    {report['times']} x {report['text'][:150]}", flush=True)
            if record["tail"]:
                print(record["tail"], flush=True)
            options.out.write_text(json.dumps(
                {"machine": machine(), "compute_sanitizer": version, "runs": list(kept.values())},
                indent=1, ensure_ascii=False,
            ) + "\n")


if __name__ == "__main__":
    main()
