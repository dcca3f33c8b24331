"""Compile every Triton kernel ahead of time for several GPUs, none of which is needed.

The launchers run as they do on a GPU, on small CPU tensors; where they would launch, a cubin is
made for the target instead, by Triton and the ptxas it brings. What comes out says whether the
kernels compile, fit into shared memory, and spill; not whether they are right or fast there.

    python -m bench.compile_targets [--quick] [--targets 80,86] [--only NAME] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

from bench.suite.machine import machine
from specattn.kernels import (
    accept,
    add_parts,
    beam,
    block_table,
    choose,
    csr,
    draft_kv,
    glue,
    kv_move,
    kv_store,
    merge_lse,
    page_table,
    sampling,
    slot_write,
    step,
    tree,
)
from specattn.kernels.extend_attention import extend_attention
from specattn.kernels.fixed_attention import FixedAttention
from specattn.kernels.mla_attention import MlaAttention
from specattn.kernels.mla_extend import mla_extend
from specattn.kernels.tile_config import DeviceLimits
from specattn.kernels.tree_attention import TreeAttention
from specattn.kernels.tree_plan import fill_plans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KB = 1024
# multiprocessors, shared memory of a CTA: A100, A10 / RTX 30, L4 / RTX 40, H100 / H200, B200
LIMITS = {
    80: DeviceLimits(108, 163 * KB, 8), 86: DeviceLimits(84, 99 * KB, 8),
    89: DeviceLimits(128, 99 * KB, 8), 90: DeviceLimits(132, 227 * KB, 9),
    100: DeviceLimits(148, 227 * KB, 10),
}
BF16, F16, F32, I32, I64 = (
    torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
)
# e4m3, in cases whose name says so, and the first target that converts it
FLOAT8, FLOAT8_SINCE = torch.float8_e4m3fn, 89
BATCH, CONTEXT = 8, 1024


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of one variant of a kernel for one target."""

    target: int
    case: str
    kernel: str
    registers: int
    stack: int
    shared: int
    warps: int


class OfflineDriver:
    """Stands in for the CUDA driver: names the target, launches nothing."""

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        # compiled kernels are kept per device
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0


