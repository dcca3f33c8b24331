"""FlashInfer against the oracle; without a GPU, everything but its kernels.

On a GPU with the library these are its own kernels. Elsewhere a stand-in with the same host side
takes their place, so that plans, lists, masks and workspaces are tested on any machine.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from specattn.backends import load_backend
from specattn.backends.flashinfer import FlashInferBackend
from specattn.backends.flashinfer_bound import FlashInferRows, FlashInferTree
from specattn.backends.flashinfer_plan import MAX_TILING, Grid
from specattn.backends.layers import LayeredBackend
from specattn.backends.multi_step import MultiStepDraftBackend
from specattn.batch import Phase, RowLayout
from specattn.config import AttnConfig, SpecConfig
from specattn.errors import UnsupportedError
from specattn.kv import KVPool
from specattn.plan import AttnPlan, ExtendPlan
from specattn.slots import SlotTable
from tests.backends import fake_flashinfer as fake
from tests.oracle import (
    Case,
    check,
    make_extend_case,
    make_tree_case,
    oracle_extend,
    oracle_tree,
    tolerances_of,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = DEVICE == "cuda"
TOLERANCES = tolerances_of("flashinfer")
BF16 = torch.bfloat16
REASONS = FlashInferBackend.reasons


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    fake.install(monkeypatch)


def _case(*lengths: int, **options: Any) -> dict[str, Any]:
    return {"lengths": list(lengths), "head_dim": 64, **options}


# the options of the one kernel that is not compiled ahead in tests: a window of indices and a cap
BUILT = {"window_left": 6, "logit_cap": 3.0}
CHAIN = {"mode": "chain", "q_len": 1}
# prefix lengths, and what differs from: 4 nodes of a random tree, 4 query and 2 KV heads of 64
CASES = {
    "decode": _case(130, 7, 0, 64, **CHAIN),
    "decode_padded": _case(65, 129, **CHAIN, pads=3),
    "decode_long": _case(2500, 3, **CHAIN),
    "decode_group_1": _case(33, 31, **CHAIN, heads=(2, 2)),
    "decode_group_3": _case(65, 30, **CHAIN, heads=(6, 2)),
    "decode_group_4": _case(65, 200, **CHAIN, heads=(4, 1)),
    "decode_group_7": _case(40, 300, **CHAIN, heads=(7, 1)),
    "decode_group_16": _case(40, 0, **CHAIN, heads=(16, 1)),
    "decode_window": _case(130, 7, 0, **CHAIN, window_left=9),
    "draft_chain_step_2": _case(40, 0, 150, **CHAIN, tail_len=3),
    "draft_chain_window_4": _case(40, 0, 1, **CHAIN, tail_len=3, window_left=4),
    "draft_chain_window_1": _case(40, 0, 1, **CHAIN, tail_len=3, window_left=1),
    "chain": _case(64, 1, 0, 290, mode="chain", q_len=6),
    "chain_padded": _case(5, 128, mode="chain", q_len=5, pads=2),
    "tree": _case(130, 0, 64, 1, q_len=7),
    "tree_padded": _case(40, 65, pads=3, q_len=5),
    "tree_long": _case(2500, 17, q_len=8),
    "tree_of_70": _case(40, 0, q_len=70),
    "tree_group_8": _case(140, 9, q_len=9, heads=(8, 1)),
    "tree_window": _case(63, 4, 0, q_len=9, window_left=6),
    "tree_window_0": _case(20, 1, q_len=5, window_left=0),
    "draft_step_0": _case(50, 0, mode="draft", q_len=4),
    "draft_step_2": _case(65, 310, 0, mode="draft", q_len=4, tail_len=12),
    "draft_window": _case(65, 3, mode="draft", q_len=3, tail_len=9, window_left=4),
    "batch_of_19": _case(*((7 * i) % 41 for i in range(19)), q_len=3),
    "any_bits": _case(33, 0, 64, mode="any", q_len=7, tail_len=31),
    "head_128": _case(70, 140, q_len=5, head_dim=128),
    "head_128_decode": _case(70, 140, **CHAIN, head_dim=128, heads=(8, 2)),
}


def config_of(case: Case) -> AttnConfig:
    return AttnConfig(
        case.q.shape[1], case.k_cache.shape[1], case.q.shape[2], dtype=BF16, **case.settings
    )


class Live:
    """A backend bound once to the tensors of a case, into which other cases are copied."""

    def __init__(self, case: Case, causal: bool, backend: FlashInferBackend | None = None) -> None:
        _, q_len = case.args["positions"].shape
        layout = RowLayout(q_len, case.args["tail_slots"].shape[1], Phase.VERIFY, causal)
        self.case = case
        self.backend = backend or FlashInferBackend(config_of(case), torch.device(DEVICE))
        self.bound = self.backend.bind(AttnPlan(layout, **case.args))
        self.graph = None

    def load(self, case: Case) -> None:
        for name in ("q", "k_cache", "v_cache"):
            getattr(self.case, name).copy_(getattr(case, name))
        for name, value in case.args.items():
            self.case.args[name].copy_(value)

    def step(self) -> None:
        case = self.case
        self.bound.fill()
        self.bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)

    def record(self) -> None:
        """Capture ``fill`` and ``run``; without CUDA, replaying is calling them."""
        self.schedule()
        stream = torch.cuda.Stream() if CUDA else None
        if stream is None:
            self.step()
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def schedule(self, lens: torch.Tensor | None = None) -> None:
        self.bound.schedule(self.case.args["seq_lens"].cpu() if lens is None else lens)

    def replay(self, lens: torch.Tensor | None = None) -> None:
        self.case.clear()
        self.schedule(lens)
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()

    def verdict(self) -> None:
        check(self.case, oracle_tree(self.case), tolerances=TOLERANCES)


def case_of(name: str, **more: Any) -> tuple[Case, bool]:
    options = CASES[name] | more
    causal = options.get("mode") == "chain"
    return make_tree_case(**options, dtype=BF16, device=DEVICE), causal


@pytest.mark.parametrize("name", CASES)
def test_every_tree_mode_equals_the_oracle(name):
    live = Live(*case_of(name))
    live.replay()
    live.verdict()


class TwoPassesBackend(FlashInferBackend):
    """Trees as a pass over the prefix and one over the tail, however short."""

    two_passes_from = 0


# what stands for itself: no window, several branches or nodes
IN_TWO_PASSES = [name for name, options in CASES.items()
                 if options.get("mode") != "chain" and "window_left" not in options]


@pytest.mark.parametrize("name", IN_TWO_PASSES)
def test_prefix_and_tail_merged_by_lse_equal_the_oracle(name):
    case, causal = case_of(name)
    live = Live(case, causal, TwoPassesBackend(config_of(case), torch.device(DEVICE)))
    assert isinstance(live.bound, FlashInferTree)
    live.replay()
    live.verdict()


def test_the_longest_context_and_the_window_decide_about_two_passes():
    class Long(FlashInferBackend):
        two_passes_from = 4096

    for backend, options, kind in (
        (Long, {"width": 4095}, FlashInferRows),
        (Long, {"width": 4096}, FlashInferTree),
        (Long, {"width": 4096, "window_left": 9}, FlashInferRows),
        (Long, {"width": 4096, "mode": "chain"}, FlashInferRows),
    ):
        case = make_tree_case([9, 3], q_len=3, head_dim=64, dtype=BF16, device=DEVICE, **options)
        live = Live(case, "mode" in options, backend(config_of(case), torch.device(DEVICE)))
        assert type(live.bound) is kind


@pytest.mark.timeout(900)
def test_a_causal_window_and_a_cap_equal_the_oracle():
    """FlashInfer compiles this kernel when it is first used."""
    case = make_tree_case(
        [63, 4, 0, 200], q_len=5, mode="chain", head_dim=64, dtype=BF16, device=DEVICE, **BUILT
    )
    live = Live(case, causal=True)
    live.replay()
    live.verdict()


BATCHES = [[5, 0, 130], [300, 299, 1], [0, 0, 0], [64, 128, 63]]
RECORDED = {
    "decode": CHAIN,
    "decode_group_4": CHAIN | {"heads": (8, 2)},
    "chain": {"mode": "chain", "q_len": 5},
    "tree": {"q_len": 7},
    "tree_window": {"q_len": 7, "window_left": 5},
    "draft": {"mode": "draft", "q_len": 3, "tail_len": 6},
}


def batches(options: dict[str, Any]) -> list[Case]:
    """Batches of one shape: other lengths, slots, trees, queries and pools."""
    shape = {"width": 400, "slots": 1000, "pads": 1, "head_dim": 64}
    return [
        make_tree_case(lens, seed=seed, dtype=BF16, device=DEVICE, **shape, **options)
        for seed, lens in enumerate([[0, 0, 0], *BATCHES])
    ]


@pytest.mark.parametrize(("name", "kind"), [
    *((name, FlashInferBackend) for name in RECORDED),
    ("tree", TwoPassesBackend), ("draft", TwoPassesBackend),
])
def test_a_recording_serves_other_lengths_and_new_trees(name, kind):
    first, *others = batches(RECORDED[name])
    backend = kind(config_of(first), torch.device(DEVICE))
    live = Live(first, RECORDED[name].get("mode") == "chain", backend)
    live.record()
    for case in others:
        live.load(case)
        live.replay()
        live.verdict()


def test_recordings_in_turn_do_not_disturb_each_other():
    """R28: one backend, its float workspace shared, a wrapper and an int workspace each."""
    made: list[tuple[Live, list[Case]]] = []
    for options in (RECORDED["chain"], RECORDED["tree"], RECORDED["draft"]):
        first, *others = batches(options)
        backend = made[0][0].backend if made else None
        live = Live(first, options.get("mode") == "chain", backend)
        live.record()
        made.append((live, others))
    ints = {live.bound.wrapper._int_workspace_buffer.data_ptr() for live, _ in made}
    assert len(ints) == len(made)
    for turn in range(len(BATCHES)):
        for live, others in made:
            live.load(others[turn])
        for live, _ in reversed(made):
            live.replay()
        for live, _ in made:
            live.verdict()


def test_the_host_may_run_ahead_of_the_device():
    """A plan waits in pinned memory until the device has fetched it."""
    first, *others = batches(RECORDED["tree"])
    live = Live(first, causal=False)
    live.record()
    weight = torch.randn(4096, 4096, device=DEVICE) if CUDA else torch.ones(1, 1)
    found, lens = [], [case.args["seq_lens"].cpu() for case in others]
    for case, on_host in zip(others, lens, strict=True):
        for _ in range(20):
            weight = weight @ weight * 1e-3
        live.load(case)
        live.replay(on_host)
        found.append((live.case.out.clone(), live.case.lse.clone()))
    for case, (out, lse) in zip(others, found, strict=True):
        case.out, case.lse = out, lse
        check(case, oracle_tree(case), tolerances=TOLERANCES)


@pytest.mark.parametrize(("scheduled", "options"), [(True, {}), (False, {}), (True, BUILT)])
def test_a_ragged_prompt_equals_the_oracle(scheduled, options):
    lengths = [(0, 17), (5, 1), (130, 40), (64, 3), (0, 1)]
    case = make_extend_case(lengths, head_dim=64, dtype=BF16, device=DEVICE, **options)
    news = sum(new for _, new in lengths)
    plan = ExtendPlan(
        **case.args, out_slots=torch.zeros(1, news, dtype=torch.int32, device=DEVICE),
        max_seq_len=max(sum(pair) for pair in lengths),
    )
    bound = FlashInferBackend(config_of(case), torch.device(DEVICE)).bind(plan)
    if scheduled:
        bound.schedule(torch.tensor([prefix for prefix, _ in lengths], dtype=torch.int32))
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)
    check(case, oracle_extend(case), tolerances=TOLERANCES)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("kind", "indices", "options"),
    [(FlashInferBackend, "table", {}), (TwoPassesBackend, "table", {}),
     (FlashInferBackend, "csr", {}), (FlashInferBackend, "csr", BUILT)],
    ids=["mask", "two_passes", "lists", "lists_window"],
)
@pytest.mark.parametrize("topk", [1, 3])
def test_draft_steps_equal_plain_torch(topk, kind, indices, options, page_size):
    """All steps are scheduled and filled up front; their words become known step by step."""
    config = SpecConfig(4, topk, 5 if topk == 1 else 9, max_context_len=96, max_num_reqs=4,
                        page_size=page_size)
    lens = [3, 40, 0, 64]
    outs = []
    for name, dtype in ((kind, BF16), ("torch_native", torch.float32)):
        torch.manual_seed(1)
        table = SlotTable(max_num_reqs=4, max_context_len=96, num_slots=640,
                          page_size=page_size, device=torch.device(DEVICE))
        rows = [table.allocate() for _ in lens]
        table.reserve(rows, [96] * 4)
        heads = AttnConfig(4, 2, 64, dtype=dtype, **options)
        pool = KVPool([heads], 640, torch.device(DEVICE))
        pool.k.copy_(torch.randn(pool.k.shape).to(BF16))
        pool.v.copy_(torch.randn(pool.v.shape).to(BF16))
        layers = LayeredBackend(name, [heads], pool, torch.device(DEVICE))
        shared = MultiStepDraftBackend(layers, config, table.req_to_token, 6, indices)
        bound = shared.bind(5)  # the last row is padding
        q = torch.randn(3, 5 * topk, 4, 64).to(BF16).to(DEVICE, dtype)
        outs.append(drafted(bound, rows, lens, q)[:, : 4 * topk].double().cpu())
    got, want = outs
    assert ((got - want).norm() / want.norm()) < 5e-3
    worst = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(want.square().mean().sqrt())
    assert worst.max() < 2.5e-2, f"worst rows {worst.flatten().topk(5)}"


def drafted(bound, rows: list[int], lens: list[int], q: torch.Tensor) -> torch.Tensor:
    """Run all steps over random beams; every step's words are written just before its run."""
    inputs, dims = bound.plan.inputs, bound.plan.dims
    inputs.copy_in(dims, req_pool_indices=torch.tensor(rows, device=DEVICE),
                   seq_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    inputs.words[: len(lens), 1:] = -1
    bound.schedule(torch.tensor([*lens, 0], dtype=torch.int32))
    bound.fill()
    generator = torch.Generator().manual_seed(3)
    out = torch.full_like(q, float("nan"))
    pool = bound.steps[0].pool
    for step in range(dims.steps):
        if step:
            beams = torch.randint(dims.topk, (len(lens), dims.topk), generator=generator).to(DEVICE)
            own = 1 << step * dims.topk + torch.arange(dims.topk, device=DEVICE)
            before = inputs.words[: len(lens), step - 1, :, 0]
            inputs.words[: len(lens), step, :, 0] = before.gather(1, beams) | own
        bound.fill_ancestors(step)
        bound.steps[step].bounds[0].run(q[step], pool.k[0], pool.v[0], out[step])
    return out


def test_a_verify_forward_stores_and_attends():
    """The way a model calls: new KV of a layer stored first, over pages of 16."""
    config = SpecConfig(4, 3, 9, max_context_len=256, max_num_reqs=3, page_size=16)
    case = make_tree_case([70, 3], q_len=9, head_dim=64, dtype=BF16, device=DEVICE, pads=1)
    heads = config_of(case)
    pool = KVPool([heads, heads], len(case.k_cache), torch.device(DEVICE))
    for layer in range(2):
        pool.k[layer].copy_(case.k_cache)
        pool.v[layer].copy_(case.v_cache)
    slots = case.args["tail_slots"].flatten().long()
    new = case.k_cache[slots], case.v_cache[slots]
    pool.k[:, slots], pool.v[:, slots] = float("nan"), float("nan")
    layers = LayeredBackend("flashinfer", [heads, heads], pool, torch.device(DEVICE))
    layout = RowLayout(config.num_draft_tokens, config.num_draft_tokens, Phase.VERIFY)
    attend = layers.bind(AttnPlan(layout, **case.args))
    attend.schedule(case.args["seq_lens"].cpu())
    attend.fill()
    for layer in range(2):
        case.out = attend(layer, case.q, *new)
        check(case, oracle_tree(case), lse=False, tolerances=TOLERANCES)


def test_lengths_on_the_host_are_needed_and_checked():
    live = Live(*case_of("tree"))
    with pytest.raises(UnsupportedError, match="needs seq_lens_cpu, got None"):
        live.bound.schedule(None)
    width = live.case.args["req_to_token"].shape[1]
    for lens, wrong in (
        ([1, 2], r"must be \[4\] on the host, got \[2\]"),
        ([1, 2, 3, -1], rf"0\.\.{width}, got -1\.\.3"),
        ([1, 2, 3, width + 1], rf"0\.\.{width}, got 1\.\.{width + 1}"),
    ):
        with pytest.raises(ValueError, match=wrong):
            live.bound.schedule(torch.tensor(lens, dtype=torch.int32))
    live.replay()  # and a good call works afterwards
    live.verdict()


def test_outputs_that_flashinfer_would_misread_are_refused():
    live = Live(*case_of("decode"))
    live.schedule()
    live.bound.fill()
    case = live.case
    wide = torch.empty(*case.out.shape[:-1], 2 * case.out.shape[-1], dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match="out must be contiguous"):
        live.bound.run(case.q, case.k_cache, case.v_cache, wide[..., ::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_rounded_weights_explain_the_lse(dtype):
    """What FA2 does to a row sum, on the CPU: it stays within the bound, and comes near it."""
    logits = torch.randn(40_000, 5, dtype=torch.float64)
    top = logits.amax(1, keepdim=True)
    weights = torch.exp(logits - top)
    off = (weights.to(dtype).double().sum(1).log() - weights.sum(1).log()).abs().max()
    assert off <= tolerances_of("flashinfer", dtype).lse
    assert off > tolerances_of("flashinfer", dtype).lse / 3


def test_reasons_name_the_limits():
    assert load_backend("flashinfer") is FlashInferBackend
    device = torch.device(DEVICE)
    odd = AttnConfig(4, 2, 80, v_head_dim=40, sm_scale=1e-5)
    found = "; ".join(REASONS(odd, device))
    for limit in ("dtype must be float16 or bfloat16", "head_dim must be 64, 128 or 256, got 80",
                  "v_head_dim must equal head_dim, got 40", "sm_scale must be at least 0.001"):
        assert limit in found
    if CUDA:
        assert not REASONS(AttnConfig(7, 1, 256, dtype=BF16), device)
    else:
        assert "FlashInfer needs a CUDA device, got cpu" in found


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("specattn.backends.flashinfer_base.find_spec", lambda name: None)
    assert "flashinfer is not installed" in REASONS(None, torch.device("cpu"))[0]


def test_tiles_fit_the_uniform_q_len_and_workspaces_flashinfers_rules():
    """A batch of short requests is not planned with the tile of one long request."""
    for batch, q_len, heads, dim in itertools.product(
        (1, 3, 16, 64, 256), (1, 4, 9, 64), ((32, 8), (8, 8), (7, 1), (16, 1)), (64, 128, 256)
    ):
        config = AttnConfig(*heads, dim, dtype=BF16)
        grid = Grid.recorded(config, batch, q_len, fake.PROCESSORS)
        rows = [q_len] * batch + [0] * (grid.requests - batch)
        keys = [4096 + q_len] * batch + [0] * (grid.requests - batch)
        tile, floats, ints = fake.cut(rows, keys, batch * q_len, heads, dim, -1, graph=True)
        assert (tile, grid.tile) == (grid.tile, tile)
        assert floats <= grid.float_bytes
        assert ints <= grid.int_bytes
        if grid.float_bytes <= MAX_TILING and grid.requests > batch:
            assert tile == fake.tile_of(q_len * heads[0] // heads[1], dim)
    assert Grid.recorded(AttnConfig(32, 8, 128), 8, 4, fake.PROCESSORS).tile == 16
