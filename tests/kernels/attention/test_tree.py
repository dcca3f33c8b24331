"""Tree attention, kernels and torch, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specattn.kernels.attention.tiles import MergeTile
from specattn.testing.oracle import visible_slots
from tests.kernels.attention.calls import (
    attend,
    check_first_has_none,
    make_kernel,
    plan,
    run,
    run_naive,
)
from tests.oracle import (
    LAYOUT,
    NAN,
    Case,
    check,
    make_csr_case,
    make_tree_case,
    oracle_csr,
    oracle_tree,
)
from tests.recordings import recorded, refill
from tests.samples import compiled, sampled, third

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def _case(*lengths: int, **options: Any) -> dict[str, Any]:
    return {"lengths": list(lengths), **options}


# prefix lengths, and what differs from: 4 nodes of a random tree, 4 query and 2 KV heads of 32
CASES = {
    "empty_prefixes": _case(0, 0, 0),
    "tile_edges": _case(31, 32, 33, 0, 1, 63, 64, 65),
    "tile_edges_64": _case(63, 64, 65, dtype=F16, head_dim=64),
    "one_request": _case(130),
    "long_beside_short": _case(700, 3, 64, 0, 17, q_len=3),
    "decode": _case(130, 7, q_len=1, mode="chain"),
    "decode_padded": _case(65, q_len=1, mode="chain", pads=4),
    "chain": _case(64, 1, 90, mode="chain", q_len=6),
    "draft_step_0": _case(50, 0, mode="draft", q_len=4),
    "draft_step_2": _case(65, 31, 0, mode="draft", q_len=4, tail_len=12),
    "draft_wide": _case(33, mode="draft", q_len=8, tail_len=72),
    "padded": _case(40, 65, pads=3, q_len=5),
    "batch_of_19": _case(*((7 * i) % 41 for i in range(19)), q_len=2, heads=(2, 1)),
    "any_bits": _case(33, 0, 64, mode="any", q_len=7, tail_len=31),
    "group_1": _case(33, 31, heads=(3, 3), q_len=5),
    "group_3": _case(65, 30, heads=(6, 2), q_len=3),
    "group_7": _case(40, heads=(7, 1), q_len=6),
    "group_8": _case(40, heads=(8, 1), q_len=5),
    "group_16": _case(70, heads=(16, 1), q_len=3),
    "rows_72_f16": _case(70, 140, heads=(16, 2), q_len=9, dtype=F16),
    "rows_152_f16": _case(140, heads=(8, 1), q_len=19, dtype=F16),
    "tail_5": _case(31, q_len=1, tail_len=5, mode="any"),
    "tail_32": _case(31, tail_len=32),
    "tail_33": _case(40, tail_len=33),
    "tail_63": _case(65, tail_len=63),
    "tail_64": _case(1, 63, tail_len=64),
    "tail_65": _case(63, 64, 0, tail_len=65, mode="any"),
    "tail_128": _case(65, 1, q_len=5, tail_len=128, mode="any"),
    "tail_256": _case(33, tail_len=256, mode="any"),
    "blind_rows": _case(0, 0, q_len=7, tail_len=250, mode="any", seed=3),
    "tail_65_f16": _case(63, 150, tail_len=65, mode="any", dtype=F16),
    "tail_130_rows_160_f16": _case(
        63, 150, q_len=20, tail_len=130, mode="any", dtype=F16, heads=(8, 1)
    ),
    "tree_of_65": _case(20, q_len=65, heads=(1, 1), head_dim=16),
    "tree_of_256": _case(9, q_len=256, heads=(1, 1), head_dim=16, dtype=F16),
    "head_80": _case(33, head_dim=80, pool_pad=3),
    "head_64_v_96": _case(33, 8, head_dim=64, v_head_dim=96, pool_pad=8),
    "head_192_v_128": _case(20, head_dim=192, v_head_dim=128),
    "head_256_f16": _case(40, head_dim=256, dtype=F16),
    "head_128_f16": _case(130, 65, head_dim=128, dtype=F16),
    "head_8_v_4": _case(40, head_dim=8, v_head_dim=4),
    "window_0": _case(64, 33, 0, window_left=0),
    "window_1": _case(64, 33, window_left=1, q_len=6),
    "window_17": _case(130, 30, 1, window_left=17, q_len=6),
    "window_63_f16": _case(62, 63, 64, 256, window_left=63, q_len=5, dtype=F16),
    "window_beyond": _case(70, 5, window_left=1000),
    "window_any": _case(70, 40, window_left=2, q_len=7, mode="any", tail_len=40),
    "window_draft": _case(70, 20, window_left=9, mode="draft", tail_len=12),
    "window_padded": _case(70, window_left=9, pads=2),
    "window_in_tail": _case(70, window_left=30, mode="chain", q_len=70, heads=(1, 1)),
    "cap": _case(65, 33, logit_cap=30.0),
    "cap_tight": _case(65, 0, logit_cap=0.5, scale=4.0),
    "cap_window_f16": _case(90, 33, logit_cap=5.0, window_left=20, dtype=F16),
    "sharp": _case(300, 33, scale=20.0),
    "many_partials": _case(900, q_len=2, heads=(2, 1), head_dim=16),
}
# of those, what differs from another in numbers that kernels have as constants, but branch not by
NUMBERS = {
    *("draft_step_0", "draft_wide", "decode_padded", "padded", "chain", "any_bits"),
    *("group_3", "group_8", "group_16", "rows_72_f16"),
    *("tail_5", "tail_32", "tail_33", "tail_63", "tail_64", "tail_128", "blind_rows", "tree_of_65"),
    *("window_1", "window_beyond", "window_padded", "window_draft", "cap_tight", "sharp"),
}
MANY_SPLITS = {"many_partials", "long_beside_short", "batch_of_19", "window_17", "blind_rows"}
BIG = {
    name: _case(*lengths, **{"head_dim": 128, "mode": "any"} | options)
    for name, lengths, options in (
        ("decode", (0, 1, 63, 64, 65, 4000), {"q_len": 1, "heads": (32, 8), "mode": "chain"}),
        ("verify_8", (130, 2500, 64, 0), {"q_len": 8, "heads": (16, 4)}),
        ("verify_64", (1030, 65), {"q_len": 64, "heads": (8, 2), "mode": "tree"}),
        ("tail_200", (1030, 0), {"q_len": 8, "tail_len": 200, "heads": (14, 2)}),
        ("window", (3000, 700), {"q_len": 8, "window_left": 511, "heads": (8, 2)}),
        ("head_256", (1500, 65), {"q_len": 8, "head_dim": 256, "heads": (8, 2)}),
        ("head_256_wide", (1500, 65), {"q_len": 40, "head_dim": 256, "heads": (8, 2)}),
        ("head_192", (1500, 65), {"q_len": 8, "head_dim": 192, "v_head_dim": 128}),
        ("head_80", (1500, 65), {"q_len": 8, "head_dim": 80, "heads": (6, 2)}),
        ("head_64", (1500, 65), {"q_len": 8, "head_dim": 64, "heads": (6, 2)}),
        ("batch_600", tuple(i % 90 for i in range(600)), {"q_len": 1, "heads": (2, 1)}),
        ("cap", (1500, 65), {"q_len": 8, "logit_cap": 30.0}),
    )
}


def make(name: str, **options: Any) -> Case:
    return make_tree_case(**{"dtype": LAYOUT} | CASES[name] | options, device=DEVICE)


@pytest.mark.parametrize("name", compiled(CASES, without=NUMBERS))
def test_kernel_and_naive_match_the_oracle(name: str) -> None:
    case = make(name)
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


@pytest.mark.parametrize("name", compiled(["tile_edges", "padded", "rows_72_f16"], without=NUMBERS))
def test_short_runs_take_the_masked_loop(name: str) -> None:
    """And lse is optional."""
    case = make(name)
    attend(make_kernel(case), case, lse=False)
    check(case, oracle_tree(case), lse=False)


@pytest.mark.gpu
@sampled(third, name=BIG.keys(), dtype=[F32, BF16, F16])
def test_kernel_matches_the_oracle_at_size(name: str, dtype: torch.dtype) -> None:
    case = make_tree_case(**BIG[name], dtype=dtype, device=DEVICE)
    expected = oracle_tree(case)
    attend(make_kernel(case), case)
    check(case, expected)
    case.clear()
    run_naive(case)
    check(case, expected)


# what a request's cached keys are: all no numbers, or one of them
SPOILED = {"all": slice(None), "first": slice(0, 1), "last": slice(-1, None)}


@pytest.mark.parametrize("which", SPOILED)
@pytest.mark.parametrize(
    "form", ["tree", "cap_f16", "window", "lists", pytest.param("bf16", marks=pytest.mark.gpu)]
)
def test_keys_that_are_no_numbers_give_none(form: str, which: str) -> None:
    """In every head of their request, in results and sums, and in no other request's."""
    options: dict[str, Any] = {
        "cap_f16": {"logit_cap": 10.0, "dtype": F16, "head_dim": 64},
        "window": {"window_left": 500},
        "bf16": {"dtype": BF16, "head_dim": 128, "heads": (32, 8)},
    }.get(form, {})
    build = make_csr_case if form == "lists" else make_tree_case
    case = build([300, 65, 40], **{"dtype": LAYOUT} | options, device=DEVICE)
    if form == "lists":
        slots = case.args["kv_indices"][: case.args["kv_indptr"][1]]
    else:
        slots = case.args["req_to_token"][case.args["req_pool_indices"][0], :300]
    expected = (oracle_csr if form == "lists" else oracle_tree)(case)
    case.k_cache[slots[SPOILED[which]].long()] = NAN
    check_first_has_none(case, expected, requests=3)


