"""Prompt attention, kernel and torch, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.attention.calls import run_extend, run_naive
from tests.oracle import NAN, check, make_extend_case, oracle_extend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# (cached prefix, new tokens) pairs, and what differs from 4 query and 2 KV heads of 32, float32
CASES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "fresh": ([(0, 1), (0, 33)], {}),
    "cached": ([(65, 7), (31, 1), (130, 33)], {}),
    "one_token": ([(63, 1)], {}),
    "no_new_tokens": ([(5, 0), (9, 4), (0, 0)], {}),
    "tile_edges": ([(32, 16), (31, 17), (0, 15)], {}),
    "group_1": ([(20, 40)], {"heads": (2, 2)}),
    "group_3": ([(33, 20), (0, 7)], {"heads": (6, 2)}),
    "group_7": ([(10, 21)], {"heads": (7, 1)}),
    "f16": ([(60, 40), (0, 3)], {"dtype": F16, "head_dim": 64}),
    "head_80": ([(33, 12)], {"head_dim": 80}),
    "head_192_v_128": ([(33, 12)], {"head_dim": 192, "v_head_dim": 128}),
    "window_0": ([(40, 5), (0, 20)], {"window_left": 0}),
    "window_7": ([(40, 50), (0, 20), (3, 1)], {"window_left": 7}),
    "window_40": ([(90, 24), (0, 60)], {"window_left": 40}),
    "window_beyond": ([(40, 5)], {"window_left": 1000}),
    "cap": ([(40, 20)], {"logit_cap": 5.0}),
    "cap_window_f16": ([(90, 20)], {"logit_cap": 5.0, "window_left": 33, "dtype": F16}),
}
BIG: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    f"{name}-{dtype}": (lengths, {"head_dim": 128, "heads": (8, 2), "dtype": dtype} | options)
    for name, lengths, options in (
        ("ragged", [(0, 700), (1500, 65), (64, 1), (0, 0), (129, 128)], {}),
        ("window", [(0, 700), (1500, 65), (64, 1)], {"window_left": 255}),
        ("cap", [(100, 300)], {"logit_cap": 30.0}),
        ("head_64", [(100, 300)], {"head_dim": 64}),
        ("head_256", [(100, 300)], {"head_dim": 256}),
        ("head_192", [(100, 300)], {"head_dim": 192, "v_head_dim": 128}),
        ("head_80", [(100, 300)], {"head_dim": 80, "heads": (6, 2)}),
    )
    for dtype in (BF16, F16, F32)
}


def run_both(lengths: list[tuple[int, int]], options: dict[str, Any]) -> None:
    case = make_extend_case(lengths, **options, device=DEVICE)
    expected = oracle_extend(case)
    for function, lse in ((run_naive, True), (run_naive, False), (run_extend, True)):
        case.clear()
        function(case, lse=lse)
        check(case, expected, lse=lse)


@pytest.mark.parametrize("name", CASES)
def test_kernel_and_naive_match_the_oracle(name: str) -> None:
    run_both(*CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIG)
def test_kernel_and_naive_match_the_oracle_at_size(name: str) -> None:
    run_both(*BIG[name])


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("options", [{}, {"window_left": 255}, {"head_dim": 64}], ids=str)
def test_whole_pages(page_size: int, options: dict[str, Any]) -> None:
    lengths, form = BIG[f"ragged-{BF16}"]
    case = make_extend_case(lengths, **form | options, page_size=page_size, device=DEVICE)
    run_extend(case, page_size=page_size)
    check(case, oracle_extend(case))


def test_outputs_may_be_views_and_lse_left_out() -> None:
    case = make_extend_case([(20, 9), (0, 5)], device=DEVICE)
    for name in ("q", "out"):
        tensor = getattr(case, name)
        wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + 2, tensor.shape[2]), NAN)
        setattr(case, name, wide[:, 1:-1].copy_(tensor))
    case.args["max_q_len"] = 40
    run_extend(case, lse=False)
    check(case, oracle_extend(case), lse=False)


def test_errors_name_the_argument() -> None:
    case = make_extend_case([(20, 9)], device=DEVICE)
    for bad, match in (
        (replace(case, k_cache=case.k_cache[..., :-1]), "k_cache must be"),
        (replace(case, out=case.out[:-1]), "out must be"),
        (
            replace(case, v_cache=case.v_cache.half()),
            r"v_cache must be .* torch\.float32, got .* torch\.float16",
        ),
        (replace(case, q=case.q[:, :3], out=case.out[:, :3]), "multiple of 2 heads"),
    ):
        with pytest.raises(ValueError, match=match):
            run_extend(bad, lse=False)
