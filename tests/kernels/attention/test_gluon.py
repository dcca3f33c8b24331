"""The Gluon tree kernel, every tile of its table, against the float64 oracle."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from specattn.kernels.attention import TreeAttention, gluon
from specattn.kernels.attention.tiles import FLOAT8, GluonTile, gluon_tile_config
from specattn.kernels.attention.tree_attention import PREFETCH_BATCH
from specattn.kernels.fused import Rotation, qk_norm_rope_store_kv
from specattn.kernels.fused.stream import stream_linear
from tests.kernels.attention.calls import attend, make_kernel, plan, run
from tests.oracle import check, make_csr_case, make_tree_case, oracle_csr, oracle_tree
from tests.samples import half, sampled, star

F16, BF16 = torch.float16, torch.bfloat16

# prefix lengths, and what differs from: random trees, 16 query and 4 KV heads of 128
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "decode": ((0, 1, 63, 64, 65, 4000), {"q_len": 1, "mode": "chain", "heads": (32, 8)}),
    "verify_8": ((130, 2500, 64, 0), {"q_len": 8}),
    "verify_8_batch_12": (tuple((97 * i) % 700 for i in range(12)), {"q_len": 8, "pads": 3}),
    "chain": ((700, 1, 128), {"q_len": 5, "mode": "chain"}),
    "draft": ((2100, 0, 300), {"q_len": 4, "tail_len": 12, "mode": "draft"}),
    "any": ((1030, 0, 64), {"q_len": 8, "tail_len": 200, "mode": "any", "heads": (14, 2)}),
    "verify_32": ((1030, 65, 0), {"q_len": 32, "heads": (8, 2)}),
    "verify_20_window": ((700, 130), {"q_len": 20, "heads": (8, 2), "window_left": 99}),
    "verify_64": ((1030, 65, 0), {"q_len": 64, "heads": (8, 2)}),
    "verify_70": ((130, 1500), {"q_len": 70, "heads": (8, 2), "mode": "any"}),
    "window": ((3000, 700, 100), {"q_len": 8, "window_left": 511}),
    "window_in_tail": ((300, 20), {"q_len": 40, "mode": "chain", "window_left": 17}),
    "cap": ((1500, 65), {"q_len": 8, "logit_cap": 30.0}),
    "cap_batch_9": (tuple((97 * i) % 700 for i in range(9)), {"q_len": 8, "logit_cap": 30.0}),
    "cap_window_wide": ((900, 64), {"q_len": 40, "logit_cap": 5.0, "window_left": 200}),
    "head_64": ((1500, 65), {"q_len": 8, "head_dim": 64, "heads": (6, 2)}),
    "head_64_wide": ((1500, 65), {"q_len": 40, "head_dim": 64, "heads": (6, 2)}),
    "head_256": ((1500, 65), {"q_len": 8, "head_dim": 256, "heads": (8, 2)}),
    "head_256_wide": ((1500, 65), {"q_len": 40, "head_dim": 256, "heads": (8, 2)}),
    "batch_200": (tuple(i % 90 for i in range(200)), {"q_len": 1, "heads": (2, 1)}),
}


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


hopper = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper(), reason="the kernel is for SM90")]


def _case(name: str, dtype: torch.dtype, **options: Any) -> Any:
    lengths, form = CASES[name]
    defaults = {"heads": (16, 4), "head_dim": 128}
    return make_tree_case(list(lengths), **defaults | form | options, dtype=dtype, device="cuda")


def _check(case: Any, tile: GluonTile | None, page_size: int = 1, *, lse: bool = True) -> None:
    expected = oracle_tree(case)
    kernel = make_kernel(case, tile=tile, page_size=page_size)
    assert isinstance(kernel.tile, GluonTile)
    plan(kernel, case)
    case.clear()
    kernel.workspace[0].fill_(torch.nan)
    kernel.workspace[1].fill_(torch.nan)
    run(kernel, case, lse=lse)
    check(case, expected, lse=lse)


def _late_store(case: Any, kernel: TreeAttention, again: TreeAttention) -> torch.cuda.CUDAGraph:
    """Record a plan, attention, and attention ``again`` after a product and a store of its keys.

    Product and store let what follows start before they have waited. Until the store, the tail is
    NaN.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    q_len, (rows, heads, dim) = kernel.q_len, case.q.shape
    kv_heads = case.k_cache.shape[1]
    partials, weight, x = (
        torch.randn(*shape, device="cuda", generator=generator).to(BF16)
        for shape in ((1, rows, (heads + 2 * kv_heads) * dim), (8192, 4096), (16, 4096))
    )
    # cosines and sines that turn nothing
    table = torch.cat([torch.ones(1, dim // 2), torch.zeros(1, dim // 2)], dim=-1).to("cuda")
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    slots = case.args["tail_slots"][:, -q_len:]
    places, case.q = slots.flatten().long(), torch.zeros(rows, heads, dim, device="cuda").to(BF16)

    def record() -> None:
        plan(kernel, case)
        run(kernel, case)
        for cache in (case.k_cache, case.v_cache):
            cache.index_fill_(0, places, torch.nan)
        case.out.fill_(torch.nan)
        stream_linear(x, weight)
        qk_norm_rope_store_kv(
            partials,
            positions,
            Rotation(table),
            case.q,
            case.k_cache,
            case.v_cache,
            slots,
            prefetch=True,
        )
        run(again, case)

    record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    # tensors that the graph reads live as long as it does
    graph.kept = partials, weight, x, table, positions, places, case.q
    return graph


class TestOnHopper:
    pytestmark = hopper

    def test_the_kernel_is_in_use(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        assert gluon.serves(128, 128, BF16, device)
        assert not gluon.serves(128, 128, torch.float32, device)
        assert not gluon.serves(96, 96, BF16, device)

    @sampled(star, name=CASES.keys(), dtype=[BF16, F16])
    def test_rows(self, name: str, dtype: torch.dtype) -> None:
        _check(_case(name, dtype), None)

    @pytest.mark.parametrize("name", ["decode", "verify_64", "head_256"])
    def test_the_lse_is_optional(self, name: str) -> None:
        _check(_case(name, BF16), None, lse=False)

    @sampled(
        half,
        name=["verify_64", "verify_70", "cap_window_wide", "head_64_wide"],
        page_size=[16, 64, 128, 256],
    )
    def test_pages(self, name: str, page_size: int) -> None:
        case = _case(name, BF16, page_size=page_size)
        kernel = make_kernel(case, page_size=page_size)
        assert kernel.tile.pages
        _check(case, None, page_size)

    @sampled(half, name=["decode", "verify_8", "window", "batch_200"], page_size=[16, 64])
    def test_pages_of_narrow_tiles(self, name: str, page_size: int) -> None:
        case = _case(name, BF16, page_size=page_size)
        tile = replace(gluon_tile_config(32, 128, 64, 1, BF16), pages=True)
        _check(case, tile, page_size)

    @pytest.mark.parametrize("splits", [1, 3, 40])
    def test_any_number_of_splits(self, splits: int) -> None:
        """One CTA for all requests, cuts within them, and more splits than tiles."""
        case = _case("verify_8", BF16)
        tile = gluon_tile_config(32, 128, 4, 1, BF16)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        tile = replace(tile, ctas_per_sm=max(1, splits * 4 // sms))
        kernel = make_kernel(case, tile=tile)
        if splits < 4:
            launches, tables = kernel.kernels, kernel.tables
            launches.tables = copy(tables)
            launches.tables.splits = tables.splits[:splits]
            launches.splits = splits
        attend(kernel, case)
        check(case, oracle_tree(case))

    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    def test_index_lists(self, dtype: torch.dtype) -> None:
        case = make_csr_case(
            [700, 0, 64, 1, 2000], heads=(16, 4), head_dim=128, dtype=dtype, device="cuda"
        )
        expected = oracle_csr(case)
        kernel = make_kernel(case)
        assert isinstance(kernel.tile, GluonTile)
        attend(kernel, case)
        check(case, expected)

    def test_equal_inputs_give_equal_bits(self) -> None:
        """200 replays of one graph, each compared on the device."""
        case = _case("verify_64", BF16)
        kernel = make_kernel(case)
        plan(kernel, case)
        run(kernel, case)
        want = case.out.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.out.fill_(torch.nan)
            run(kernel, case)
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(200):
            graph.replay()
            differ += (case.out != want).sum()
        assert differ.item() == 0

    @pytest.mark.parametrize(
        ("name", "page_size"),
        [
            ("decode", 1),
            ("verify_8", 1),
            ("draft", 1),
            ("window", 1),
            ("window_in_tail", 1),
            ("verify_32", 1),
            ("batch_200", 1),
            ("verify_64", 16),
        ],
    )
    def test_the_prefix_may_come_before_the_wait(self, name: str, page_size: int) -> None:
        """The same bits where keys of the tail are stored late, by the kernel right before."""
        case = _case(name, BF16, page_size=page_size)
        kernel = make_kernel(case, page_size=page_size)
        later = kernel.for_layer(None, prefetch=True)
        assert later.prefetch == (kernel.batch <= PREFETCH_BATCH)
        assert not kernel.prefetch
        later.prefetch = True
        graphs = [_late_store(case, kernel, again) for again in (kernel, later)]
        lengths = case.args["seq_lens"]
        whole, differ = lengths.clone(), torch.zeros((), dtype=torch.int64, device="cuda")
        # other plans, in the same graphs
        for cut in (0, 1, 130, 5000, 0):
            lengths.copy_((whole - cut).clamp(min=0))
            graphs[0].replay()
            want = case.out.clone()
            assert want.isfinite().all()
            for _ in range(20):
                graphs[1].replay()
                differ += (case.out != want).sum()
        assert differ.item() == 0

    @pytest.mark.parametrize("form", ["float8", "lists"])
    def test_where_nothing_may_come_before_the_wait(self, form: str) -> None:
        tail = 0 if form == "lists" else 1
        kernel = TreeAttention(
            batch=1,
            q_len=1,
            tail_len=tail,
            num_qo_heads=2,
            num_kv_heads=1,
            head_dim=64,
            v_head_dim=64,
            dtype=BF16,
            device="cuda",
            sm_scale=1.0,
            csr=not tail,
            kv_dtype=FLOAT8 if tail else None,
        )
        assert isinstance(kernel.tile, GluonTile)
        assert not kernel.for_layer(None, prefetch=True).prefetch

    def test_rows_must_be_aligned(self) -> None:
        case = _case("chain", BF16)
        case.k_cache = torch.nn.functional.pad(case.k_cache, (0, 4))[..., :128]
        kernel = make_kernel(case)
        plan(kernel, case)
        with pytest.raises(ValueError, match="k_cache must have rows aligned to 16 bytes"):
            run(kernel, case)


def test_only_hopper_and_16_bit_heads_are_served() -> None:
    cpu = torch.device("cpu")
    assert not gluon.serves(128, 128, BF16, cpu)


@pytest.mark.parametrize("rows", [1, 64, 65, 512])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tiles_fit_a_multiprocessor(rows: int, head_dim: int, page_size: int) -> None:
    for batch, kv_dtype in ((1, BF16), (8, BF16), (9, BF16), (300, BF16), (1, FLOAT8)):
        if kv_dtype == FLOAT8 and head_dim > 128:
            continue
        tile = gluon_tile_config(rows, head_dim, batch, page_size, kv_dtype)
        assert (tile.raw_stages > 0) == (kv_dtype == FLOAT8)
        keys = tile.block_n * (tile.stages + tile.raw_stages / 2)
        shared = 2 * head_dim * (tile.block_m + 2 * keys) + 32 * tile.stages
        assert tile.ctas_per_sm * (shared + 1024) <= 228 * 1024
        threads = 2 * tile.block_m + 128 * (3 if tile.raw_stages else 1)
        assert tile.ctas_per_sm * threads * tile.max_regs <= 65536
        assert rows > 64 or tile.block_m == 64