def test_tensors_may_be_views() -> None:
    """Row strides of the tail tensors, of q, out and lse; pools inside larger ones."""
    case = make("draft_step_2", window_left=40, pool_pad=5)
    expected = oracle_tree(case)
    names = ("positions", "tail_slots", "tail_positions", "tail_words")
    for pad, name in enumerate(names, start=3):
        tensor = case.args[name]
        shape = (tensor.shape[0], *(n + pad for n in tensor.shape[1:]))
        wide = torch.full(shape, 2**30, dtype=tensor.dtype, device=DEVICE)
        view = wide[tuple(slice(0, n) for n in tensor.shape)]
        case.args[name] = view.copy_(tensor)
    for name in ("q", "out", "lse"):
        tensor = getattr(case, name)
        wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + 2, *tensor.shape[2:]), NAN)
        setattr(case, name, wide[:, 1:-1].copy_(tensor))
    attend(make_kernel(case), case)
    check(case, expected)
    case.clear()
    run_naive(case)
    check(case, expected)


def test_one_plan_serves_all_layers_and_one_workspace_all_buckets() -> None:
    first = make_tree_case([70, 130], device=DEVICE)
    other = make_tree_case([33, 0, 5], q_len=2, device=DEVICE, seed=1)
    workspace = torch.full((1 << 20,), 255, dtype=torch.uint8, device=DEVICE)
    kernels = [make_kernel(c, workspace=lambda n: workspace[:n]) for c in (first, other)]
    for case, kernel in zip((first, other), kernels, strict=True):
        plan(kernel, case)
    for _ in range(2):
        for case, kernel in zip((first, other), kernels, strict=True):
            case.clear()
            run(kernel, case)
            check(case, oracle_tree(case))
            case.k_cache.copy_(case.k_cache.roll(1, 1))  # the next layer's


