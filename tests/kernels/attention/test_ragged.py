"""Requests with different numbers of rows, kernels and torch, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specattn.kernels.attention import naive
from specattn.kernels.attention.tiles import FLOAT8, gluon_tile_config
from tests.kernels.attention.calls import make_deterministic, make_kernel, plan, poison, run
from tests.kernels.attention.test_gluon import hopper
from tests.oracle import NAN, Case, check, make_tree_case, oracle_tree
from tests.recordings import recorded, refill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16 = torch.float16, torch.bfloat16

# prefixes and rows of each request, and what differs from: 4 query and 2 KV heads of 32, float32
CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "all_numbers": ([40, 0, 33, 65, 7], [5, 1, 0, 12, 2], {"q_len": 12}),
    "one_has_all": ([300, 64], [40, 1], {"q_len": 40, "heads": (8, 1)}),
    "one_has_none": ([130, 31], [0, 20], {"q_len": 20, "dtype": F16}),
    "tile_edges": ([33, 70, 1], [16, 17, 15], {"q_len": 32, "heads": (4, 1)}),
    "two_words": ([20, 9], [70, 3], {"q_len": 70, "heads": (1, 1)}),
    "window": ([130, 30, 0], [6, 1, 4], {"q_len": 6, "window_left": 17}),
    "cap": ([65, 33], [3, 7], {"q_len": 7, "logit_cap": 5.0}),
    "cut_requests": ([900, 3, 700], [9, 2, 1], {"q_len": 9}),
}
BIG: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "rows_16": ([1030, 64, 0, 2500], [64, 8, 1, 7], {"q_len": 64}),
    "rows_32": ([700, 3000], [8, 56], {"q_len": 64, "heads": (32, 8)}),
    "many": (
        [(97 * i) % 900 for i in range(16)],
        [1 + (7 * i) % 40 for i in range(16)],
        {"q_len": 128},
    ),
    "window": ([3000, 200], [40, 3], {"q_len": 40, "window_left": 511}),
    "cap": ([1500, 65], [16, 64], {"q_len": 64, "logit_cap": 30.0}),
    "head_64": ([1500, 65], [5, 30], {"q_len": 30, "head_dim": 64, "heads": (6, 2)}),
}


def ragged(case: Case, lens: list[int]) -> dict[str, Any]:
    """Leave each request's first rows in a case; NaN stands behind the last."""
    width = case.args["positions"].shape[1]
    keep = torch.tensor([b * width + at for b, n in enumerate(lens) for at in range(n)])
    expected = tuple(want[keep] for want in oracle_tree(case))
    index = keep.to(DEVICE)
    case.q = case.q[index].contiguous()
    case.out, case.lse = torch.full_like(case.out[index], NAN), case.lse[index].contiguous()
    starts = torch.tensor([0, *lens]).cumsum(0).to(DEVICE, torch.int32)
    return {"expected": expected, "qo_indptr": starts, "rows": sum(lens)}


def check_kernel(case: Case, made: dict[str, Any], **options: Any) -> None:
    expected, rows = made["expected"], {name: made[name] for name in ("qo_indptr", "rows")}
    kernel = make_kernel(case, **rows, **options)
    for lse in (True, False):
        poison(kernel)
        case.clear()
        plan(kernel, case)
        run(kernel, case, lse=lse)
        check(case, expected, lse=lse)


@pytest.mark.parametrize("name", CASES)
def test_kernel_and_naive_match_the_oracle(name: str) -> None:
    lengths, lens, form = CASES[name]
    case = make_tree_case(lengths, **form, device=DEVICE)
    made = ragged(case, lens)
    for lse in (True, False):
        case.clear()
        naive.ragged_tree_attention(
            case.q,
            case.k_cache,
            case.v_cache,
            case.out,
            case.lse if lse else None,
            qo_indptr=made["qo_indptr"],
            **case.args,
            **case.settings,
        )
        check(case, made["expected"], lse=lse)
    check_kernel(case, made)
    if name in ("cut_requests", "tile_edges"):
        check_kernel(case, made, ctas=8)
        tile = replace(make_kernel(case).tile, short=0, block_m=16)
        check_kernel(case, made, tile=tile)


class TestGluon:
    pytestmark = hopper

    @pytest.mark.parametrize("block_m", [64, 128])
    @pytest.mark.parametrize("name", BIG)
    @pytest.mark.parametrize("kind", ["bf16", "f16", "float8", "pages"])
    def test_the_kernel_matches_the_oracle(self, kind: str, name: str, block_m: int) -> None:
        lengths, lens, form = BIG[name]
        page = 16 if kind == "pages" else 1
        stored = {"kv_dtype": FLOAT8} if kind == "float8" else {}
        form = {"heads": (16, 4), "head_dim": 128, "page_size": page} | form | stored
        dtype = F16 if kind == "f16" else BF16
        case = make_tree_case(lengths, **form, dtype=dtype, device=DEVICE)
        made = ragged(case, lens)
        dim, cap = case.q.shape[2], "logit_cap" in form
        tile = gluon_tile_config(block_m, dim, len(lens), page, case.kv_dtype or dtype, cap)
        check_kernel(case, made, tile=tile)


def test_one_recording_serves_all_shares() -> None:
    """The numbers of rows change between its replays."""
    form: dict[str, Any] = {"q_len": 16, "heads": (8, 2), "head_dim": 128, "device": DEVICE}
    form["dtype"] = BF16 if DEVICE == "cuda" else torch.float32
    lens = [[8, 8, 8], [15, 8, 1], [0, 8, 16], [4, 16, 4]]
    cases = [make_tree_case([130, 64, 33], **form, seed=at) for at in range(len(lens))]
    made = [ragged(case, some) for case, some in zip(cases, lens, strict=True)]
    first, starts = cases[0], made[0]["qo_indptr"].clone()
    kernel = make_kernel(first, qo_indptr=starts, rows=24)

    def body() -> None:
        plan(kernel, first)
        run(kernel, first)

    replay = recorded(body)
    for case, one in zip(cases, made, strict=True):
        refill(first, case)
        starts.copy_(one["qo_indptr"])
        replay()
        check(first, one["expected"])


def test_what_does_not_go_together_is_refused() -> None:
    case = make_tree_case([5, 3], q_len=4, device=DEVICE)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="qo_indptr goes with neither csr nor deterministic"):
        make_deterministic(case, qo_indptr=starts, rows=4)
    with pytest.raises(ValueError, match=r"qo_indptr must be torch.int32 \[3\]"):
        make_kernel(case, qo_indptr=starts[1:], rows=4)
