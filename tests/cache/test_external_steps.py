"""Steps over an engine's caches and its table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from specattn import (
    ExternalTable,
    KVPool,
    ModelSlot,
    SamplingBatch,
    SamplingParams,
    SpecConfig,
    StepDecoder,
    StepSetup,
)
from specattn.attention.layers import LayeredBackend
from specattn.batch import ForwardMode
from specattn.config import AttnConfig
from specattn.errors import CaptureMismatch
from specattn.plan import AttnInputs, AttnPlan, ExtendPlan
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt
from tests.caches import LAYOUTS, MAKES, PAGE, Layout, layout_of, scattered
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9, 3, 1, 1, 2, 3, 5, 8]]
CONFIG = SpecConfig(3, 4, 9, max_context_len=64, max_num_reqs=3, page_size=PAGE)
BLOCKS = 3 * 64 // PAGE + 1


@dataclass
class Host:
    """An engine: caches of its own, a block table, and a step decoder over both."""

    target: TinyTarget
    pools: list[KVPool]
    layouts: list[Layout]
    block_table: torch.Tensor
    table: ExternalTable
    decoder: StepDecoder
    tokens: list[list[int]]

    def give(self, lens: list[int]) -> None:
        rows = torch.arange(1, 4, device=DEVICE)
        room = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        self.table.fill(rows, self.block_table, room)

    def step(self, rows=(1, 2, 3)) -> None:
        for row, gained in zip(rows, self.decoder.step(rows), strict=True):
            self.tokens[row - 1] += gained

    def check(self) -> None:
        for prompt, found in zip(PROMPTS, self.tokens, strict=True):
            assert found == dense_greedy(self.target, prompt, len(found))


def host(layout="halves", make="scattered", backend="torch_native", config=CONFIG) -> Host:
    target, draft = TinyTarget(layers=3, device=DEVICE), TinyDraft(heads=(4, 2), device=DEVICE)
    layouts = [
        layout_of(layout, len(model.layers), make, model.layers[0], BLOCKS)
        for model in (target, draft)
    ]
    if layout == "layers_in_pages":  # the draft's pages must be as far apart as the target's
        whole = layout_of(layout, 4, make, target.layers[0], BLOCKS)
        layouts = [Layout.of(whole.pages[:3]), Layout.of(whole.pages[3:])]
    pools = [
        KVPool.from_external(model.layers, caches.k, caches.v)
        for model, caches in zip((target, draft), layouts, strict=True)
    ]
    slots = [ModelSlot.of(m, p, backend) for m, p in zip((target, draft), pools, strict=True)]
    # rows of the table lie in a wider tensor, and hold what somebody left there
    wide = torch.full((4, 70), 7_777_777, dtype=torch.int32, device=DEVICE)
    reserved = torch.full((4,), 7_777_777, dtype=torch.int32, device=DEVICE)
    table = ExternalTable(
        wide[:, :64],
        reserved,
        num_slots=pools[0].num_slots,
        page_size=PAGE,
        block_stride=layouts[0].stride,
    )
    blocks = 1 + torch.randperm(BLOCKS - 1).to(torch.int32).view(3, -1).to(DEVICE)
    setup = StepSetup.over(*slots, config, table=table)
    decoder = StepDecoder.of(setup, buckets=(1, 3))
    one = Host(target, pools, layouts, blocks, table, decoder, [])
    one.give([64, 64, 64])
    sampling = SamplingBatch.of([SamplingParams()] * 3, DEVICE)
    prompts = [Prompt(row + 1, ids) for row, ids in enumerate(PROMPTS)]
    start = Prefill.of(setup).run(prompts, sampling)
    lens = torch.tensor([len(ids) for ids in PROMPTS], dtype=torch.int32, device=DEVICE)
    rows = torch.arange(1, 4, device=DEVICE)
    setup.states.admit(rows, lens, start.bonus_tokens, start.state, sampling)
    one.tokens += [[token] for token in start.bonus_tokens.tolist()]
    return one


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_over_an_engines_caches_decode(backend, name, make):
    """Over memory that holds NaN wherever nobody has written, and page 0 of nobody's."""
    one = host(name, make, backend)
    for rows in ((1, 2, 3), (3,), (2, 1), (3, 2, 1), (1, 2, 3)):
        one.step(rows)
    one.check()
    assert min(map(len, one.tokens)) > 3
    if DEVICE.type == "cuda" and backend == "triton":
        assert all(map(one.decoder.runner.recorded, one.decoder.modes))
        assert not one.decoder.runner.stats.eager


