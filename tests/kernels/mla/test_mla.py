"""Latent attention, kernels and torch, against the float64 oracle over a pool whose v is k's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specattn.kernels.attention import DeterministicSplits
from specattn.kernels.attention.tiles import MergeTile
from specattn.kernels.mla.tiles import mla_tile_config
from tests.kernels.attention.calls import (
    attend,
    check_first_has_none,
    make_kernel,
    run_extend,
    run_naive,
)
from tests.oracle import (
    LAYOUT,
    NAN,
    Case,
    check,
    make_extend_case,
    make_tree_case,
    oracle_extend,
    oracle_tree,
)
from tests.recordings import recorded, refill
from tests.samples import compiled, half, sampled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def tree_case(
    lengths: list[int], *, heads: int = 4, rank: int = 64, rope: int = 16, **options: Any
) -> Case:
    return make_tree_case(lengths, **form(heads, rank, rope) | options)


def form(heads: int, rank: int, rope: int) -> dict[str, Any]:
    """One pool: values are the first columns of the keys."""
    return {
        "dtype": LAYOUT,
        "heads": (heads, 1),
        "head_dim": rank + rope,
        "v_head_dim": rank,
        "latent": True,
        "device": DEVICE,
    }


def _case(*lengths: int, **options: Any) -> dict[str, Any]:
    return {"lengths": list(lengths), **options}


# prefix lengths, and what differs from: 4 nodes of a random tree, 4 heads, rows of 64 + 16
CASES = {
    "empty_prefixes": _case(0, 0, 0),
    "tile_edges": _case(15, 16, 17, 0, 1, 31, 32, 33, 63, 64, 65),
    "decode": _case(130, 7, 0, q_len=1, mode="chain"),
    "decode_padded": _case(65, q_len=1, mode="chain", pads=3),
    "chain": _case(64, 1, 50, mode="chain", q_len=6),
    "draft_step_2": _case(65, 31, 0, mode="draft", q_len=4, tail_len=12),
    "padded": _case(40, 65, pads=2, q_len=5),
    "any_bits": _case(33, 0, 64, mode="any", q_len=7, tail_len=31),
    "tail_65": _case(63, 0, tail_len=65, mode="any", heads=3),
    "tail_130_f16": _case(63, 20, q_len=9, tail_len=130, mode="any", dtype=F16),
    "blind_rows": _case(0, 0, q_len=7, tail_len=70, mode="any", seed=3),
    "heads_1": _case(33, 31, heads=1, q_len=5),
    "heads_20": _case(40, heads=20, q_len=3),
    "rows_160_f16": _case(140, heads=16, q_len=10, dtype=F16),
    "odd_widths": _case(33, 8, rank=40, rope=6, pool_pad=3),
    "narrow": _case(33, rank=5, rope=3),
    "sharp": _case(200, 33, scale=20.0),
    "f16": _case(33, 130, dtype=F16, q_len=1, heads=16),
    "batch_of_19": _case(*((7 * i) % 41 for i in range(19)), q_len=2, heads=2),
    "many_partials": _case(600, 0, 33, q_len=2, heads=2),
    "full_width": _case(20, 0, rank=512, rope=64, heads=2, q_len=3, dtype=F32),
}
# of those, what differs from another in numbers that kernels have as constants alone
NUMBERS = {"decode_padded", "padded", "any_bits", "tail_65", "blind_rows", "heads_20", "sharp"}
MANY_SPLITS = {"many_partials", "batch_of_19", "blind_rows", "tail_65", "any_bits"}
# DeepSeek-V3's rows; 16 heads (of 128, on 8 GPUs) and 128; every tile of the table
BIG = {
    f"{name}-{dtype}": _case(
        *lengths, rank=512, rope=64, dtype=dtype, **({"heads": 16, "mode": "any"} | options)
    )
    for name, lengths, dtypes, options in (
        ("decode", (0, 1, 63, 64, 65, 3000), (BF16, F32), {"q_len": 1, "mode": "chain"}),
        ("two_tokens", (700, 65), (BF16,), {"q_len": 2, "mode": "chain"}),
        ("verify_8", (130, 1500, 64, 0), (BF16, F16), {"q_len": 8}),
        ("verify_64", (200, 65), (BF16,), {"q_len": 64, "mode": "tree"}),
        ("tail_200", (200, 0), (BF16,), {"q_len": 8, "tail_len": 200}),
        ("draft", (1030, 65), (BF16,), {"q_len": 4, "tail_len": 12, "mode": "draft"}),
        ("heads_128", (400, 65), (BF16,), {"q_len": 2, "heads": 128}),
        ("batch_300", tuple(i % 90 for i in range(300)), (BF16,), {"q_len": 1}),
        ("one_request", (2000,), (BF16, F32), {"q_len": 1}),
    )
    for dtype in dtypes
}


@pytest.mark.parametrize("name", compiled(CASES, without=NUMBERS))
def test_kernel_and_naive_match_the_oracle(name: str) -> None:
    case = tree_case(**CASES[name])
    expected = oracle_tree(case)
    for lse in (True, False):
        case.clear()
        run_naive(case, lse=lse)
        check(case, expected, lse=lse)
    # every full tile of the prefix through the maskless loop, short as the splits are here
    tile = replace(make_kernel(case).tile, short=0)
    if name in MANY_SPLITS:
        tile = replace(tile, ctas_per_sm=8)
    attend(make_kernel(case, tile=tile), case)
    check(case, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"dtype": BF16, "heads": 16, "rank": 512, "rope": 64}, marks=pytest.mark.gpu),
    ],
    ids=["f32", "bf16"],
)
def test_rows_that_are_no_numbers_give_none(options: dict[str, Any]) -> None:
    """In results and sums of their request, and in no other's."""
    case = tree_case([300, 65, 40], **options)
    expected = oracle_tree(case)
    slots = case.args["req_to_token"][case.args["req_pool_indices"][0], :300]
    case.k_cache[slots.long()] = float("nan")
    check_first_has_none(case, expected, requests=3)


