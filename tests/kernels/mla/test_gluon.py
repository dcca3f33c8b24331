"""The Gluon kernel of latent attention: the contract of `test_mla`, at the one size it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from specattn.kernels.attention.tiles import MergeTile
from specattn.kernels.mla.gluon import check_mla_gluon
from specattn.kernels.mla.tiles import GLUON, MERGE, mla_tile_config
from tests.kernels.attention.calls import attend, make_kernel
from tests.kernels.mla.test_mla import tree_case
from tests.oracle import check, oracle_tree

F16, BF16 = torch.float16, torch.bfloat16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="wgmma needs a Hopper GPU")
DEEPSEEK: dict[str, Any] = {"heads": 16, "rank": 512, "rope": 64, "dtype": BF16, "mode": "any"}

# prefix lengths, and what differs from 4 query tokens of 16 heads under random bits
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "decode": ((0, 1, 63, 64, 65, 3000), {"q_len": 1, "mode": "chain"}),
    "decode_f16": ((0, 1, 63, 64, 65, 3000), {"q_len": 1, "mode": "chain", "dtype": F16}),
    "one_request": ((5000,), {}),
    "one_tile": ((20,), {}),
    "empty_prefixes": ((0, 0, 0), {}),
    "tile_edges": ((59, 60, 61, 63, 64, 124, 128, 0), {}),
    "batch_33": (tuple((97 * i) % 700 for i in range(33)), {}),
    "tree_f16": ((1000, 1, 63), {"dtype": F16, "mode": "tree"}),
    "padded": ((1000, 65), {"pads": 3}),
    "pool_with_gaps": ((300, 65), {"pool_pad": 64}),
    "rows_256": ((700, 65, 0), {"q_len": 16, "mode": "tree"}),
    "heads_128": ((400, 65), {"q_len": 1, "heads": 128}),
    "heads_20": ((400, 65), {"q_len": 3, "heads": 20}),
    "two_words": ((200, 0, 20), {"q_len": 8, "tail_len": 100}),
    "four_words": ((130, 0, 1), {"q_len": 2, "tail_len": 250}),
    "sharp": ((200, 33), {"scale": 20.0}),
}
MERGES = {
    "default": MERGE,
    "whole_rows": MergeTile(rows=4, partials=8),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_the_oracle(name: str) -> None:
    lengths, options = CASES[name]
    case = tree_case(list(lengths), **(DEEPSEEK | options))
    expected = oracle_tree(case)
    # more CTAs than fit, too: other cuts
    for ctas, lse in ((1, True), (3, True), (1, False)):
        attend(make_kernel(case, tile=replace(GLUON, ctas_per_sm=ctas)), case, lse=lse)
        check(case, expected, lse=lse)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", MERGES)
def test_every_merge_matches_the_oracle(name: str) -> None:
    """Of over 100 partials, of few, and of none."""
    case = tree_case([9000, 0, 64, 65, 700], **DEEPSEEK)
    kernel = make_kernel(case, tile=GLUON)
    kernel.kernels.merge_tile = MERGES[name]
    kernel.workspace[0].fill_(torch.nan)
    attend(kernel, case)
    check(case, oracle_tree(case))


@pytest.mark.gpu
@hopper
def test_splits_of_several_tiles() -> None:
    case = tree_case([3000], **DEEPSEEK)
    attend(make_kernel(case, tile=replace(GLUON, min_tiles=4)), case)
    check(case, oracle_tree(case))


@pytest.mark.gpu
@hopper
def test_replays_are_bit_equal() -> None:
    case = tree_case([3000, 0, 64, 9000, 700] * 3, **DEEPSEEK)
    kernel = make_kernel(case, tile=GLUON)
    attend(kernel, case)
    first, sums = case.out.clone(), case.lse.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(kernel, case)
    for _ in range(50):
        case.clear()
        graph.replay()
        assert torch.equal(case.out, first)
        assert torch.equal(case.lse, sums)


@pytest.mark.gpu
@hopper
def test_unaligned_queries_take_the_triton_kernel() -> None:
    """Copies of 16 bytes cannot read them."""
    case = tree_case([300, 0, 64], **DEEPSEEK)
    wide = torch.zeros(*case.q.shape[:2], 580, dtype=BF16, device="cuda")
    wide[..., 1:577] = case.q
    case = replace(case, q=wide[..., 1:577])
    attend(make_kernel(case, tile=GLUON), case)
    check(case, oracle_tree(case))


@pytest.mark.gpu
@hopper
def test_the_check_passes() -> None:
    check_mla_gluon(torch.device("cuda"))
    case = tree_case([300], **DEEPSEEK)
    assert make_kernel(case).tile == GLUON


def test_other_problems_keep_their_tiles() -> None:
    problems = [(torch.float32, 512, 64), (BF16, 256, 32), (F16, 64, 16)]
    if not torch.cuda.is_available():
        problems.append((BF16, 512, 64))
    for dtype, rank, rope in problems:
        case = tree_case([3], q_len=5, heads=8, dtype=dtype, rank=rank, rope=rope)
        assert make_kernel(case).tile == mla_tile_config(40, dtype)


# compiles what would be launched on sm_90, without such a device
OFFLINE = """
import json
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Sm90:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

def compile_only(function, grid):
    if function.__name__ != "mla_gluon_kernel":
        return lambda *args, **options: None
    return lambda *args, **options: compiled.append(
        function.warmup(*args, grid=grid, **options)
    )

triton.runtime.driver.set_active(Sm90())
JITFunction.__getitem__ = compile_only
from specattn.kernels.mla import MlaAttention
from specattn.kernels.mla.tiles import GLUON

compiled, small = [], dict(dtype=torch.int32)
pool, q, out = (torch.zeros(n, h, d, dtype=torch.bfloat16)
                for n, h, d in ((64, 1, 576), (8, 16, 576), (8, 16, 512)))
kernel = MlaAttention(
    batch=2, q_len=4, tail_len=4, num_qo_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512,
    dtype=q.dtype, device="cpu", sm_scale=0.1, tile=GLUON,
)
kernel.run(
    q, pool, pool[..., :512], out, None, indices=torch.zeros(3, 64, **small), positions=None,
    tail_slots=torch.zeros(2, 4, **small), tail_positions=None,
    tail_words=torch.zeros(2, 4, 1, dtype=torch.int64),
)
kernel, = compiled
ptx = kernel.asm["ptx"]
print(json.dumps([kernel.metadata.shared, *(
    ptx.count(name) for name in ("wgmma.mma_async", "cp.async.cg", "st.global.v4")
)]))
"""


def test_it_compiles_for_hopper() -> None:
    """Two tiles and the queries fill the shared memory; copies and stores move 16 bytes."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    shared, products, copies, stores = json.loads(done.stdout)
    assert shared <= 227 * 1024
    # 36 steps of 16 columns for the logits, and of each consumer 4 of 16 keys for the values
    assert products == 36 + 2 * 4
    # 72 copies of 16 bytes make a row; a thread's share of 64 rows, of keys and of queries
    assert copies == 2 * 64 * 72 // 128
    # a thread's share of 64 rows and 256 columns, of each consumer, as results and as a partial
    assert stores == 2 * 2 * 64 * 256 // 8 // 128