def _zeros(*shape: int, dtype: torch.dtype = I64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attend(
    q_len: int, tail: int, dtype: torch.dtype, *, heads: tuple[int, int] = (32, 8),
    dim: int = 128, window: int = -1, cap: float = 0.0, csr: bool = False, lse: bool = False,
    stored: torch.dtype | None = None,
) -> None:
    kernel = TreeAttention(
        batch=BATCH, q_len=q_len, tail_len=tail, num_qo_heads=heads[0], num_kv_heads=heads[1],
        head_dim=dim, v_head_dim=dim, dtype=dtype, device="cpu", sm_scale=dim**-0.5,
        window_left=window, logit_cap=cap, csr=csr, kv_dtype=stored,
    )
    cache = _zeros(2, heads[1], dim, dtype=stored or dtype)
    _launch(kernel, dtype, cache, cache.clone(), lse)


def plan_step() -> None:
    """Index lists, a window and a table of billions of slots beside a plain forward."""
    shape: dict[str, Any] = {
        "batch": BATCH, "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128,
        "dtype": BF16, "device": "cpu", "sm_scale": 0.1,
    }
    lists = TreeAttention(q_len=1, tail_len=0, csr=True, **shape)
    kernels = [
        TreeAttention(q_len=n, tail_len=n, window_left=99 if n == 4 else -1, **shape)
        for n in (4, 16, 64)
    ]
    rows = _zeros(BATCH, dtype=I32), _zeros(BATCH)
    fill_plans([
        lists.cut_csr(_zeros(BATCH + 1, dtype=I32)),
        *(kernel.cut(*rows, CONTEXT << 22 * (i == 2)) for i, kernel in enumerate(kernels)),
    ])


def attend_fixed(
    q_len: int, tail: int, dtype: torch.dtype, *, heads: tuple[int, int] = (32, 8),
    dim: int = 128, window: int = -1, cap: float = 0.0,
) -> None:
    kernel = FixedAttention(
        batch=BATCH, q_len=q_len, tail_len=tail, num_qo_heads=heads[0], num_kv_heads=heads[1],
        head_dim=dim, v_head_dim=dim, dtype=dtype, device="cpu", sm_scale=dim**-0.5,
        max_keys=CONTEXT, window_left=window, logit_cap=cap,
    )
    kernel._pdl = LIMITS[driver.active.target].major >= 9
    kernel.plan(_zeros(BATCH, dtype=I32), _zeros(BATCH), CONTEXT)
    table, positions = _zeros(2, CONTEXT, dtype=I32), _zeros(BATCH, q_len)
    kernel.trace(
        indices=table, positions=positions, tail_slots=_zeros(BATCH, tail, dtype=I32),
        tail_positions=_zeros(BATCH, tail), tail_words=_zeros(BATCH, q_len, -(-tail // 64)),
    )
    q = _zeros(BATCH * q_len, heads[0], dim, dtype=dtype)
    cache = _zeros(2, heads[1], dim, dtype=dtype)
    kernel.run(q, cache, cache.clone(), q.clone(), None, indices=table, positions=positions)


def attend_latent(q_len: int, tail: int, dtype: torch.dtype, *, heads: int = 16) -> None:
    kernel = MlaAttention(
        batch=BATCH, q_len=q_len, tail_len=tail, num_qo_heads=heads, head_dim=576,
        v_head_dim=512, dtype=dtype, device="cpu", sm_scale=0.1,
    )
    cache = _zeros(2, 1, 576, dtype=dtype)
    _launch(kernel, dtype, cache, cache[..., :512], lse=False)


def _launch(
    kernel: TreeAttention, dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, lse: bool
) -> None:
    # no programmatic launch from a CPU, but its instructions are part of what runs on a GPU
    kernel._pdl = LIMITS[driver.active.target].major >= 9
    if kernel.csr:
        kernel.plan_csr(_zeros(BATCH + 1, dtype=I32))
    else:
        kernel.plan(_zeros(BATCH, dtype=I32), _zeros(BATCH), CONTEXT)
    rows, heads, tail = BATCH * kernel.q_len, kernel.num_qo_heads, kernel.tail_len
    kernel.run(
        _zeros(rows, heads, kernel.head_dim, dtype=dtype), k_cache, v_cache,
        _zeros(rows, heads, kernel.v_head_dim, dtype=dtype),
        _zeros(rows, heads, dtype=F32) if lse else None,
        indices=_zeros(2, CONTEXT, dtype=I32), positions=_zeros(BATCH, kernel.q_len),
        tail_slots=_zeros(BATCH, tail, dtype=I32), tail_positions=_zeros(BATCH, tail),
        tail_words=_zeros(BATCH, kernel.q_len, kernel.words),
    )


def prompt(
    dtype: torch.dtype, *, dim: int = 128, window: int = -1, cap: float = 0.0, lse: bool = False,
    stored: torch.dtype | None = None,
) -> None:
    cache = _zeros(2, 8, dim, dtype=stored or dtype)
    q = _zeros(64, 32, dim, dtype=dtype)
    extend_attention(
        q, cache, cache.clone(), torch.zeros_like(q), _zeros(64, 32, dtype=F32) if lse else None,
        **_prompt_arguments(), window_left=window, logit_cap=cap,
    )


def prompt_latent(dtype: torch.dtype) -> None:
    cache = _zeros(2, 1, 576, dtype=dtype)
    q = _zeros(64, 16, 576, dtype=dtype)
    mla_extend(q, cache, cache[..., :512], q[..., :512].contiguous(), None, **_prompt_arguments())


def _prompt_arguments() -> dict[str, Any]:
    return {
        "qo_indptr": _zeros(BATCH + 1, dtype=I32), "seq_lens": _zeros(BATCH, dtype=I32),
        "req_pool_indices": _zeros(BATCH), "req_to_token": _zeros(2, CONTEXT, dtype=I32),
        "max_q_len": 16, "sm_scale": 0.1,
    }


def build_tree(topk: int = 8, steps: int = 7, nodes: int = 64) -> None:
    count = topk + (steps - 1) * topk**2
    tree.build_tree(
        _zeros(BATCH, count, dtype=F32), _zeros(BATCH, count),
        _zeros(BATCH, 1 + (steps - 1) * topk), _zeros(BATCH), _zeros(BATCH, dtype=I32),
        topk=topk, num_draft_tokens=nodes, tokens_out=_zeros(BATCH, nodes),
        positions_out=_zeros(BATCH, nodes), words_out=_zeros(BATCH, nodes, -(-nodes // 64)),
        next_token_out=_zeros(BATCH, nodes), next_sibling_out=_zeros(BATCH, nodes),
    )


def beams(topk: int = 8, steps: int = 7) -> None:
    count = topk + (steps - 1) * topk**2
    candidates = {
        "candidate_scores": _zeros(BATCH, count, dtype=F32),
        "candidate_tokens": _zeros(BATCH, count),
        "candidate_parents": _zeros(BATCH, 1 + (steps - 1) * topk),
    }
    children = (
        _zeros(BATCH, topk, topk, dtype=F32), _zeros(BATCH, topk, topk),
        _zeros(BATCH, topk, dtype=F32),
    )
    beam.append_candidates(steps - 1, *children, **candidates)
    beam.select_beams(
        1, *children, _zeros(BATCH, topk, 1), **candidates,
        scores_out=_zeros(BATCH, topk, dtype=F32), tokens_out=_zeros(BATCH, topk),
        beams_out=_zeros(BATCH, topk), words_out=_zeros(BATCH, topk, 1),
    )


def accepts(n: int = 64, steps: int = 7, vocab: int = 32000) -> None:
    tokens = _zeros(BATCH, n)
    coins = _zeros(BATCH, steps + 1, dtype=F32)
    out = {
        "accept_index_out": _zeros(BATCH, steps + 1, dtype=I32),
        "accept_tokens_out": _zeros(BATCH, steps + 1),
        "accept_lens_out": _zeros(BATCH, dtype=I32), "bonus_out": _zeros(BATCH),
    }
    accept.accept_greedy(tokens, tokens, tokens, tokens, **out)
    probs = torch.zeros(1, 1, vocab).expand(BATCH, n, vocab)
    accept.accept_sampled(tokens, tokens, tokens, probs, coins, coins, **out)
    accept.accept_rejection(tokens, probs[:, :steps], probs, coins, coins, **out)


def choices(dtype: torch.dtype = BF16, topk: int = 8, vocab: int = 32000) -> None:
    logits = _zeros(BATCH, vocab, dtype=dtype)
    choose.top_tokens(
        logits, topk, probs_out=_zeros(BATCH, topk, dtype=F32), ids_out=_zeros(BATCH, topk),
        target_ids=_zeros(vocab),
    )
    choose.argmax_tokens(logits)


def laws(dtype: torch.dtype = BF16, vocab: int = 32000) -> None:
    logits, values = _zeros(BATCH, vocab, dtype=dtype), _zeros(BATCH, dtype=F32)
    sampling.target_probs(logits, values, values.int(), values, 1)
    sampling.path_coins(_zeros(BATCH), values.int(), 4, 2)
    sampling.draw_tokens(logits.float(), values)


def kv_operations(dtype: torch.dtype = BF16, stored: torch.dtype | None = None) -> None:
    pool = _zeros(2, 16, 8, 128, dtype=stored or dtype)
    slots = _zeros(BATCH, 8, dtype=I32)
    kv_move.commit_kv(pool, pool.clone(), slots, slots)
    new = _zeros(BATCH * 8, 8, 128, dtype=dtype)
    kv_store.store_kv(new, new, pool[0], pool[1], slots)
    slot_write.write_slots(
        slots.view(-1), slots, slots[0], pieces=2, longest=9, page_size=16
    )
    parts, logs = _zeros(BATCH, 8, 32, 128, dtype=dtype), _zeros(BATCH, 8, 32, dtype=F32)
    merge_lse.merge_lse(parts, logs, slots[:, 0], parts, logs, slots, parts, logs)


def glue_kernels(dtype: torch.dtype = BF16, split: int = 5) -> None:
    parts, x = _zeros(split, BATCH, 6144, dtype=F32), _zeros(BATCH, 4096, dtype=dtype)
    ids, positions = _zeros(BATCH), _zeros(BATCH)
    pdl = LIMITS[driver.active.target].major >= 9
    options = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    with (
        mock.patch.object(glue, "_launch_options", return_value=options),
        mock.patch.object(add_parts, "_launch_options", return_value=options),
    ):
        glue.add_rms_norm(parts[..., :4096], x, x[0], 1e-5, rows=ids)
        glue.embed_rms_norm(ids, x, x[0], 1e-5)
        glue.embed_norm_pair(ids, x, x, x[0], x[0], 1e-5)
        glue.silu_mul(parts, dtype)
        add_parts.add_parts(parts, dtype)
        q, cache = _zeros(BATCH, 32, 128, dtype=dtype), _zeros(2, 16, 8, 128, dtype=dtype)
        glue.rotate_store(
            parts, positions, _zeros(9, 128, dtype=F32), (x[0, :128], x[0, :128]), 1e-5, q,
            cache[0], cache[1], _zeros(2, 4, dtype=I32),
        )


def index_lists(topk: int = 8, steps: int = 7) -> None:
    table, rows, lens = _zeros(2, CONTEXT, dtype=I32), _zeros(BATCH), _zeros(BATCH, dtype=I32)
    branches, words = _zeros(BATCH, steps, topk, dtype=I32), _zeros(BATCH, steps, topk, 1)
    indptr = _zeros(steps, BATCH * topk + 1, dtype=I32)
    width = draft_kv.draft_kv_width(BATCH, topk, steps, CONTEXT)
    indices = _zeros(steps, width, dtype=I32)
    draft_kv.fill_draft_kv(table, rows, lens, branches, words, indptr, indices)
    draft_kv.fill_draft_tails(1, lens, branches, words, indptr, indices)
    tails, words = _zeros(BATCH, 64, dtype=I32), _zeros(BATCH, 64, 1)
    lists = _zeros(BATCH + 1, dtype=I32)
    for window in (-1, 100):
        csr.fill_lists(table, rows, lens, words[..., 0], tails, lists, indices[0], window)
        csr.pack_masks(
            lists, lists, lens, words[..., 0], words[..., 0], words,
            _zeros(BATCH, dtype=torch.uint8), window,
        )
        page_table.fill_page_table(
            table, rows, lens, tails, _zeros(BATCH, CONTEXT + 64, dtype=I32), lens, q_len=64,
            window_left=window,
        )
    page_table.fill_ancestor_table(
        tails, words, _zeros(BATCH * 64, 64, dtype=I32), _zeros(BATCH * 64, dtype=I32)
    )
    block_table.fill_block_table(
        table, rows, lens, tails, _zeros(BATCH, 32, dtype=I32), lens, page_size=64
    )


def step_ends(topk: int = 4, depth: int = 6, dtype: torch.dtype = BF16) -> None:
    rows, lens, tokens = _zeros(BATCH), _zeros(BATCH, dtype=I32), _zeros(BATCH, depth)
    state = (_zeros(BATCH), _zeros(BATCH, topk, dtype=F32), _zeros(BATCH, 4096, dtype=dtype),
             _zeros(BATCH, 32000, dtype=F32))
    step.begin_step(
        rows, lens, lens, _zeros(BATCH, CONTEXT, dtype=I32), reserve_len=16, rows_out=rows,
        seq_lens_out=lens, window_out=_zeros(BATCH, 16, dtype=I32), positions_out=tokens,
        draft_positions_out=_zeros(BATCH, depth - 2, topk), tables=state, outs=state,
    )
    step.end_step(
        rows, lens, lens, tokens, seq_lens_table=lens, sources=state, tables=state,
        packed_out=_zeros(BATCH, 1 + depth),
    )
    step.gather_path(
        _zeros(BATCH, 16, 12288, dtype=dtype), tokens.int(), lens, lens,
        features_out=_zeros(BATCH, depth, 12288, dtype=dtype), last_rows_out=rows, after_out=rows,
    )


# the first ones are the quick set: each kernel, and each class of tiles in one dtype
QUICK: dict[str, Callable[[], None]] = {
    "64 rows, window, cap, lse, f16": partial(attend, 8, 8, F16, window=99, cap=30.0, lse=True),
    "256 rows, bf16": partial(attend, 64, 64, BF16),
    "16 rows, index lists, bf16": partial(attend, 1, 0, BF16, csr=True),
    "plans of a step": plan_step,
    "deterministic, 64 rows, bf16": partial(attend_fixed, 8, 8, BF16),
    "prompt, bf16": partial(prompt, BF16),
    "64 rows, float8 keys, bf16": partial(attend, 8, 8, BF16, stored=FLOAT8),
    "latent, 64 rows, bf16": partial(attend_latent, 4, 4, BF16),
    "latent prompt, bf16": partial(prompt_latent, BF16),
    "tree": build_tree, "beams": beams, "accept": accepts, "choose": choices, "kv": kv_operations,
    "glue": glue_kernels,
    "lists": index_lists, "step": step_ends, "laws": laws,
}
CASES = QUICK | {
    "16 rows, bf16": partial(attend, 4, 4, BF16),
    "64 rows, bf16": partial(attend, 8, 8, BF16),
    "400 rows, 2 words, bf16": partial(attend, 100, 100, BF16),
    "draft step 9, topk 8, bf16": partial(attend, 8, 80, BF16),
    "256 rows, window, lse, f16": partial(attend, 64, 64, F16, window=99, lse=True),
    "64 rows, head 64, bf16": partial(attend, 8, 8, BF16, dim=64),
    "64 rows, head 96, bf16": partial(attend, 8, 8, BF16, dim=96),
    "32 rows, head 256, bf16": partial(attend, 8, 8, BF16, dim=256, heads=(16, 4)),
    "256 rows, head 256, bf16": partial(attend, 64, 64, BF16, dim=256, heads=(16, 4)),
    "32 rows, f32": partial(attend, 8, 8, F32),
    "256 rows, head 256, window, cap, lse, f32": partial(
        attend, 64, 64, F32, dim=256, heads=(16, 4), window=99, cap=30.0, lse=True
    ),
    "deterministic, 4 rows, bf16": partial(attend_fixed, 1, 1, BF16),
    "deterministic, 256 rows, window, cap, f16": partial(
        attend_fixed, 64, 64, F16, window=99, cap=30.0
    ),
    "deterministic, 32 rows, head 256, bf16": partial(
        attend_fixed, 8, 8, BF16, dim=256, heads=(16, 4)
    ),
    "deterministic, 32 rows, f32": partial(attend_fixed, 8, 8, F32),
    "prompt, window, cap, lse, f16": partial(prompt, F16, window=99, cap=30.0, lse=True),
    "prompt, head 256, bf16": partial(prompt, BF16, dim=256),
    "prompt, f32": partial(prompt, F32),
    "16 rows, index lists, float8 keys, bf16": partial(attend, 1, 0, BF16, csr=True, stored=FLOAT8),
    "64 rows, window, cap, lse, float8 keys, f16": partial(
        attend, 8, 8, F16, window=99, cap=30.0, lse=True, stored=FLOAT8
    ),
    "256 rows, float8 keys, bf16": partial(attend, 64, 64, BF16, stored=FLOAT8),
    "64 rows, head 64, float8 keys, bf16": partial(attend, 8, 8, BF16, dim=64, stored=FLOAT8),
    "32 rows, head 256, float8 keys, bf16": partial(
        attend, 8, 8, BF16, dim=256, heads=(16, 4), stored=FLOAT8
    ),
    "256 rows, head 256, float8 keys, bf16": partial(
        attend, 64, 64, BF16, dim=256, heads=(16, 4), stored=FLOAT8
    ),
    "prompt, float8 keys, bf16": partial(prompt, BF16, stored=FLOAT8),
    "prompt, head 256, float8 keys, bf16": partial(prompt, BF16, dim=256, stored=FLOAT8),
    "kv, float8": partial(kv_operations, stored=FLOAT8),
    "latent, 16 rows, bf16": partial(attend_latent, 1, 1, BF16),
    "latent, 32 rows, f16": partial(attend_latent, 2, 2, F16),
    "latent, 512 rows, bf16": partial(attend_latent, 4, 4, BF16, heads=128),
    "latent, 16 rows, f32": partial(attend_latent, 1, 1, F32),
    "latent prompt, f32": partial(prompt_latent, F32),
    "tree, 4 x 5, 16 nodes": partial(build_tree, 4, 5, 16),
    "laws, f32": partial(laws, F32, 151936),
    "choose 64, f32": partial(choices, F32, 64, 151936),
    "kv, f32": partial(kv_operations, F32),
}


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack, which is where spills go, of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def compile_case(target: int, name: str) -> Iterator[Compiled]:
    """Run one case's launchers for ``target``; yield each kernel they launch, once."""
    if "float8" in name and target < FLOAT8_SINCE:
        return
    made: dict[str, Compiled] = {}

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            binary = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            registers, stack = resources(binary.asm["cubin"])
            made.setdefault(binary.hash, Compiled(
                target, name, kernel.fn.__name__, registers, stack, binary.metadata.shared,
                binary.metadata.num_warps,
            ))
        return run

    driver.set_active(OfflineDriver(target))
    limits = mock.patch.object(DeviceLimits, "of", return_value=LIMITS[target])
    with limits, mock.patch.object(KernelInterface, "__getitem__", launch):
        CASES[name]()
    yield from made.values()


def table(records: list[Compiled]) -> str:
    """One line per kernel and case: registers, spills and shared memory for every target."""
    targets = sorted({record.target for record in records})
    lines = [
        "| kernel | case | " + " | ".join(f"SM{target}" for target in targets) + " |",
        "|---" * (2 + len(targets)) + "|",
    ]
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for r in records:
        spill = f" +{r.stack}" if r.stack else ""
        text = f"{r.registers}{spill}, {r.shared / KB:.0f} KB"
        cells.setdefault((r.kernel.strip("_").removesuffix("_kernel"), r.case), {})[r.target] = text
    for (kernel, case), row in cells.items():
        lines.append(f"| {kernel} | {case} | " + " | ".join(row.get(t, "") for t in targets) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each kernel and tile class once")
    parser.add_argument("--targets", default=",".join(map(str, LIMITS)))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write the records there, as JSON")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    names = [name for name in (QUICK if options.quick else CASES) if options.only in name]
    targets = [int(target) for target in options.targets.split(",")]
    records = [r for target in targets for name in names for r in compile_case(target, name)]
    print(table(records))
    if options.out:
        versions = {"triton": triton.__version__, "kernels": machine()["kernels"]}
        lines = ",\n  ".join(json.dumps(asdict(record)) for record in records)
        options.out.write_text(
            f'{{"versions": {json.dumps(versions)},\n "records": [\n  {lines}\n]}}\n'
        )


if __name__ == "__main__":
    main()