@pytest.mark.parametrize("name", ["tile_edges", "f16"])
def test_short_runs_take_the_masked_loop(name: str) -> None:
    """And lse is optional."""
    case = tree_case(**CASES[name])
    attend(make_kernel(case), case, lse=False)
    check(case, oracle_tree(case), lse=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIG)
def test_kernel_matches_the_oracle_at_size(name: str) -> None:
    """The Triton kernel, where Gluon's would be chosen, too."""
    case = tree_case(**BIG[name])
    expected = oracle_tree(case)
    rows = case.args["positions"].shape[1] * case.q.shape[1]
    attend(make_kernel(case, tile=mla_tile_config(rows, case.q.dtype)), case)
    check(case, expected)
    case.clear()
    run_naive(case)
    check(case, expected)


@pytest.mark.gpu
def test_one_graph_serves_every_length() -> None:
    batches = ([2000, 3, 0, 300], [0, 0, 0, 0], [64, 65, 63, 1], [300, 3000, 300, 1])
    same = {
        "heads": 16,
        "rank": 512,
        "rope": 64,
        "q_len": 4,
        "dtype": BF16,
        "width": 3100,
        "slots": 5000,
    }
    live = tree_case([1, 1, 1, 1], **same)
    kernel = make_kernel(live)
    replay = recorded(lambda: attend(kernel, live))
    for seed, lengths in enumerate(batches):
        case = tree_case(lengths, seed=seed, **same)
        refill(live, case)
        replay()
        check(live, oracle_tree(live))


# (cached prefix, new tokens) pairs, and what differs from 3 heads, rows of 64 + 16
EXTEND: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "fresh": ([(0, 1), (0, 33)], {}),
    "cached": ([(65, 7), (31, 1), (100, 20)], {}),
    "no_new_tokens": ([(5, 0), (9, 4), (0, 0)], {}),
    "tile_edges": ([(16, 16), (15, 17), (0, 15)], {}),
    "f16": ([(60, 20), (0, 3)], {"dtype": F16, "heads": 16}),
    "odd_widths": ([(33, 12)], {"rank": 40, "rope": 6}),
}
BIG_EXTEND = {16: [(0, 40), (150, 20), (64, 1), (0, 0)], 128: [(0, 9), (70, 3)]}
# whether an lse is asked for; on a GPU, whose compiler makes a kernel of each, in one case
LSE = (True, False) if DEVICE == "cpu" else (True,)


