"""Attention over float8 (e4m3) pools, by kernels and torch, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specattn.config import KVScales
from tests.kernels.attention.calls import (
    attend,
    make_kernel,
    plan,
    run,
    run_extend,
    run_naive,
)
from tests.oracle import (
    Case,
    check,
    make_csr_case,
    make_extend_case,
    make_tree_case,
    oracle_csr,
    oracle_extend,
    oracle_tree,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16, F8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
# Triton's interpreter has no bfloat16, which is the harder one: its queries are converted
HALF = BF16 if DEVICE == "cuda" else F16
FORM: dict[str, Any] = {
    "kv_dtype": F8,
    "kv_scales": (0.7, 1.9),
    "dtype": HALF,
    "device": DEVICE,
}

TREES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": [130, 7, 0], "mode": "chain", "q_len": 1},
    "tree": {"lengths": [33, 0, 65], "q_len": 7, "heads": (8, 2), "pads": 1},
    "splits": {"lengths": [700, 3, 64], "q_len": 3},
    "rows_152": {"lengths": [140], "heads": (8, 1), "q_len": 19},
    "tail_130": {"lengths": [40, 9], "mode": "any", "q_len": 5, "tail_len": 130},
    "draft": {"lengths": [65, 31], "mode": "draft", "tail_len": 12},
    "head_80": {"lengths": [33], "head_dim": 80, "v_head_dim": 48, "pool_pad": 3},
    "head_256": {"lengths": [40], "head_dim": 256},
    "cap_window": {"lengths": [90, 33], "logit_cap": 2.0, "window_left": 20, "scale": 2.0},
}
BIG: dict[str, dict[str, Any]] = {
    "decode": {"lengths": [0, 1, 63, 129, 4000], "q_len": 1, "heads": (32, 8), "mode": "chain"},
    "verify_8": {"lengths": [130, 2500, 64, 0], "q_len": 8, "heads": (16, 4)},
    "verify_64": {"lengths": [1030, 65], "q_len": 64, "heads": (8, 2)},
    "tail_200": {"lengths": [1030, 0], "q_len": 8, "tail_len": 200, "mode": "any", "heads": (8, 2)},
    "window_cap": {
        "lengths": [3000, 700],
        "q_len": 8,
        "window_left": 511,
        "heads": (8, 2),
        "logit_cap": 30.0,
    },
    "head_64": {"lengths": [1500, 65], "q_len": 8, "head_dim": 64, "heads": (6, 2)},
    "head_256": {"lengths": [1500, 65], "q_len": 8, "head_dim": 256, "heads": (8, 2)},
    "head_256_wide": {"lengths": [1500, 65], "q_len": 40, "head_dim": 256, "heads": (8, 2)},
    "pages": {"lengths": [1030, 65], "q_len": 40, "heads": (8, 2), "page_size": 16},
}


def hold_to_oracle(case: Case, **options: Any) -> None:
    """Compare the kernels and torch."""
    expected = oracle_csr(case) if case.kind == "lists" else oracle_tree(case)
    attend(make_kernel(case, **options), case)
    check(case, expected)
    for lse in (True, False):
        case.clear()
        run_naive(case, lse=lse)
        check(case, expected, lse=lse)


@pytest.mark.parametrize("name", TREES)
def test_trees(name: str) -> None:
    case = make_tree_case(**TREES[name], **FORM)
    tile = replace(make_kernel(case).tile, short=0, ctas_per_sm=4)
    hold_to_oracle(case, tile=tile)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIG)
def test_trees_at_size(name: str) -> None:
    hold_to_oracle(make_tree_case(**{"head_dim": 128} | BIG[name], **FORM))


def test_index_lists() -> None:
    hold_to_oracle(make_csr_case([65, 1, 0, 130], **FORM))


PROMPTS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "ragged": ([(65, 7), (0, 33), (5, 0)], {"head_dim": 64}),
    "cap_window": ([(90, 20)], {"logit_cap": 5.0, "window_left": 33}),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str) -> None:
    lengths, options = PROMPTS[name]
    case = make_extend_case(lengths, **options, **FORM)
    expected = oracle_extend(case)
    for function in (run_extend, run_naive):
        case.clear()
        function(case)
        check(case, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prompts_at_size(head_dim: int) -> None:
    case = make_extend_case(
        [(0, 700), (1500, 165), (64, 1)], heads=(8, 2), head_dim=head_dim, **FORM
    )
    run_extend(case)
    check(case, oracle_extend(case))


def test_layers_of_other_scales_share_a_plan() -> None:
    case = make_tree_case([70, 130], **FORM)
    kernel = make_kernel(case)
    plan(kernel, case)
    for pair in ((0.25, 3.0), (2.0, 0.5)):
        case.kv_scales = pair
        case.clear()
        run(kernel, case)
        check(case, oracle_tree(case))


def test_weights_far_below_one_and_values_at_the_limit() -> None:
    """Products are of float16 numbers: e4m3's largest and smallest must survive them."""
    case = make_tree_case([300, 33], **FORM, scale=8.0)
    for pool in (case.k_cache, case.v_cache):
        pool[::3] = torch.where(pool[::3].float() > 0, 448.0, -(2.0**-9)).to(F8)
    hold_to_oracle(case)


def test_dtypes_that_do_not_go_together_are_refused() -> None:
    case = make_tree_case([5], **FORM)
    with pytest.raises(ValueError, match=r"kv_dtype must be torch.float32, or .* with 16 bits"):
        make_kernel(make_tree_case([5], device=DEVICE), kv_dtype=F8)
    with pytest.raises(ValueError, match=r"scales need kv_dtype torch\.float8_e4m3fn"):
        make_kernel(case, kv_dtype=None).for_layer(KVScales(1.0, 2.0), prefetch=False)
    kernel = make_kernel(case)
    plan(kernel, case)
    with pytest.raises(ValueError, match=r"v_cache must be .* torch\.float8_e4m3fn"):
        run(kernel, replace(case, v_cache=case.v_cache.half()))
    prompt = make_extend_case([(5, 2)], **FORM)
    for other, name in (
        ({"v_cache": prompt.v_cache.half()}, "v_cache"),
        ({"q": prompt.q.float(), "out": prompt.out.float()}, "k_cache"),
    ):
        bad = replace(prompt, **other)
        with pytest.raises(ValueError, match=f"{name} must be"):
            run_extend(bad, lse=False)