@pytest.mark.parametrize("name", ["halves", "interleaved", "heads_first"])
def test_only_slots_of_the_rows_and_paddings_are_written(name):
    one = host(name)
    one.step()
    allowed = torch.zeros(BLOCKS, PAGE, dtype=torch.bool, device=DEVICE)
    allowed[0] = True
    for row, prompt in enumerate(PROMPTS):
        room = len(prompt) + CONFIG.reserve_len
        for at in range(room):
            allowed[one.block_table[row, at // PAGE], at % PAGE] = True
    for layout in one.layouts:
        for pages in (*layout.pages[0], *layout.pages[-1]):
            written = ~pages.isnan().all(3).all(2)
            assert written.any()
            assert not (written & ~allowed).any()


def test_rows_get_slots_as_they_grow():
    """A row without room for a step sits it out, until its blocks are in the table."""
    one = host()
    lens = [len(ids) for ids in PROMPTS]
    one.give([lens[0] + CONFIG.reserve_len, lens[1] + CONFIG.reserve_len - 1, 64])
    one.step()
    assert [len(tokens) > 1 for tokens in one.tokens] == [True, False, True]
    one.give([64, 64, 64])
    one.step()
    assert min(map(len, one.tokens)) > 1
    one.check()


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("layer", range(3))
def test_a_layer_that_moved_is_refused_by_name_at_once(which, layer):
    one = host()
    one.step()
    cache = getattr(one.pools[0], which)[layer]
    before = cache.data
    cache.data = cache.clone()
    message = rf"{which}_cache\[{layer}\] changed since capture"
    with pytest.raises(CaptureMismatch, match=message):
        one.step()
    cache.data = before
    one.step()
    one.check()


def test_other_caches_are_refused():
    one = host()
    one.step()
    pool = one.pools[1]
    with pytest.raises(AttributeError, match=r"KVPool\.v is read-only"):
        pool.v = tuple(cache.clone() for cache in pool.v)
    one.step()
    one.check()


def test_a_table_that_moved_is_refused():
    one = host()
    one.step()
    before = one.table.req_to_token.data
    one.table.req_to_token.data = before.clone()
    with pytest.raises(CaptureMismatch, match="req_to_token changed since capture"):
        one.step()
    one.table.req_to_token.data = before
    one.step()
    one.check()


@pytest.mark.gpu
def test_filling_is_recorded_with_what_follows():
    """A replay reads what the engine's block table holds by then; nothing is allocated."""
    one = host()
    rows, lens = torch.arange(1, 4, device=DEVICE), torch.full((3,), 64, device=DEVICE).int()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.table.fill(rows, one.block_table, lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.table.fill(rows, one.block_table, lens)
    tables = [one.block_table.clone(), one.block_table.flip(0)]
    one.block_table.copy_(tables[1])
    lens.fill_(33)
    graph.replay()
    places = torch.arange(64, device=DEVICE) % PAGE
    before, now = (blocks.repeat_interleave(PAGE, 1) * PAGE + places for blocks in tables)
    assert torch.equal(one.table.req_to_token[1:, :33], now[:, :33].int())
    assert torch.equal(one.table.req_to_token[1:, 33:], before[:, 33:].int())
    assert one.table.reserved.tolist() == [0, 33, 33, 33]


def attended(pool: KVPool, table: ExternalTable, q, k, v, prompt: int) -> torch.Tensor:
    """Attend to a prompt in row 1, then to what is left of q, k and v; all layers of both."""
    layers, tokens = len(q), q.shape[1]
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    start = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    ends = torch.tensor([0, prompt], dtype=torch.int32, device=DEVICE)
    first = ExtendPlan(
        req_to_token=table.req_to_token,
        req_pool_indices=one,
        seq_lens=start,
        qo_indptr=ends,
        out_slots=table.req_to_token[1:2, :prompt],
        max_q_len=prompt,
        max_seq_len=prompt,
        page_size=table.page_size,
    )
    config = SpecConfig(tokens - prompt - 1, 1, tokens - prompt, page_size=table.page_size)
    layout = config.layout(ForwardMode.TARGET_VERIFY)
    inputs = AttnInputs.alloc(1, layout, DEVICE)
    inputs.req_pool_indices.fill_(1)
    inputs.seq_lens.fill_(prompt)
    inputs.positions.copy_(torch.arange(prompt, tokens))
    second = AttnPlan.over(layout, table.req_to_token, inputs)
    backend = LayeredBackend(BACKENDS[-1], pool.layers, pool, DEVICE)
    second.fill()
    outs = []
    for plan, part in ((first, slice(prompt)), (second, slice(prompt, tokens))):
        attend = backend.bind(plan)
        attend.schedule(plan.seq_lens.cpu())
        attend.fill()
        outs.append([attend(at, q[at, part], k[at, part], v[at, part]) for at in range(layers)])
    return torch.cat([torch.stack(out) for out in outs], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_of_large_models_attend_in_any_layout(name, dtype):
    """Whatever kernels a device has for them, page by page or row by row."""
    heads, page, blocks, prompt, tokens = AttnConfig(8, 2, 128, dtype=dtype), 16, 9, 97, 102
    make = partial(scattered, dtype=dtype, device=DEVICE)
    layout = LAYOUTS[name](3, blocks, page, 2, 128, make)
    own = KVPool([heads] * 3, blocks * page, DEVICE)
    external = KVPool.from_external([heads] * 3, layout.k, layout.v)
    own.k.fill_(float("nan"))
    own.v.fill_(float("nan"))
    line = 1 + torch.randperm(blocks - 1).to(torch.int32).to(DEVICE)[None]
    q, k, v = (torch.randn(3, tokens, n, 128, device=DEVICE).to(dtype) for n in (8, 2, 2))
    found = []
    for pool, stride in ((own, page), (external, layout.stride)):
        table = ExternalTable(
            torch.zeros(2, 128, dtype=torch.int32, device=DEVICE),
            torch.zeros(2, dtype=torch.int32, device=DEVICE),
            num_slots=pool.num_slots,
            page_size=page,
            block_stride=stride,
        )
        room = torch.full((1,), 128, dtype=torch.int32, device=DEVICE)
        table.fill(torch.ones(1, dtype=torch.int64, device=DEVICE), line, room)
        found.append(attended(pool, table, q, k, v, prompt))
    assert not found[0].isnan().any()
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*found, rtol=error, atol=error)
