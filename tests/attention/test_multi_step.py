"""The buffers all draft steps share: golden vectors, views, and table against lists."""

from __future__ import annotations

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.batch import ForwardMode
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import AttnConfig, SpecConfig
from specattn.errors import UnsupportedError
from specattn.plan import AttnInputs, AttnPlan, ExtendPlan, MultiStepDims
from tests.filling import put

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["torch_native", "triton"]
HEADS = AttnConfig(4, 2, 64)
# three draft forwards of two branches over prefixes of 3 and 5 tokens
CONFIG = SpecConfig(4, 2, 6, max_context_len=16, max_num_reqs=3)


def build(name: str, indices: str, page_size: int = 1):
    table = SlotTable(
        max_num_reqs=3, max_context_len=16, num_slots=64, page_size=page_size, device=DEVICE
    )
    rows = [table.allocate() for _ in range(3)]
    table.reserve(rows, [16, 16, 16])
    pool = KVPool([HEADS], 64, DEVICE)
    pool.k.normal_()
    pool.v.normal_()
    layers = LayeredBackend(name, [HEADS], pool, DEVICE)
    return (
        table,
        rows,
        MultiStepDraftBackend(layers, MultiStepDims.of(CONFIG), table.req_to_token, 3, indices),
    )


def feed(bound, rows: list[int], lens: list[int]) -> None:
    inputs = bound.inputs
    put(
        inputs,
        bound.dims,
        req_pool_indices=torch.tensor(rows, device=DEVICE),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
    )
    # request 0: both step-1 beams extend beam 0; request 1: they cross
    parents = {1: [[0, 0], [1, 0]], 2: [[1, 0], [0, 1]]}
    words = [[[1 << k for k in range(2)]] for _ in rows]
    for step, picks in parents.items():
        for b in range(len(rows)):
            beams = picks[b % 2]
            words[b].append(
                [words[b][step - 1][p] | 1 << 2 * step + k for k, p in enumerate(beams)]
            )
    inputs.words.copy_(torch.tensor(words, device=DEVICE)[..., None])


def test_golden_index_lists():
    """`contract`'s vectors: offsets of every step, and the true ancestors of sibling beams."""
    table, rows, shared = build("torch_native", "csr")
    bound = shared.bind(2)
    feed(bound, rows[:2], [3, 5])
    bound.fill_slots()
    bound.fill()
    for step in range(3):
        bound.fill_ancestors(step)
    assert bound.kv_indptr.tolist() == [[0, 4, 8, 14, 20], [0, 5, 10, 17, 24], [0, 6, 12, 20, 28]]
    slots = table.req_to_token[rows[0]].tolist()
    lists = [bound.kv_indices[1, a:b].tolist() for a, b in ((0, 5), (5, 10))]
    # nodes of request 0: columns 3 + step * 2 + branch
    assert lists == [[*slots[:3], slots[3], slots[5]], [*slots[:3], slots[3], slots[6]]]


@pytest.mark.parametrize("name", BACKENDS)
def test_step_i_is_row_i_of_the_shared_buffers(name):
    _, _, shared = build(name, "csr")
    bound = shared.bind(3)
    assert shared.kv_indptr.shape == (3, 3 * 2 + 1)
    for found in ("kv_indptr", "kv_indices"):
        storages = {
            getattr(layers.plan, found).untyped_storage().data_ptr() for layers in bound.steps
        }
        assert storages == {getattr(shared, found).untyped_storage().data_ptr()}
    for step, layers in enumerate(bound.steps):
        assert layers.plan.kv_indptr.data_ptr() == shared.kv_indptr[step].data_ptr()
        assert layers.plan.kv_indices.data_ptr() == shared.kv_indices[step].data_ptr()


def test_lists_for_who_reads_the_table_alone_are_refused_by_name():
    table, _, _ = build("torch_native", "table")
    latent = AttnConfig(4, 1, 80, v_head_dim=64, sm_scale=0.2, latent=True)
    for name, heads in (("flex", HEADS), ("triton_mla", latent)):
        layers = LayeredBackend(name, [heads], KVPool([heads], 64, DEVICE), DEVICE)
        with pytest.raises(
            UnsupportedError, match=rf"'{name}': index lists are not served \(indices='table'\)"
        ):
            MultiStepDraftBackend(layers, MultiStepDims.of(CONFIG), table.req_to_token, 3, "csr")
        with pytest.raises(ValueError, match="indices must be 'table' or 'csr', got 'lists'"):
            MultiStepDraftBackend(layers, MultiStepDims.of(CONFIG), table.req_to_token, 3, "lists")
        MultiStepDraftBackend(
            layers, MultiStepDims.of(CONFIG), table.req_to_token, 3, "table"
        ).bind(2)


def test_one_sizing_function_covers_the_worst_case():
    """R01: every branch may hold a whole context."""
    _, _, shared = build("torch_native", "csr")
    worst = 3 * 2 * (16 - 3) + 3 * 2 * 3
    assert shared.kv_indices.shape[1] >= worst


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", BACKENDS)
def test_lists_and_table_give_the_same_attention(name, page_size):
    q = torch.randn(6, 4, 64, device=DEVICE)
    outs = []
    for indices in ("table", "csr"):
        torch.manual_seed(1)
        _, rows, shared = build(name, indices, page_size)
        bound = shared.bind(3)
        feed(bound, rows, [3, 5, 0])
        bound.fill_slots()
        bound.fill()
        for step in range(3):
            bound.fill_ancestors(step)
        bound.schedule(None)
        pool = shared.layers.pool
        out = torch.full((3, 6, 4, 64), float("nan"), device=DEVICE)
        for step, layers in enumerate(bound.steps):
            layers.bounds[0].run(q, pool.k[0], pool.v[0], out[step])
        outs.append(out)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_idle_rank_gets_nothing_and_writes_nothing(name):
    """A batch of 0 requests, in every mode."""
    table, _, shared = build(name, "table")
    layers = shared.layers
    before = layers.pool.k.clone()
    plans = [
        AttnPlan.over(layout, table.req_to_token, AttnInputs.alloc(0, layout, DEVICE))
        for layout in (
            CONFIG.layout(mode) for mode in ForwardMode if mode is not ForwardMode.DRAFT_DECODE
        )
    ]
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    plans.append(
        ExtendPlan(table.req_to_token, none.long(), none, none.new_zeros(1), none[None], 0, 0)
    )
    bounds = [layers.bind(plan) for plan in plans] + list(shared.bind(0).steps)
    for bound in bounds:
        bound.schedule(none.cpu())
        bound.fill()
        kv = torch.empty(0, 2, 64, device=DEVICE)
        assert bound(0, torch.empty(0, 4, 64, device=DEVICE), kv, kv).shape == (0, 4, 64)
    assert torch.equal(layers.pool.k, before)