def test_replanning_leaves_nothing_behind() -> None:
    long = make_tree_case([200, 90, 130], device=DEVICE)
    short = make_tree_case([0, 5, 1], device=DEVICE)
    kernel = make_kernel(long)
    for case in (long, short):
        attend(kernel, case)
        check(case, oracle_tree(case))


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("merge", [MergeTile(4, 2), MergeTile(4, 3, many=4), MergeTile(8, 33)])
def test_merges_rescale_what_came_before(merge: MergeTile, rising: bool) -> None:
    """Partials weigh ever more, or ever less; fewer are taken at once than there are."""
    case = make_tree_case([900, 33], q_len=2, heads=(2, 1), head_dim=16, device=DEVICE)
    slots = case.args["req_to_token"][case.args["req_pool_indices"][0], :900].long()
    weight = torch.linspace(0, 4, 900, device=DEVICE) * (1 if rising else -1)
    # the larger a key along the query, the larger its logit
    case.q[:] = case.q.abs()
    case.k_cache[slots] = case.k_cache[slots] * 0.1 + weight[:, None, None]
    kernel = make_kernel(case, ctas=8)
    kernel.kernels.merge_tile = merge
    attend(kernel, case)
    assert kernel.tables.merges[1, 2] > 8
    check(case, oracle_tree(case))