def extend_both(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 3,
    rank: int = 64,
    rope: int = 16,
    lse: tuple[bool, ...] = LSE,
    **options: Any,
) -> None:
    case = make_extend_case(lengths, **form(heads, rank, rope) | options)
    expected = oracle_extend(case)
    run_naive(case)
    check(case, expected)
    case.clear()
    for given in lse:
        run_extend(case, lse=given)
        check(case, expected, lse=given)


@pytest.mark.parametrize("name", EXTEND)
def test_extend_and_naive_match_the_oracle(name: str) -> None:
    lengths, options = EXTEND[name]
    extend_both(lengths, **options)


@pytest.mark.gpu
@sampled(half, heads=BIG_EXTEND.keys(), dtype=[BF16, F16, F32])
def test_extend_matches_the_oracle_at_size(heads: int, dtype: torch.dtype) -> None:
    extend_both(BIG_EXTEND[heads], heads=heads, rank=512, rope=64, dtype=dtype, lse=(True, False))


@pytest.mark.parametrize(
    ("merge", "rank"),
    [
        (MergeTile(rows=16, partials=2, many=4, span=64), 64),
        (MergeTile(rows=4, partials=5, many=40, span=32), 40),
        (MergeTile(rows=1, partials=80, span=16), 40),
        (MergeTile(rows=16, partials=3), 64),
    ],
    ids=str,
)
def test_merges_take_any_rows_parts_and_columns(merge: MergeTile, rank: int) -> None:
    """Fifteen partials, more and fewer than are taken at once, of all columns and of some."""
    case = tree_case([260, 0, 33], rank=rank, q_len=3, dtype=F32)
    tile = replace(make_kernel(case).tile, ctas_per_sm=9)
    kernel = make_kernel(case, tile=tile)
    kernel.kernels.merge_tile = merge
    kernel.workspace[0].fill_(NAN)
    kernel.workspace[1].fill_(NAN)
    attend(kernel, case)
    assert kernel.tables.merges[1, 2] > 10
    check(case, oracle_tree(case))


def test_a_pool_of_its_own_for_values_is_refused() -> None:
    case = tree_case([5, 6])
    apart = replace(case, v_cache=case.v_cache.clone())
    with pytest.raises(ValueError, match=r"v_cache must be k_cache\[..., :64\], a view"):
        attend(make_kernel(case), apart)
    shifted = replace(case, v_cache=case.k_cache[..., 16:])
    with pytest.raises(ValueError, match="v_cache must be k_cache"):
        attend(make_kernel(case), shifted)
    case = make_extend_case([(5, 6)], **form(3, 64, 16))
    with pytest.raises(ValueError, match="v_cache must be k_cache"):
        run_extend(replace(case, v_cache=case.v_cache.clone()))


def test_bad_geometry_is_refused() -> None:
    case = tree_case([5, 6])
    with pytest.raises(ValueError, match="block_n must be at most 64, got 128"):
        make_kernel(case, tile=replace(mla_tile_config(8, F32), block_n=128))
    with pytest.raises(ValueError, match="tail_len must be at least 1, got 0"):
        make_kernel(case, tail_len=0)
    with pytest.raises(ValueError, match=r"v_head_dim must be 1\.\.79, got 80"):
        make_kernel(replace(case, out=case.q))
    with pytest.raises(ValueError, match=r"num_kv_heads must be 1\.\.1, got 2"):
        make_kernel(case, num_kv_heads=2)
    for option in (
        {"window_left": 3},
        {"logit_cap": 1.0},
        {"share_from": 256},
        {"deterministic": DeterministicSplits(64)},
    ):
        with pytest.raises(ValueError, match="latent attention has no window_left"):
            make_kernel(case, **option)
    case = make_extend_case([(5, 6)], **form(4, 64, 16))
    keys, values = (cache.expand(-1, 2, -1) for cache in (case.k_cache, case.v_cache))
    case = replace(case, k_cache=keys, v_cache=values)
    with pytest.raises(ValueError, match="k_cache must have one head, got 2"):
        run_extend(case)
