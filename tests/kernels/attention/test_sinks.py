"""Attention sinks, kernels and torch, against the float64 oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from specattn.kernels.attention import gluon
from specattn.kernels.attention.tiles import FLOAT8, GluonTile, gluon_tile_config
from specattn.testing.determinism import as_decode, as_lists, picked, resumed
from tests.kernels.attention.calls import (
    attend,
    make_kernel,
    plan,
    poison,
    run,
    run_deterministic,
    run_extend,
    run_naive,
)
from tests.kernels.attention.test_gluon import hopper
from tests.oracle import (
    LAYOUT,
    Case,
    check,
    make_csr_case,
    make_extend_case,
    make_tree_case,
)
from tests.recordings import recorded, refill
from tests.samples import compiled, half, on_cpu, sampled, third

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# whether an lse is asked for; on a GPU, whose compiler makes a kernel of each, in one test
LSE = (True, False) if DEVICE == "cpu" else (True,)

# what differs from: a random tree of 4 nodes, 4 query and 2 KV heads of 32
TREES: dict[str, dict[str, Any]] = {
    "empty_prefixes": {"lengths": [0, 0, 0]},
    "tile_edges": {"lengths": [31, 32, 33, 0, 1, 63, 64, 65]},
    "one_request": {"lengths": [130]},
    "long_beside_short": {"lengths": [700, 3, 64, 0, 17], "q_len": 3},
    "decode_padded": {"lengths": [65], "q_len": 1, "mode": "chain", "pads": 4},
    "draft": {"lengths": [65, 31, 0], "mode": "draft", "tail_len": 12},
    "blind_rows": {"lengths": [0, 0], "q_len": 7, "tail_len": 250, "mode": "any", "seed": 3},
    "group_1": {"lengths": [33, 31], "heads": (3, 3), "q_len": 5},
    "group_7": {"lengths": [40], "heads": (7, 1), "q_len": 6},
    "group_8_head_64_f16": {
        "lengths": [140, 9],
        "heads": (16, 2),
        "head_dim": 64,
        "q_len": 9,
        "dtype": F16,
        "sinks": F16,
    },
    "tree_of_100": {"lengths": [20], "q_len": 100, "heads": (2, 1), "head_dim": 16},
    "head_80_v_64": {"lengths": [33, 8], "head_dim": 80, "v_head_dim": 64, "pool_pad": 3},
    "window_0": {"lengths": [64, 33, 0], "window_left": 0},
    "window": {"lengths": [130, 30, 1], "window_left": 17, "q_len": 6},
    "window_any": {"lengths": [70, 40], "window_left": 2, "q_len": 7, "mode": "any"},
    "cap": {"lengths": [65, 33], "logit_cap": 3.0},
    "cap_window_f16": {"lengths": [90, 33], "logit_cap": 5.0, "window_left": 20, "dtype": F16},
    "sharp": {"lengths": [300, 33], "scale": 20.0},
    "flat": {"lengths": [300, 33], "scale": 0.01},
    "many_partials": {"lengths": [900], "q_len": 2, "heads": (2, 1), "head_dim": 16},
}
PROMPTS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "ragged": ([(65, 7), (0, 33), (5, 0), (130, 1)], {}),
    "group_3": ([(33, 20), (0, 7)], {"heads": (6, 2)}),
    "head_64_f16": ([(60, 40), (0, 3)], {"dtype": F16, "sinks": F16, "head_dim": 64}),
    "window_0": ([(40, 5), (0, 20)], {"window_left": 0}),
    "window": ([(40, 50), (0, 20), (3, 1)], {"window_left": 7}),
    "cap": ([(40, 20)], {"logit_cap": 5.0}),
}
# of those, what differs from another in numbers that kernels have as constants alone
NUMBERS = {
    "decode_padded",
    "draft",
    "group_1",
    "group_7",
    "tree_of_100",
    "window_0",
    "window_any",
    "many_partials",
    "group_3",
}
# every head's sink
SINKS = {
    "none": [-math.inf],
    "huge": [1e4],
    "tiny": [-1e4],
    "mixed": [-math.inf, 1e30, -3e38, 0.0],
}


def tree(name: str, **options: Any) -> Case:
    form = {"sinks": F32, "dtype": LAYOUT, "device": DEVICE}
    return make_tree_case(**form | TREES[name] | options)


def with_sinks(case: Case, values: list[float]) -> Case:
    heads = case.q.shape[1]
    case.sinks = torch.tensor((values * heads)[:heads], device=DEVICE)
    return case


def check_naive(case: Case, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for lse in (True, False):
        case.clear()
        run_naive(case, lse=lse)
        check(case, expected, lse=lse)


def check_kernel(case: Case, expected: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
    kernel = make_kernel(case, **options)
    poison(kernel)
    for lse in LSE:
        attend(kernel, case, lse=lse)
        check(case, expected, lse=lse)


@pytest.mark.parametrize("name", compiled(TREES, without=NUMBERS))
def test_trees(name: str) -> None:
    case = tree(name)
    expected = case.expected()
    check_naive(case, expected)
    tile = replace(make_kernel(case).tile, short=0)
    check_kernel(case, expected, tile=tile)
    # many splits of a request, as a GPU's multiprocessors make in any case
    if DEVICE == "cpu":
        check_kernel(case, expected, ctas=8)
    # and the same order of sums whatever the batch
    if case.args["tail_slots"].shape[1]:
        check(run_deterministic(case, split_keys=64), expected)


def test_a_request_may_be_cut_or_not() -> None:
    """Both in one batch, and all of the same result."""
    case = tree("long_beside_short", dtype=F32)
    kernel = make_kernel(case, ctas=8)
    plan(kernel, case)
    merged = int(kernel.tables.merges[0, 0])
    assert 0 < merged < len(case.args["seq_lens"])
    results = []
    for ctas in (1, 8):
        attend(make_kernel(case, ctas=ctas), case)
        results.append(case.out.clone())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", compiled(PROMPTS, without=NUMBERS))
def test_prompts(name: str) -> None:
    lengths, options = PROMPTS[name]
    form = {"sinks": F32, "dtype": LAYOUT, "device": DEVICE}
    case = make_extend_case(lengths, **form | options)
    expected = case.expected()
    check_naive(case, expected)
    for deterministic in (False, True):
        case.clear()
        run_extend(case, deterministic=deterministic)
        check(case, expected)


@pytest.mark.parametrize("window_left", [-1, 9])
def test_index_lists(window_left: int) -> None:
    form = {"sinks": F32, "dtype": LAYOUT, "device": DEVICE}
    case = make_csr_case([70, 0, 33, 1], window_left=window_left, **form)
    expected = case.expected()
    check_naive(case, expected)
    check_kernel(case, expected)
    check_kernel(case, expected, ctas=8)


@on_cpu(half, "name", "cap")
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("name", SINKS)
def test_sinks_of_any_size(name: str, cap: float) -> None:
    """-inf is no sink; one above all logits leaves nothing of the values, and is the lse."""
    case = with_sinks(tree("long_beside_short", logit_cap=cap), SINKS[name])
    expected = case.expected()
    check_naive(case, expected)
    check_kernel(case, expected, ctas=8)
    check(run_deterministic(case, split_keys=64), expected)
    prompt = make_extend_case([(33, 20), (0, 7)], logit_cap=cap, dtype=LAYOUT, device=DEVICE)
    with_sinks(prompt, SINKS[name])
    run_extend(prompt)
    check(prompt, prompt.expected())
    if name == "huge":
        assert not case.out.any()
        assert (case.lse == 1e4).all()


def test_no_sink_is_no_sinks() -> None:
    case = tree("tile_edges", sinks=None, dtype=F32)
    attend(make_kernel(case), case)
    want = case.out.clone(), case.lse.clone()
    attend(make_kernel(case), with_sinks(case, [-math.inf]))
    torch.testing.assert_close(case.out, want[0], rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(case.lse, want[1], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    "form",
    [{"head_dim": 32}, {"head_dim": 64}, {"kv_dtype": FLOAT8, "head_dim": 64}, {"dtype": F32}],
    ids=str,
)
def test_the_lse_is_optional(form: dict[str, Any]) -> None:
    case = tree("long_beside_short", **{"dtype": F16} | form)
    attend(make_kernel(case, ctas=8), case, lse=False)
    check(case, case.expected(), lse=False)


def test_rows_that_see_no_key_are_0_and_their_lse_the_sink() -> None:
    case = tree("blind_rows")
    case.args["tail_words"][0, :3] = 0
    assert case.sinks is not None
    for kernel in (make_kernel(case), make_kernel(case, ctas=8)):
        attend(kernel, case)
        check(case, case.expected())
        assert not case.out[:3].any()
        torch.testing.assert_close(case.lse[:3], case.sinks.expand(3, -1))


def test_layers_of_one_plan_have_sinks_of_their_own() -> None:
    case = tree("one_request")
    kernel = make_kernel(case)
    plan(kernel, case)
    for _ in range(2):
        case.clear()
        run(kernel, case)
        check(case, case.expected())
        assert case.sinks is not None
        case.sinks = case.sinks.flip(0).contiguous()
    case.sinks = None
    case.clear()
    run(kernel, case)
    check(case, case.expected())


@pytest.mark.parametrize("window_left", [-1, 33])
def test_deterministic_sinks(window_left: int) -> None:
    """A row has the bits of decoding its path, in any batch, with windows that cut its keys."""
    case = make_tree_case(
        [190, 0, 65],
        q_len=3,
        window_left=window_left,
        evict=False,
        sinks=F32,
        dtype=LAYOUT,
        device=DEVICE,
    )
    rows = list(range(len(case.q)))
    run_deterministic(case, split_keys=64)
    check(case, case.expected())
    want = case.out.clone(), case.lse.clone()
    for other, at in (
        (as_decode(case, rows), rows),
        (as_lists(case, rows), rows),
        (picked(case, [2, 0], pads=2), [6, 7, 8, 0, 1, 2]),
    ):
        run_deterministic(other, split_keys=64, ctas=8)
        assert torch.equal(other.out[: len(at)], want[0][at])
        assert torch.equal(other.lse[: len(at)], want[1][at])


@pytest.mark.parametrize("window_left", [-1, 17])
def test_deterministic_prompts(window_left: int) -> None:
    case = make_extend_case(
        [(33, 40), (64, 9)],
        window_left=window_left,
        evict=False,
        sinks=F32,
        dtype=LAYOUT,
        device=DEVICE,
    )
    run_extend(case, deterministic=True)
    want = case.out.clone()
    for piece, rows in resumed(case, [17, 4]):
        run_extend(piece, deterministic=True)
        assert torch.equal(piece.out, want[rows])


@pytest.mark.parametrize(
    "sinks",
    [
        torch.zeros(3, device=DEVICE),
        torch.zeros(4, dtype=torch.int64, device=DEVICE),
        torch.zeros(8, device=DEVICE)[::2],
        torch.zeros(4, 1, device=DEVICE),
    ],
    ids=["heads", "dtype", "strides", "axes"],
)
def test_errors_name_the_sinks(sinks: torch.Tensor) -> None:
    case = tree("one_request")
    with pytest.raises(ValueError, match=r"^sinks must be \[4\] float32, float16 or bfloat16"):
        make_kernel(case).with_sinks(sinks)
    prompt = make_extend_case([(5, 3)], device=DEVICE)
    with pytest.raises(ValueError, match=r"^sinks must be \[4\]"):
        run_extend(replace(prompt, sinks=sinks))


# gpt-oss: 64 query heads over 8 KV heads of 64, a window of 128 in every other layer
OSS: dict[str, Any] = {"heads": (64, 8), "head_dim": 64}
BIG: dict[str, dict[str, Any]] = {
    "decode": {"lengths": [0, 1, 64, 65, 4000], "q_len": 1, "mode": "chain"},
    "verify_16": {"lengths": [2500, 64, 0, 130], "q_len": 16},
    "window": {"lengths": [3000, 100, 0], "q_len": 16, "window_left": 127},
    "draft": {"lengths": [2100, 0], "mode": "draft", "tail_len": 12},
    "tail_200": {"lengths": [1030, 0], "q_len": 8, "tail_len": 200, "mode": "any"},
    "cap": {"lengths": [1500, 65], "q_len": 8, "logit_cap": 30.0},
    "batch_200": {"lengths": [i % 90 for i in range(200)], "q_len": 1, "heads": (2, 1)},
    "head_128": {"lengths": [1500, 65], "q_len": 8, "heads": (32, 8), "head_dim": 128},
    "head_128_wide": {"lengths": [1500, 65], "q_len": 64, "heads": (8, 2), "head_dim": 128},
    "head_256": {"lengths": [1500, 65], "q_len": 8, "heads": (8, 2), "head_dim": 256},
    "head_80": {"lengths": [1500, 65], "q_len": 8, "heads": (6, 2), "head_dim": 80},
}


@pytest.mark.gpu
@sampled(third, name=BIG.keys(), dtype=[F32, F16, BF16])
def test_trees_at_size(name: str, dtype: torch.dtype) -> None:
    case = make_tree_case(**OSS | BIG[name], dtype=dtype, sinks=dtype, device=DEVICE)
    expected = case.expected()
    check_kernel(case, expected)
    check_naive(case, expected)
    check(run_deterministic(case, split_keys=1024), expected)


@pytest.mark.gpu
@sampled(
    half,
    head_dim=[64, 128],
    options=[{}, {"window_left": 127}, {"logit_cap": 30.0}],
    dtype=[BF16, F16],
)
def test_prompts_at_size(head_dim: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    lengths = [(0, 700), (1500, 65), (64, 1), (0, 0), (129, 128)]
    form = {"head_dim": head_dim, "heads": (16, 2), "dtype": dtype, "sinks": dtype}
    for page_size in (1, 16):
        case = make_extend_case(lengths, **form | options, page_size=page_size, device=DEVICE)
        run_extend(case, page_size=page_size)
        check(case, case.expected())


@pytest.mark.gpu
def test_lists_at_size() -> None:
    case = make_csr_case([700, 0, 64, 1, 2000], **OSS, dtype=BF16, sinks=BF16, device=DEVICE)
    check_kernel(case, case.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("window_left", [-1, 127])
def test_one_graph_serves_every_length(window_left: int) -> None:
    options: dict[str, Any] = {
        **OSS,
        "q_len": 8,
        "window_left": window_left,
        "evict": False,
        "dtype": BF16,
        "sinks": BF16,
        "device": DEVICE,
        "width": 9100,
        "slots": 40_000,
    }
    live = make_tree_case([1, 1, 1, 1], **options)
    kernel = make_kernel(live)
    replay = recorded(lambda: attend(kernel, live))
    batches = ([5000, 3, 0, 700], [0, 0, 0, 0], [64, 65, 63, 1], [9000, 9000, 9000, 9000])
    for seed, lengths in enumerate(batches):
        case = make_tree_case(lengths, **options, seed=seed)
        refill(live, case)
        assert live.sinks is not None
        assert case.sinks is not None
        # a recording reads the tensor, not what it held
        live.sinks.copy_(case.sinks)
        replay()
        check(live, live.expected())


class TestOnHopper:
    pytestmark = hopper

    @sampled(half, name=[name for name in BIG if name != "head_80"], dtype=[BF16, F16])
    def test_trees(self, name: str, dtype: torch.dtype) -> None:
        case = make_tree_case(**OSS | BIG[name], dtype=dtype, sinks=F32, device=DEVICE)
        kernel = make_kernel(case)
        assert isinstance(kernel.tile, GluonTile)
        expected = case.expected()
        check_kernel(case, expected)
        # a later layer of the plan reads the prefix before it waits
        plan(kernel, case)
        run(kernel, case)
        case.clear()
        run(kernel.for_layer(None, prefetch=True), case)
        check(case, expected)

    @pytest.mark.parametrize("page_size", [16, 64])
    def test_pages(self, page_size: int) -> None:
        options = OSS | BIG["verify_16"] | {"page_size": page_size}
        case = make_tree_case(**options, dtype=BF16, sinks=F32, device=DEVICE)
        check_kernel(case, case.expected(), page_size=page_size)

    @pytest.mark.parametrize("ctas", [1, 2])
    def test_splits(self, ctas: int) -> None:
        options = OSS | BIG["verify_16"]
        case = make_tree_case(**options, dtype=BF16, sinks=BF16, device=DEVICE)
        tile = gluon_tile_config(128, 64, 4, 1, BF16)
        check_kernel(case, case.expected(), tile=replace(tile, ctas_per_sm=ctas))

    @pytest.mark.parametrize("name", ["decode", "verify_16", "window", "head_128_wide"])
    def test_float8_keys(self, name: str) -> None:
        options = OSS | BIG[name] | {"kv_dtype": FLOAT8, "kv_scales": (0.7, 1.9)}
        case = make_tree_case(**options, dtype=BF16, sinks=F32, device=DEVICE)
        kernel = make_kernel(case)
        assert isinstance(kernel.tile, GluonTile)
        check_kernel(case, case.expected())

    @pytest.mark.parametrize("name", SINKS)
    def test_sinks_of_any_size(self, name: str) -> None:
        case = make_tree_case(**OSS | BIG["verify_16"], dtype=BF16, device=DEVICE)
        with_sinks(case, SINKS[name])
        check_kernel(case, case.expected())

    @pytest.mark.parametrize("page_size", [1, 64])
    @pytest.mark.parametrize("window_left", [-1, 127])
    def test_prompts(self, window_left: int, page_size: int) -> None:
        case = make_extend_case(
            [(0, 700), (1500, 265)],
            **OSS,
            window_left=window_left,
            page_size=page_size,
            dtype=BF16,
            sinks=BF16,
            device=DEVICE,
        )
        assert case.args["max_q_len"] * 8 > gluon.SHORT_PROMPT
        run_extend(case, page_size=page_size)
        check(case, case.expected())
