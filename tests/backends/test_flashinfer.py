"""FlashInfer against the oracle; without a GPU, everything but its kernels.

On a GPU with the library these are its own kernels. Elsewhere a stand-in with the same host side
takes their place, so that plans, lists, masks and workspaces are tested on any machine.
"""

from __future__ import annotations

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.backends.flashinfer import FlashInferBackend, FlashInferPrefill, FlashInferTree
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import AttnConfig, SpecConfig
from specattn.plan import ExtendPlan, MultiStepDims
from tests.backends import fake_flashinfer as fake
from tests.backends.flashinfer_cases import (
    BF16,
    BUILT,
    CASES,
    DEVICE,
    TOLERANCES,
    Live,
    TwoPassesBackend,
    case_of,
    config_of,
)
from tests.filling import put
from tests.oracle import check, make_extend_case, make_tree_case, oracle_extend
from tests.samples import half, on_cpu


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    fake.install(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_what_the_kit_does_not_compile_or_sweep_equals_the_oracle(name):
    live = Live(*case_of(name))
    live.replay()
    live.verdict()


def test_the_longest_context_and_the_window_decide_about_two_passes():
    class Long(FlashInferBackend):
        two_passes_from = 4096

    for backend, options, kind in (
        (Long, {"width": 4095}, FlashInferPrefill),
        (Long, {"width": 4096}, FlashInferTree),
        (Long, {"width": 4096, "window_left": 9}, FlashInferPrefill),
        (Long, {"width": 4096, "mode": "chain"}, FlashInferPrefill),
    ):
        case = make_tree_case([9, 3], q_len=3, head_dim=64, dtype=BF16, device=DEVICE, **options)
        live = Live(case, "mode" in options, backend(config_of(case), torch.device(DEVICE)))
        assert type(live.bound) is kind


def test_a_causal_window_and_a_cap_equal_the_oracle():
    """FlashInfer compiles this kernel when it is first used."""
    case = make_tree_case(
        [63, 4, 0, 200], q_len=5, mode="chain", head_dim=64, dtype=BF16, device=DEVICE, **BUILT
    )
    live = Live(case, causal=True)
    live.replay()
    live.verdict()


@pytest.mark.parametrize(("scheduled", "options"), [(True, {}), (False, {}), (True, BUILT)])
def test_a_ragged_prompt_equals_the_oracle(scheduled, options):
    lengths = [(0, 17), (5, 1), (130, 40), (64, 3), (0, 1)]
    case = make_extend_case(lengths, head_dim=64, dtype=BF16, device=DEVICE, **options)
    news = sum(new for _, new in lengths)
    plan = ExtendPlan(
        **case.args,
        out_slots=torch.zeros(1, news, dtype=torch.int32, device=DEVICE),
        max_seq_len=max(sum(pair) for pair in lengths),
    )
    bound = FlashInferBackend(config_of(case), torch.device(DEVICE)).bind(plan)
    if scheduled:
        bound.schedule(torch.tensor([prefix for prefix, _ in lengths], dtype=torch.int32))
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)
    check(case, oracle_extend(case), tolerances=TOLERANCES)


@on_cpu(half, "topk", "kind", "page_size")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("kind", "indices", "options"),
    [
        (FlashInferBackend, "table", {}),
        (TwoPassesBackend, "table", {}),
        (FlashInferBackend, "csr", {}),
        (FlashInferBackend, "csr", BUILT),
    ],
    ids=["mask", "two_passes", "lists", "lists_window"],
)
@pytest.mark.parametrize("topk", [1, 3])
def test_draft_steps_equal_plain_torch(topk, kind, indices, options, page_size):
    """All steps are scheduled and filled up front; their words become known step by step."""
    config = SpecConfig(
        4, topk, 5 if topk == 1 else 9, max_context_len=96, max_num_reqs=4, page_size=page_size
    )
    lens = [3, 40, 0, 64]
    outs = []
    for name, dtype in ((kind, BF16), ("torch_native", torch.float32)):
        torch.manual_seed(1)
        table = SlotTable(
            max_num_reqs=4,
            max_context_len=96,
            num_slots=640,
            page_size=page_size,
            device=torch.device(DEVICE),
        )
        rows = [table.allocate() for _ in lens]
        table.reserve(rows, [96] * 4)
        heads = AttnConfig(4, 2, 64, dtype=dtype, **options)
        pool = KVPool([heads], 640, torch.device(DEVICE))
        pool.k.copy_(torch.randn(pool.k.shape).to(BF16))
        pool.v.copy_(torch.randn(pool.v.shape).to(BF16))
        layers = LayeredBackend(name, [heads], pool, torch.device(DEVICE))
        shared = MultiStepDraftBackend(
            layers, MultiStepDims.of(config), table.req_to_token, 6, indices
        )
        bound = shared.bind(5)  # the last row is padding
        q = torch.randn(3, 5 * topk, 4, 64).to(BF16).to(DEVICE, dtype)
        outs.append(drafted(bound, rows, lens, q)[:, : 4 * topk].double().cpu())
    got, want = outs
    assert ((got - want).norm() / want.norm()) < 5e-3
    worst = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(want.square().mean().sqrt())
    assert worst.max() < 2.5e-2, f"worst rows {worst.flatten().topk(5)}"


def drafted(bound, rows: list[int], lens: list[int], q: torch.Tensor) -> torch.Tensor:
    """Run all steps over random beams; every step's words are written just before its run."""
    inputs, dims = bound.inputs, bound.dims
    put(
        inputs,
        dims,
        req_pool_indices=torch.tensor(rows, device=DEVICE),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
    )
    inputs.words[: len(lens), 1:] = -1
    bound.schedule(torch.tensor([*lens, 0], dtype=torch.int32))
    bound.fill_slots()
    bound.fill()
    generator = torch.Generator().manual_seed(3)
    out = torch.full_like(q, float("nan"))
    pool = bound.steps[0].layers[0].pool
    for step in range(dims.steps):
        if step:
            beams = torch.randint(dims.topk, (len(lens), dims.topk), generator=generator).to(DEVICE)
            own = 1 << step * dims.topk + torch.arange(dims.topk, device=DEVICE)
            before = inputs.words[: len(lens), step - 1, :, 0]
            inputs.words[: len(lens), step, :, 0] = before.gather(1, beams) | own
        bound.fill_ancestors(step)
        bound.steps[step].bounds[0].run(q[step], pool.k[0], pool.v[0], out[step])
    return out
