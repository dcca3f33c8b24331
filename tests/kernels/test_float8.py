"""Attention over float8 (e4m3) pools, kernels and twins, against the oracle over what they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specattn.kernels.attention import naive as twin
from specattn.kernels.attention.extend import extend_attention
from specattn.kernels.attention.tree import TreeAttention
from specattn.kernels.cache import commit_kv, store_kv
from tests.implementations import using
from tests.kernels.test_tree_attention import make_kernel, plan, run
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
NUMBERS = torch.arange(256, dtype=torch.uint8).view(F8).float()

TREES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": [130, 7, 0], "mode": "chain", "q_len": 1},
    "tree": {"lengths": [33, 0, 65], "q_len": 7, "heads": (8, 2), "pads": 1},
    "chunks": {"lengths": [700, 3, 64], "q_len": 3},
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


def scales(case: Case) -> dict[str, float]:
    return dict(zip(("k_scale", "v_scale"), case.kv_scales, strict=True))


def attend(case: Case, **options: Any) -> TreeAttention:
    kernel = make_kernel(case, kv_dtype=F8, **options)
    plan(kernel, case)
    case.clear()
    run(kernel.scaled(*case.kv_scales), case)
    return kernel


def hold_tree_to_oracle(case: Case, **options: Any) -> None:
    expected = oracle_tree(case)
    attend(case, **options)
    check(case, expected)
    case.clear()
    twin.tree_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.out,
        case.lse,
        **case.args,
        **case.settings,
        **scales(case),
    )
    check(case, expected)


@pytest.mark.parametrize("name", TREES)
def test_trees(name: str) -> None:
    case = make_tree_case(**TREES[name], **FORM)
    tile = replace(make_kernel(case, kv_dtype=F8).shape.tile, short=0, ctas_per_sm=4)
    hold_tree_to_oracle(case, tile=tile)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIG)
def test_trees_at_size(name: str) -> None:
    hold_tree_to_oracle(make_tree_case(**{"head_dim": 128} | BIG[name], **FORM))


def test_index_lists() -> None:
    case = make_csr_case([65, 1, 0, 130], **FORM)
    expected = oracle_csr(case)
    kernel = TreeAttention(
        batch=4,
        q_len=1,
        tail_len=0,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=32,
        v_head_dim=32,
        dtype=HALF,
        kv_dtype=F8,
        device=DEVICE,
        csr=True,
        **case.settings,
    )
    kernel.plan_csr(case.args["kv_indptr"])
    kernel.scaled(*case.kv_scales).run(
        case.q,
        case.k_cache,
        case.v_cache,
        case.out,
        case.lse,
        indices=case.args["kv_indices"],
        positions=None,
        tail_slots=None,
        tail_positions=None,
        tail_words=None,
    )
    check(case, expected)
    case.clear()
    twin.csr_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.out,
        None,
        **case.args,
        **case.settings,
        **scales(case),
    )
    check(case, expected, lse=False)


PROMPTS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "ragged": ([(65, 7), (0, 33), (5, 0)], {"head_dim": 64}),
    "cap_window": ([(90, 20)], {"logit_cap": 5.0, "window_left": 33}),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str) -> None:
    lengths, options = PROMPTS[name]
    case = make_extend_case(lengths, **options, **FORM)
    expected = oracle_extend(case)
    for function in (extend_attention, twin.extend_attention):
        case.clear()
        function(
            case.q,
            case.k_cache,
            case.v_cache,
            case.out,
            case.lse,
            **case.args,
            **case.settings,
            **scales(case),
        )
        check(case, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prompts_at_size(head_dim: int) -> None:
    case = make_extend_case(
        [(0, 700), (1500, 165), (64, 1)], heads=(8, 2), head_dim=head_dim, **FORM
    )
    extend_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.out,
        case.lse,
        **case.args,
        **case.settings,
        **scales(case),
    )
    check(case, oracle_extend(case))


def test_layers_of_other_scales_share_a_plan() -> None:
    case = make_tree_case([70, 130], **FORM)
    kernel = attend(case)
    for pair in ((0.25, 3.0), (2.0, 0.5)):
        case.kv_scales = pair
        case.clear()
        run(kernel.scaled(*pair), case)
        check(case, oracle_tree(case))


def test_weights_far_below_one_and_values_at_the_limit() -> None:
    """Products are of float16 numbers: e4m3's largest and smallest must survive them."""
    case = make_tree_case([300, 33], **FORM, scale=8.0)
    for pool in (case.k_cache, case.v_cache):
        pool[::3] = torch.where(pool[::3].float() > 0, 448.0, -(2.0**-9)).to(F8)
    hold_tree_to_oracle(case)


