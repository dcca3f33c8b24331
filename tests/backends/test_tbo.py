"""Two-batch overlap: the halves are disjoint, cover the batch and equal the unsplit result."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.backends import available, load_backend
from specattn.backends.base import IdleAttention
from specattn.backends.tbo import BoundTbo, TboBackend, split, tbo
from specattn.batch import ForwardMode, Phase, RowLayout
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import AttnConfig, SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.plan import AttnInputs, AttnPlan, CsrPlan, ExtendPlan, MultiStepDims
from tests.backends.spies import spy
from tests.filling import put
from tests.oracle import (
    Case,
    check,
    make_csr_case,
    make_extend_case,
    make_tree_case,
    oracle_csr,
    oracle_extend,
    oracle_tree,
    tolerances_of,
)
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import CONFIG, MODES, inputs, part_of, same, world

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
LIBRARIES = ["fa3", "flashinfer"]
CHILDREN = [
    "torch_native",
    "triton",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in LIBRARIES),
]
TABLES = {"torch_native": (), "triton": (), "fa3": pytest.mark.gpu, "flashinfer": pytest.mark.gpu}
# fa3 reads no index lists
LISTS = ["torch_native", "triton", pytest.param("flashinfer", marks=pytest.mark.gpu)]
# lengths and padding rows of a bucket; "padding" has a half without a single live request
BATCHES = {
    "one": ([37], 0),
    "two": ([3, 70], 0),
    "odd": ([5, 0, 130], 0),
    "odd padded": ([9, 33], 3),
    "padding": ([64, 1], 2),
    "all padding": ([], 3),
}


def config_of(case: Case) -> AttnConfig:
    return AttnConfig(
        case.q.shape[1],
        case.k_cache.shape[1],
        case.q.shape[2],
        dtype=case.q.dtype,
        **case.settings,
    )


def options(name: str) -> dict:
    """What a case of this backend is made with; skips where the backend cannot run."""
    dtype = BF16 if name in LIBRARIES else torch.float32
    reasons = available(name, AttnConfig(4, 2, 64, dtype=dtype), DEVICE)
    if reasons:
        pytest.skip("; ".join(reasons))
    return {"dtype": dtype, "head_dim": 64, "device": DEVICE.type}


def tree_plan(case: Case, q_len: int, tail: int, phase: Phase = Phase.VERIFY) -> AttnPlan:
    return AttnPlan(RowLayout(q_len, tail, phase), **case.args)


def run(bound, case: Case, lens: Tensor | None = None) -> None:
    case.clear()
    bound.schedule(case.args["seq_lens"].cpu() if lens is None else lens)
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)


@pytest.mark.parametrize(("lens", "pads"), BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", CHILDREN)
def test_halves_equal_the_oracle(name, lens, pads):
    """Trees of two words over a window, whatever the bucket and its padding."""
    window = -1 if name == "fa3" else 40  # by depth, which FA3 refuses
    case = make_tree_case(
        lens, pads=pads, q_len=5, tail_len=70, mode="any", window_left=window, **options(name)
    )
    bound = tbo(name)(config_of(case), DEVICE).bind(tree_plan(case, 5, 70))
    run(bound, case)
    check(case, oracle_tree(case), tolerances=tolerances_of(name))


@pytest.mark.parametrize("lens", [[4], [9, 0, 30], [7, 7, 1, 12]], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_halves_of_index_lists_equal_the_oracle(name, lens):
    """The second half's lists do not start at 0."""
    branches = 2
    case = make_csr_case([n + 1 for n in lens for _ in range(branches)], **options(name))
    layout = RowLayout(branches, branches, Phase.DRAFT)
    slots = torch.zeros(len(lens), branches, dtype=torch.int32, device=DEVICE)
    plan = CsrPlan(layout, out_slots=slots, **case.args)
    bound = tbo(name)(config_of(case), DEVICE).bind(plan)
    run(bound, case, torch.tensor(lens, dtype=torch.int32))
    check(case, oracle_csr(case), tolerances=tolerances_of(name))