def test_equal_inputs_give_equal_bits() -> None:
    case = make_tree_case([130, 64, 1], device=DEVICE)
    kernel = make_kernel(case)
    results = []
    for _ in range(2):
        attend(kernel, case)
        results.append(case.out.clone())
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["tree", "draft"])
def test_one_graph_serves_every_length(mode: str) -> None:
    batches = ([5000, 3, 0, 700], [0, 0, 0, 0], [64, 65, 63, 1], [9000, 9000, 9000, 9000])
    cases = [
        make_tree_case(
            b,
            mode=mode,
            q_len=8,
            tail_len=24 if mode == "draft" else 8,
            heads=(8, 2),
            head_dim=128,
            dtype=BF16,
            device=DEVICE,
            width=9100,
            slots=40_000,
            seed=i,
        )
        for i, b in enumerate(batches)
    ]
    live = make_tree_case(
        [1, 1, 1, 1],
        mode=mode,
        q_len=8,
        tail_len=24 if mode == "draft" else 8,
        heads=(8, 2),
        head_dim=128,
        dtype=BF16,
        device=DEVICE,
        width=9100,
        slots=40_000,
    )
    kernel = make_kernel(live)

    replay = recorded(lambda: attend(kernel, live))
    for case in cases:
        refill(live, case)
        replay()
        check(live, oracle_tree(case))


CSR = {
    "ragged": ([65, 1, 130, 33], {}),
    "empty_lists": ([0, 40, 0, 0], {}),
    "all_empty": ([0, 0], {}),
    "window": ([65, 1, 0, 130], {"window_left": 20}),
    "window_0": ([65, 1, 0], {"window_left": 0}),
    "cap_f16": ([65, 3], {"logit_cap": 10.0, "dtype": F16, "head_dim": 64}),
    "many": ([(5 * i) % 37 for i in range(21)], {"heads": (6, 2)}),
}


@pytest.mark.parametrize("name", CSR)
def test_index_lists(name: str) -> None:
    lengths, options = CSR[name]
    case = make_csr_case(lengths, **{"dtype": LAYOUT} | options, device=DEVICE)
    expected = oracle_csr(case)
    attend(make_kernel(case), case)
    check(case, expected)
    for lse in (True, False):
        case.clear()
        run_naive(case, lse=lse)
        check(case, expected, lse=lse)


def test_index_lists_equal_the_table() -> None:
    """A draft step's branches as lists of their visible slots see what the words say."""
    case = make_tree_case(**CASES["draft_step_2"], device=DEVICE)
    attend(make_kernel(case), case)
    lists = visible_slots(case.kind, case.args)
    lengths = torch.tensor([0] + [len(slots) for slots in lists])
    flat_slots = [slot for slots in lists for slot in slots]
    flat = Case(
        **{
            **vars(case),
            "kind": "lists",
            "out": torch.full_like(case.out, NAN),
            "args": {
                "kv_indptr": lengths.cumsum(0).to(torch.int32).to(DEVICE),
                "kv_indices": torch.tensor(flat_slots, dtype=torch.int32, device=DEVICE),
            },
        },
    )
    attend(make_kernel(flat), flat)
    torch.testing.assert_close(flat.out, case.out, atol=2e-6, rtol=2e-6)


def test_errors_name_the_argument() -> None:
    case = make_tree_case([5, 6], device=DEVICE)
    kernel = make_kernel(case)
    with pytest.raises(ValueError, match="seq_lens must be"):
        kernel.plan(case.args["seq_lens"].long(), case.args["req_pool_indices"], 8)
    plan(kernel, case)
    with pytest.raises(ValueError, match=r"q must be \[8, 4, 32\] torch.float32"):
        run(kernel, replace(case, q=case.q[:-1]))
    with pytest.raises(ValueError, match="k_cache must be"):
        run(kernel, replace(case, k_cache=case.k_cache.half()))
    with pytest.raises(ValueError, match="v_cache must be dense in its last"):
        run(kernel, replace(case, v_cache=case.v_cache.mT.contiguous().mT))
    with pytest.raises(ValueError, match=r"lse must be .* torch\.float32"):
        run(kernel, replace(case, lse=case.lse.double()))
    with pytest.raises(ValueError, match="tail_slots must be"):
        run(kernel, replace(case, args=case.args | {"tail_slots": case.args["tail_words"]}))
    with pytest.raises(ValueError, match="workspace must be uint8"):
        make_kernel(case, workspace=lambda size: torch.empty(8, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(ValueError, match="csr needs q_len 1"):
        make_kernel(case, csr=True)
