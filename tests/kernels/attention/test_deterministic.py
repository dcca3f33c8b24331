"""Deterministic attention: exact, and the same bits in any batch, bucket and mode."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn.kernels.attention import DeterministicSplits, TreeAttention
from specattn.kernels.attention.tiles import deterministic_tile_config
from specattn.testing.determinism import as_decode, as_lists, picked, resumed
from tests.kernels.attention.calls import (
    attend,
    make_deterministic,
    make_kernel,
    run,
    run_deterministic,
    run_extend,
)
from tests.kernels.attention.test_tree import NUMBERS, make
from tests.oracle import (
    LAYOUT,
    check,
    make_csr_case,
    make_extend_case,
    make_tree_case,
    oracle_csr,
    oracle_extend,
    oracle_tree,
)
from tests.recordings import recorded, refill
from tests.samples import compiled

if TYPE_CHECKING:
    from tests.oracle import Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
F8 = torch.float8_e4m3fn

# of test_tree's cases, those that have no path to compare with, or look another way
EXACT = [
    "empty_prefixes",
    "padded",
    "any_bits",
    "rows_152_f16",
    "blind_rows",
    "tail_65_f16",
    "head_64_v_96",
    "head_8_v_4",
    "window_any",
    "window_padded",
    "sharp",
    "many_partials",
]
# prefix lengths around tiles and cuts (of 64 keys), and what differs from a tree of 4 nodes,
# 4 query and 2 KV heads of 32
PATHS: dict[str, dict[str, Any]] = {
    "tree": {"lengths": [62, 0, 190], "q_len": 5},
    "tree_f16": {"lengths": [62, 0, 65], "q_len": 5, "dtype": F16, "heads": (2, 1)},
    "chain": {"lengths": [60, 1], "mode": "chain", "q_len": 8, "heads": (2, 1)},
    "draft": {"lengths": [63, 30], "mode": "draft", "q_len": 3, "tail_len": 9},
    "two_words": {"lengths": [30], "q_len": 66, "heads": (1, 1), "head_dim": 16},
    "window": {"lengths": [130, 64, 5], "q_len": 4, "window_left": 37, "heads": (2, 1)},
    "cap_f16": {"lengths": [64, 90], "logit_cap": 5.0, "dtype": F16, "heads": (2, 1)},
    "float8": {"lengths": [126, 50], "dtype": F16, "kv_dtype": F8, "kv_scales": (0.7, 1.9)},
}
BIG: dict[str, dict[str, Any]] = {
    name: {"head_dim": 128, "heads": (16, 4), "dtype": BF16, "q_len": 8} | options
    for name, options in {
        "tree": {"lengths": [1020, 4000, 63, 0]},
        "tree_f16": {"lengths": [1020, 700], "dtype": F16},
        "tree_f32": {"lengths": [1020, 64], "dtype": F32},
        "chain": {"lengths": [1020, 2047, 5], "mode": "chain"},
        "draft": {"lengths": [3000, 1023], "mode": "draft", "tail_len": 24},
        "nodes_64": {"lengths": [1500, 90], "q_len": 64},
        "nodes_130": {"lengths": [2040], "q_len": 130, "heads": (4, 2)},
        "window": {"lengths": [3000, 700], "window_left": 511},
        "cap": {"lengths": [1500, 63], "logit_cap": 30.0},
        "head_64": {"lengths": [1500, 63], "head_dim": 64},
        "float8": {"lengths": [1500, 63], "kv_dtype": F8, "kv_scales": (0.7, 1.9)},
        "head_192": {"lengths": [1100], "head_dim": 192, "v_head_dim": 128},
        "head_256": {"lengths": [1100], "head_dim": 256},
        "group_8": {"lengths": [1500, 63], "heads": (8, 1)},
    }.items()
}
# of those, what differs from another in numbers that kernels have as constants alone
SAME_BRANCHES = {"tree_f16", "chain", "nodes_64", "group_8"}


def bits(case: Case) -> tuple[torch.Tensor, ...]:
    return case.out.clone(), case.lse.clone()


def same_bits(case: Case, wanted: tuple[torch.Tensor, ...], what: str) -> None:
    """Compare bit for bit, row by row; padding rows at the end are not looked at."""
    for name, got, want in zip(("out", "lse"), (case.out, case.lse), wanted, strict=True):
        off = (got[: len(want)] != want).flatten(1).any(1)
        assert not off.any(), (
            f"{what}: {name} differs in rows {off.nonzero()[:, 0].tolist()} of {len(want)}, by up "
            f"to {(got[: len(want)].double() - want.double()).abs().max():.1e}"
        )


@pytest.mark.parametrize("name", compiled(EXACT, without=NUMBERS))
def test_it_is_exact(name: str) -> None:
    case = make(name)
    run_deterministic(case, split_keys=64, ctas=8 if name in ("many_partials", "sharp") else 0)
    check(case, oracle_tree(case))


def test_the_lse_is_optional() -> None:
    case = make("many_partials")
    run_deterministic(case, split_keys=64, lse=False, ctas=8)
    check(case, oracle_tree(case), lse=False)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([65, 1, 130, 0, 64], {}),
        ([0, 0], {}),
        ([65, 1, 0, 130], {"window_left": 20}),
    ],
)
def test_index_lists_are_exact(lengths: list[int], options: dict[str, Any]) -> None:
    case = make_csr_case(lengths, dtype=LAYOUT, **options, device=DEVICE)
    run_deterministic(case, split_keys=64, ctas=8)
    check(case, oracle_csr(case))


def check_paths(options: dict[str, Any], split: int, ctas: tuple[int, ...]) -> None:
    """Every row has the bits of decoding at the end of its path, as a request or as a list."""
    case = make_tree_case(**{"dtype": LAYOUT} | options, device=DEVICE)
    run_deterministic(case, split_keys=split)
    check(case, oracle_tree(case))
    whole = bits(case)
    # a few rows of many, the last among them
    rows = list(range(len(case.q)))[:: -max(1, len(case.q) // 12)]
    wanted = tuple(tensor[rows] for tensor in whole)
    for count in ctas:
        what = f"{count or 'default'} CTAs per SM"
        same_bits(run_deterministic(case, split_keys=split, ctas=count), whole, f"again, {what}")
        decode = as_decode(case, rows, seed=count)
        same_bits(
            run_deterministic(decode, split_keys=split, ctas=count), wanted, f"decode, {what}"
        )
    same_bits(run_deterministic(as_lists(case, rows), split_keys=split), wanted, "lists")


@pytest.mark.parametrize("name", PATHS)
def test_a_row_is_decoding_at_the_end_of_its_path(name: str) -> None:
    # a tile of float8 keys is wider
    check_paths(PATHS[name], 128 if name == "float8" else 64, (8,))


@pytest.mark.gpu
@pytest.mark.parametrize("name", compiled(BIG, without=SAME_BRANCHES))
def test_a_row_is_decoding_at_the_end_of_its_path_at_size(name: str) -> None:
    # other CTAs are another plan to compile
    check_paths(BIG[name], 1024, (0, 1) if name in ("tree", "window") else (0,))


def check_batches(options: dict[str, Any], split: int, ctas: tuple[int, int] = (0, 8)) -> None:
    """A request alone, with others, in another order, with padding, in other slots and rows."""
    case = make_tree_case(**{"dtype": LAYOUT} | options, device=DEVICE)
    count, q_len = len(options["lengths"]), case.args["positions"].shape[1]
    run_deterministic(case, split_keys=split)
    out, lse = (tensor.unflatten(0, (count, q_len)) for tensor in bits(case))
    for seed, (who, pads) in enumerate(
        [
            ([0], 0),
            ([count - 1], 1),
            (list(range(count))[::-1], 3),
            ([1, 0] * 3, 4),
        ]
    ):
        other = picked(case, who, pads=pads, seed=seed)
        run_deterministic(other, split_keys=split, ctas=ctas[seed % 2])
        wanted = (out[who].flatten(0, 1), lse[who].flatten(0, 1))
        same_bits(other, wanted, f"requests {who} with {pads} of padding")


BATCHES: dict[str, dict[str, Any]] = {
    "tree": {"lengths": [190, 0, 65], "q_len": 3},
    "draft_f16": {"lengths": [130, 7], "mode": "draft", "tail_len": 12, "dtype": F16},
    "window": {"lengths": [150, 64], "window_left": 33, "q_len": 3},
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_rest_of_the_batch_does_not_show(name: str) -> None:
    check_batches(BATCHES[name], 64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", compiled(BIG, without=SAME_BRANCHES))
def test_the_rest_of_the_batch_does_not_show_at_size(name: str) -> None:
    options = dict(BIG[name])
    ctas = (0, 8) if name in ("tree", "window") else (0, 0)
    check_batches(options | {"lengths": [*options["lengths"], 5000, 70, 2222]}, 1024, ctas)


@pytest.mark.parametrize("name", ["tree", "draft"])
def test_the_default_mode_does_show_it(name: str) -> None:
    """The comparisons above can fail: with its splits of the whole batch, the other mode does."""
    # long enough for splits of several tiles
    scale = 40 if DEVICE == "cuda" else 1
    lengths = [length * scale for length in PATHS[name]["lengths"]]
    # in the digits of float32
    case = make_tree_case(**PATHS[name] | {"lengths": lengths}, device=DEVICE)
    decode, alone = as_decode(case, list(range(len(case.q)))), picked(case, [0])
    for one in (case, decode, alone):
        attend(make_kernel(one), one)
        check(one, oracle_tree(one))
    with pytest.raises(AssertionError, match="decode: out differs"):
        same_bits(decode, bits(case), "decode")
    if DEVICE == "cpu" or name == "tree":
        # with 132 multiprocessors the draft's request is cut alike, alone or not
        first = alone.live
        with pytest.raises(AssertionError, match="alone: out differs"):
            same_bits(alone, (case.out[:first], case.lse[:first]), "alone")


PROMPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 37},
    "cap": {"logit_cap": 3.0},
    "f16": {"dtype": F16, "head_dim": 64},
}


def check_prompts(lengths: list[tuple[int, int]], cuts: list[int], **options: Any) -> None:
    """A prompt has the same bits whole and in pieces, and in any batch."""
    case = make_extend_case(lengths, **{"dtype": LAYOUT} | options, device=DEVICE)
    extend(case)
    check(case, oracle_extend(case))
    wanted = bits(case)
    for piece, rows in resumed(case, cuts):
        extend(piece)
        same_bits(piece, tuple(partial[rows] for partial in wanted), f"tokens {rows.tolist()}")


def extend(case: Case) -> None:
    case.clear()
    run_extend(case, deterministic=True)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_in_pieces(name: str) -> None:
    check_prompts([(0, 70), (33, 40), (64, 9)], [33, 1, 9], **PROMPTS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_in_pieces_at_size(name: str) -> None:
    options = {"head_dim": 128, "heads": (8, 2), "dtype": BF16} | PROMPTS[name]
    check_prompts([(0, 700), (1500, 165), (64, 9)], [301, 1, 9], **options)


def test_one_object_serves_every_step() -> None:
    """Longer and shorter batches in turn, new trees, and layers: nothing of a step stays."""
    cases = [
        make_tree_case(
            lengths,
            q_len=3,
            tail_len=6,
            width=220,
            slots=500,
            seed=seed,
            dtype=LAYOUT,
            device=DEVICE,
        )
        for seed, lengths in enumerate([[200, 90, 130], [0, 5, 1], [64, 65, 63]])
    ]
    kernel = make_deterministic(cases[0], split_keys=64, ctas=4)
    for case in cases:
        attend(kernel, case)
        check(case, oracle_tree(case))
        before = bits(case)
        case.clear()
        run(kernel, case)
        same_bits(case, before, "another layer")


def test_one_workspace_serves_all_buckets() -> None:
    cases = [make_tree_case([190, 70], device=DEVICE), make_tree_case([33, 0, 5], device=DEVICE)]
    workspace = torch.full((1 << 20,), 255, dtype=torch.uint8, device=DEVICE)
    for _ in range(2):
        for case in cases:
            attend(make_deterministic(case, workspace=lambda size: workspace[:size]), case)
            check(case, oracle_tree(case))


@pytest.mark.gpu
def test_one_graph_serves_every_length() -> None:
    """Bits of a replay are those of an eager forward of any of its requests alone."""
    options: dict[str, Any] = {
        "q_len": 8,
        "heads": (8, 2),
        "head_dim": 128,
        "dtype": BF16,
        "device": DEVICE,
        "width": 9100,
        "slots": 40_000,
    }
    batches = ([5000, 3, 0, 700], [0, 0, 0, 0], [64, 65, 63, 1], [9000, 9000, 9000, 9000])
    live = make_tree_case([1, 1, 1, 1], **options)
    kernel = make_deterministic(live, split_keys=1024)
    replay = recorded(lambda: attend(kernel, live))
    for seed, lengths in enumerate(batches):
        case = make_tree_case(lengths, **options, seed=seed)
        refill(live, case)
        replay()
        check(live, oracle_tree(case))
        alone = run_deterministic(picked(case, [2]), split_keys=1024)
        same_bits(alone, (live.out[16:24], live.lse[16:24]), f"lengths {lengths}")


def test_no_number_of_the_batch_is_in_the_tile() -> None:
    """Every mode of a geometry has one tile; splits are whole tiles of it."""
    for dtype in (F32, F16, BF16):
        for dim in (64, 128, 192, 256):
            tile = deterministic_tile_config(dim, dim, dtype)
            assert 64 % tile.block_n == 0
            for q_len in (1, 8, 64):
                kernel = TreeAttention(
                    batch=2,
                    q_len=q_len,
                    tail_len=q_len,
                    num_qo_heads=8,
                    num_kv_heads=2,
                    head_dim=dim,
                    v_head_dim=dim,
                    dtype=dtype,
                    device="cpu",
                    sm_scale=1.0,
                    deterministic=DeterministicSplits(100),
                )
                assert kernel.tile == tile


def test_errors_name_the_argument() -> None:
    case = make_tree_case([5, 6], device=DEVICE)
    kernel = make_deterministic(case)
    with pytest.raises(ValueError, match="split_keys must be a multiple of 32"):
        make_deterministic(case, split_keys=100)
    with pytest.raises(ValueError, match="sm_scale must be above 0"):
        make_deterministic(replace(case, sm_scale=0.0))
    with pytest.raises(ValueError, match="csr needs q_len 1"):
        make_deterministic(case, csr=True)
    with pytest.raises(ValueError, match="deterministic needs a tail"):
        make_deterministic(case, tail_len=0)
    with pytest.raises(ValueError, match="num_qo_heads must be a multiple"):
        make_deterministic(case, num_kv_heads=3)
    with pytest.raises(ValueError, match="workspace must be uint8"):
        make_deterministic(
            case, workspace=lambda size: torch.empty(8, dtype=torch.uint8, device=DEVICE)
        )
    with pytest.raises(ValueError, match="tail_slots and tail_words must be given"):
        kernel.trace(indices=case.args["req_to_token"])
    with pytest.raises(ValueError, match="seq_lens must be"):
        attend(kernel, replace(case, args=case.args | {"seq_lens": case.args["seq_lens"].long()}))
    with pytest.raises(ValueError, match="k_cache must be"):
        attend(kernel, replace(case, k_cache=case.k_cache.half()))