def test_prompts_are_not_split():
    primary, child = spy("primary"), spy("child")
    case = make_extend_case([(3, 5), (0, 2), (17, 1)], device=DEVICE.type)
    plan = ExtendPlan(out_slots=torch.zeros(1, 8), max_seq_len=18, **case.args)
    bound = tbo(primary, (child, child))(config_of(case), DEVICE).bind(plan)
    run(bound, case)
    check(case, oracle_extend(case))
    assert (primary.binds, child.binds) == (["prompt"], [])


def named_tensors(plan) -> dict[str, Tensor]:
    found = {item.name: getattr(plan, item.name) for item in fields(plan)}
    return {n: t for n, t in found.items() if isinstance(t, Tensor) and n != "req_to_token"}


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_parts_are_disjoint_views_that_cover_the_batch(mode, batch):
    layout = CONFIG.layout(mode, 1 if mode is ForwardMode.DRAFT_DECODE else 0)
    case = make_tree_case([3] * batch, q_len=layout.q_len, tail_len=layout.tail)
    plan = AttnPlan(layout, **case.args)
    first, second = split(plan)
    assert (first.batch, second.batch) == (batch // 2, batch - batch // 2)
    parts = zip(named_tensors(first).items(), named_tensors(second).values(), strict=True)
    for (name, one), other in parts:
        whole = named_tensors(plan)[name]
        assert torch.equal(torch.cat([one, other]), whole), name
        assert other.data_ptr() == whole[batch // 2 :].data_ptr(), name
        assert not one.numel() or one.data_ptr() == whole.data_ptr(), name
    assert first.req_to_token is second.req_to_token is plan.req_to_token


def test_lists_are_split_between_requests():
    """Golden index lists: two requests of two branches, over 4, 4, 6 and 6 keys."""
    indptr = torch.tensor([0, 4, 8, 14, 20], dtype=torch.int32)
    indices = torch.arange(20, dtype=torch.int32)
    slots = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    first, second = split(CsrPlan(RowLayout(2, 2, Phase.DRAFT), indptr, indices, slots))
    assert (first.kv_indptr.tolist(), second.kv_indptr.tolist()) == ([0, 4, 8], [8, 14, 20])
    assert (first.out_slots.tolist(), second.out_slots.tolist()) == ([[1, 2]], [[3, 4]])
    assert first.kv_indices is second.kv_indices is indices
    assert second.kv_indptr.data_ptr() == indptr[2:].data_ptr()


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_half_is_told_its_own_lengths(batch):
    first, second = spy("first"), spy("second")
    layout = CONFIG.layout(ForwardMode.TARGET_VERIFY)
    plan = AttnPlan.over(layout, torch.zeros(2, 9), AttnInputs.alloc(batch, layout, DEVICE))
    bound = tbo("torch_native", (first, second))(AttnConfig(4, 2, 64), DEVICE).bind(plan)
    lens = torch.arange(10, 10 + batch, dtype=torch.int32)
    bound.schedule(lens)
    told = [*(first.scheduled[0] if batch > 1 else []), *second.scheduled[0]]
    assert told == lens.tolist()
    assert len(second.scheduled[0]) == batch - batch // 2


def test_a_half_without_requests_binds_nothing():
    first, second = spy("first"), spy("second")
    case = make_tree_case([12], device=DEVICE.type)
    composite = tbo("torch_native", (first, second))
    bound = composite(config_of(case), DEVICE).bind(tree_plan(case, 4, 4))
    assert isinstance(bound.children[0], IdleAttention)
    assert (first.binds, second.binds) == ([], ["verify"])
    run(bound, case)
    assert (first.ran, second.ran) == ([], [4])
    check(case, oracle_tree(case))


@pytest.mark.parametrize("lens", [[6], [40, 3, 11]], ids=str)
@pytest.mark.parametrize("name", CHILDREN)
def test_an_engine_may_run_the_halves_itself(name, lens):
    """Two micro-batches: each child with the rows of its half, in any order, without lse."""
    case = make_tree_case(lens, **options(name))
    bound = tbo(name)(config_of(case), DEVICE).bind(tree_plan(case, 4, 4))
    case.clear()
    bound.schedule(torch.tensor(lens, dtype=torch.int32))
    bound.fill()
    for child, rows in reversed(list(zip(bound.children, bound.rows, strict=True))):
        q, out = case.q[rows].clone(), torch.full_like(case.out[rows], float("nan"))
        child.run(q, case.k_cache, case.v_cache, out)
        case.out[rows] = out
    check(case, oracle_tree(case), lse=False)
    assert sum(len(case.q[rows]) for rows in bound.rows) == len(case.q)


@pytest.mark.gpu
def test_the_halves_may_run_at_the_same_time():
    case = make_tree_case([4000, 70, 900, 3000, 5], q_len=8, device="cuda")
    bound = tbo("triton")(config_of(case), DEVICE).bind(tree_plan(case, 8, 8))
    run(bound, case)
    expected, streams = oracle_tree(case), [torch.cuda.Stream() for _ in bound.children]
    for _ in range(5):
        case.clear()
        torch.cuda.synchronize()
        for stream, child, rows in zip(streams, bound.children, bound.rows, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(20):
                    child.fill()
                    child.run(
                        case.q[rows], case.k_cache, case.v_cache, case.out[rows], case.lse[rows]
                    )
        torch.cuda.synchronize()
        check(case, expected)


def test_children_and_primary_share_no_buffers():
    """Not even where all three are the same backend: the halves may run at the same time."""
    case = make_tree_case([30, 2, 7, 64], device=DEVICE.type)
    plan = tree_plan(case, 4, 4)
    layer = tbo("triton")(config_of(case), DEVICE)
    bounds = [layer.primary.bind(plan), *layer.bind(plan).children]
    written = []
    for bound in bounds:
        kernel = bound.kernel
        tables = [t for t in vars(kernel.tables).values() if isinstance(t, Tensor)]
        buffers = [*tables, *kernel.workspace]
        written.append({t.untyped_storage().data_ptr() for t in buffers})
    assert not written[0] & written[1]
    assert not written[0] & written[2]
    assert not written[1] & written[2]
    for bound in bounds:
        bound.fill()
    case.clear()
    bounds[0].run(case.q, case.k_cache, case.v_cache, case.out, case.lse)
    check(case, oracle_tree(case))


@pytest.mark.parametrize(
    ("name", "indices"),
    [
        *(pytest.param(name, "table", marks=marks) for name, marks in TABLES.items()),
        *(pytest.param(name, "csr", marks=TABLES[name]) for name in TABLES if name != "fa3"),
    ],
)
def test_draft_steps_are_split_alike(name, indices):
    """Every step of the shared multi-step buffers, three requests of two branches."""
    dtype = options(name)["dtype"]
    spec = SpecConfig(4, 2, 6, max_context_len=16, max_num_reqs=3)
    heads = AttnConfig(4, 2, 64, dtype=dtype)
    table = SlotTable(max_num_reqs=3, max_context_len=16, num_slots=64, page_size=4, device=DEVICE)
    rows = [table.allocate() for _ in range(3)]
    table.reserve(rows, [16, 16, 16])
    pool = KVPool([heads], 64, DEVICE)
    pool.k.normal_()
    pool.v.normal_()
    q, outs = torch.randn(6, 4, 64, device=DEVICE).to(dtype), []
    for backend in (name, tbo(name)):
        layers = LayeredBackend(backend, [heads], pool, DEVICE)
        bound = MultiStepDraftBackend(
            layers, MultiStepDims.of(spec), table.req_to_token, 3, indices
        ).bind(3)
        lens = torch.tensor([3, 5, 0], dtype=torch.int32)
        put(
            bound.inputs,
            bound.dims,
            seq_lens=lens.to(DEVICE),
            req_pool_indices=torch.tensor(rows, device=DEVICE),
        )
        bound.schedule(lens)
        bound.fill_slots()
        bound.fill()
        for step in range(3):
            bound.fill_ancestors(step)
        out = torch.full((3, 6, 4, 64), float("nan"), device=DEVICE, dtype=dtype)
        for step, layer in enumerate(bound.steps):
            layer.bounds[0].run(q, pool.k[0], pool.v[0], out[step])
        outs.append(out)
    assert isinstance(bound.steps[0].bounds[0], BoundTbo)
    close = 2e-2 if dtype is BF16 else 1e-5
    torch.testing.assert_close(*outs, rtol=close, atol=close)


@pytest.mark.parametrize("indices", ["table", "csr"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_captured_forwards_equal_the_unsplit_ones(mode, indices):
    """Eager without a GPU, recorded with one; padded into a bucket, against one per batch."""
    name = "triton" if DEVICE.type == "cuda" else "torch_native"
    split = world(tbo(name), [5, 8], indices=indices)
    whole = world(name, list(range(1, 9)), indices=indices)
    for seed, size in enumerate([8, 1, 5, 3, 7]):
        lens = [(37 * seed + 61 * b) % 244 for b in range(size)]
        values = inputs(mode, lens, seed)
        for one in (split, whole):
            one.poison(lens)
        same(split.run(mode, lens, values), whole.run(mode, lens, values))
    assert split.decoder.runner.recorded(part_of(mode)) == (DEVICE.type == "cuda")
    assert not split.decoder.runner.stats.eager


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.gpu
def test_libraries_are_recorded_in_halves(name, mode):
    options(name)
    split, whole = (world(b, [5, 8], dtype=BF16, window=-1) for b in (tbo(name), "triton"))
    for seed, size in enumerate([8, 1, 3, 5]):
        lens = [(37 * seed + 61 * b) % 244 for b in range(size)]
        values = inputs(mode, lens, seed)
        for one in (split, whole):
            one.poison(lens)
        got, want = (one.run(mode, lens, values) for one in (split, whole))
        for key, value in want.items():
            if value.is_floating_point() and value.numel():
                error = (got[key].float() - value.float()).norm() / value.float().norm()
                assert error < 2e-2, f"{key} of {size} requests is off by {error:.2e}"
    assert split.decoder.runner.recorded(part_of(mode))


def test_triton_children_under_the_runner():
    lens, mode = [5, 0, 70], ForwardMode.TARGET_VERIFY
    results = []
    for backend in ("torch_native", tbo("triton"), tbo("torch_native", ("triton", "torch_native"))):
        one = world(backend, [4])
        one.poison(lens)
        results.append(one.run(mode, lens, inputs(mode, lens, 1))["logits"])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("topk", [1, 2])
def test_greedy_speculation_changes_no_token(topk):
    """Odd and shrinking batches: requests finish one by one."""
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    spec = SpecConfig(3, topk, 4, max_context_len=64, max_num_reqs=3)
    engine = Engine(target, draft, spec, backend=tbo("torch_native"))
    requests = [
        Request([3, 1, 4, 1, 5][:n], max_new_tokens=3 * n, ignore_eos=True) for n in (5, 2, 4)
    ]
    for request, result in zip(requests, engine.generate(requests), strict=True):
        count = request.max_new_tokens
        assert list(result.tokens) == dense_greedy(target, list(request.prompt), count)


def test_names_and_promises():
    pattern_b, eager = spy("b", host_plan=True, graphs=True), spy("eager", extend=False)
    triton = load_backend("triton")
    assert tbo("triton").name == "tbo(triton)"
    assert tbo("triton") == TboBackend(triton, [triton, triton])
    assert tbo("triton").capabilities == triton.capabilities
    mixed = tbo(pattern_b, (triton, eager))
    assert mixed.name == "tbo(b; triton, eager)"
    found = mixed.capabilities
    assert (found.graphs, found.host_plan, found.extend) == (False, True, True)
    with pytest.raises(ValueError, match="children must be 2 backends, got 3"):
        TboBackend(triton, [triton] * 3)