def test_dtypes_that_do_not_go_together_are_refused() -> None:
    case = make_tree_case([5], **FORM)
    with pytest.raises(ValueError, match=r"kv_dtype must be torch.float32, or .* with 16 bits"):
        make_kernel(make_tree_case([5], device=DEVICE), kv_dtype=F8)
    with pytest.raises(ValueError, match=r"scales need kv_dtype torch\.float8_e4m3fn"):
        make_kernel(case).scaled(1.0, 2.0)
    kernel = make_kernel(case, kv_dtype=F8)
    plan(kernel, case)
    with pytest.raises(ValueError, match=r"v_cache must be torch\.float8_e4m3fn"):
        run(kernel, replace(case, v_cache=case.v_cache.half()))
    prompt = make_extend_case([(5, 2)], **FORM)
    for other, name in (
        ({"v_cache": prompt.v_cache.half()}, "v_cache"),
        ({"q": prompt.q.float(), "out": prompt.out.float()}, "k_cache"),
    ):
        bad = replace(prompt, **other)
        with pytest.raises(ValueError, match=f"{name} must be"):
            extend_attention(
                bad.q, bad.k_cache, bad.v_cache, bad.out, None, **bad.args, **bad.settings
            )


@pytest.mark.parametrize("dtype", [F32, F16])
def test_stored_numbers_times_the_scale_are_the_numbers(
    implementation: str, dtype: torch.dtype
) -> None:
    """Every finite e4m3 number, and what lies beyond the largest."""
    finite = NUMBERS[NUMBERS.isfinite()].view(-1, 1, 2).to(DEVICE, dtype)
    k, v = finite * 4, torch.full_like(finite, -500.0)
    slots = torch.randperm(len(finite), device=DEVICE).to(torch.int32)[:, None]
    pools = [torch.zeros(len(finite), 1, 2, device=DEVICE).to(F8) for _ in range(2)]
    store_kv(k, v, *pools, slots, k_scale=4.0, v_scale=1.0)
    assert torch.equal(pools[0].float()[slots[:, 0].long()], finite.float())
    assert (pools[1].float() == -448).all()


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The e4m3 number that is nearest to each of ``x``, the even one of two."""
    ordered = NUMBERS[NUMBERS.isfinite()].unique().double()
    # zeros are one here; the rank of a positive number has the parity of its mantissa
    x = x.double().clamp(-448, 448)
    above = torch.searchsorted(ordered, x).clamp(1, len(ordered) - 1)
    low, high = ordered[above - 1], ordered[above]
    rank = above - len(ordered) // 2
    tie_up = rank % 2 == 0
    up = (x - low > high - x) | ((x - low == high - x) & tie_up)
    return torch.where(up, high, low)


@pytest.mark.parametrize(
    # the interpreter does not carry from the mantissa into the exponent
    "kind",
    ["naive", pytest.param("triton", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_rounding_is_to_nearest_even_and_nan_stays(kind: str, dtype: torch.dtype) -> None:
    k = (torch.randn(300, 2, 24) * 10 ** (torch.rand(300, 2, 24) * 7 - 4)).to(dtype)
    # halfway between two numbers, of either parity, and below the smallest one
    k[0, 0, :8] = torch.tensor([17, 19, -17, -19, 2**-10, 3 * 2**-10, 440, 1e4]).to(dtype)
    v = k[..., :10].clone()
    v[0] = float("nan")
    slots = torch.arange(300, dtype=torch.int32, device=DEVICE)[:, None]
    pools = [torch.zeros(300, 2, width, device=DEVICE).to(F8) for width in (24, 10)]
    with using(kind):
        store_kv(k.to(DEVICE), v.to(DEVICE), *pools, slots, k_scale=1.0, v_scale=0.25)
    assert torch.equal(pools[0].cpu().double(), nearest(k))
    got = pools[1].cpu().double()
    assert got[0].isnan().all()
    assert torch.equal(got[1:], nearest(v[1:].double() * 4))


def test_a_commit_copies_bytes(implementation: str) -> None:
    pools = [
        torch.randint(0, 256, (2, 20, 2, width), dtype=torch.uint8, device=DEVICE).view(F8)
        for width in (24, 10)
    ]
    want = [pool.view(torch.uint8).clone() for pool in pools]
    tail = torch.tensor([[7, 3, 11, 1, 9, 4]], dtype=torch.int32, device=DEVICE)
    for bits in want:
        bits[:, [3, 11]] = bits[:, [11, 4]]
    commit_kv(*pools, tail, torch.tensor([[0, 2, 5, -1]], dtype=torch.int32, device=DEVICE))
    for pool, bits in zip(pools, want, strict=True):
        assert torch.equal(pool.view(torch.uint8), bits)
