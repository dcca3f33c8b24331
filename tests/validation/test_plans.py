"""Plans, a layer's tensors and commits are refused before anything is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn import KVPool
from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.batch import AcceptResult, ForwardMode
from specattn.plan import AttnInputs, AttnPlan, CsrPlan, ExtendPlan, MultiStepDims
from tests.validation.steps import HEADS, Failing, i32, ints
from tests.worlds import CONFIG, DEVICE, world


def layered():
    pool = KVPool([HEADS], 40, DEVICE)
    pool.k.normal_()
    pool.v.normal_()
    return LayeredBackend(Failing, [HEADS], pool, DEVICE)


def tree_plan(**change) -> AttnPlan:
    layout = CONFIG.layout(ForwardMode.TARGET_VERIFY)
    buffers = AttnInputs.alloc(2, layout, DEVICE)
    buffers.tail_slots.copy_(torch.arange(20, 38).view(2, 9))
    table = torch.arange(40, dtype=i32, device=DEVICE).repeat(3, 1)
    return replace(AttnPlan.over(layout, table, buffers), **change)


def lists_plan(**change) -> CsrPlan:
    layout = CONFIG.layout(ForwardMode.DRAFT_DECODE)
    return replace(
        CsrPlan(layout, ints(7, dtype=i32), ints(9, dtype=i32), ints(2, 3, dtype=i32)), **change
    )


def prompt_plan(**change) -> ExtendPlan:
    table = ints(3, 40, dtype=i32)
    return replace(
        ExtendPlan(
            table, ints(2), ints(2, dtype=i32), ints(3, dtype=i32), ints(1, 4, dtype=i32), 3, 5
        ),
        **change,
    )


BAD_PLANS = {
    "table_dtype": (
        tree_plan,
        {"req_to_token": ints(3, 40)},
        "req_to_token must be .*int32 .* got .*int64",
    ),
    "table_stride": (
        tree_plan,
        {"req_to_token": ints(40, 3, dtype=i32).T},
        r"req_to_token must be dense in its last axis, got \(1, 3\)",
    ),
    "table_device": (
        tree_plan,
        {"req_to_token": ints(3, 40, dtype=i32, device="meta")},
        "req_to_token must be .* got .* on meta",
    ),
    "rows_dtype": (tree_plan, {"req_pool_indices": ints(2, dtype=i32)}, "req_pool_indices .*int64"),
    "lens_dtype": (tree_plan, {"seq_lens": ints(2)}, "seq_lens must be .*int32"),
    "slots_dtype": (tree_plan, {"tail_slots": ints(2, 9)}, "tail_slots must be .*int32"),
    "tail_width": (
        tree_plan,
        {"tail_slots": ints(2, 8, dtype=i32)},
        r"tail_slots must be \[2, 9\] .* got \[2, 8\]",
    ),
    "words_size": (tree_plan, {"tail_words": ints(2, 9, 2)}, r"\[2, 9, 1\] .* got \[2, 9, 2\]"),
    "words_device": (tree_plan, {"tail_words": ints(2, 9, 1, device="meta")}, "tail_words .* meta"),
    "lists_dtype": (lists_plan, {"kv_indices": ints(9)}, "kv_indices must be .*int32"),
    "lists_rows": (lists_plan, {"kv_indptr": ints(6, dtype=i32)}, r"kv_indptr must be \[7\]"),
    "prompt_rows": (prompt_plan, {"qo_indptr": ints(4, dtype=i32)}, r"qo_indptr must be \[3\]"),
    "prompt_slots": (prompt_plan, {"out_slots": ints(4, dtype=i32)}, r"out_slots must be \[1, 4\]"),
}


@pytest.mark.parametrize(("plan", "bad", "message"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_is_refused_when_it_is_bound(plan, bad, message):
    layers = layered()
    with pytest.raises(ValueError, match=message):
        layers.bind(plan(**bad))
    layers.bind(plan())


def qkv(**change):
    found = {"q": torch.ones(18, 4, 64), "k": torch.ones(18, 2, 64), "v": torch.ones(18, 2, 64)}
    return {name: tensor.to(DEVICE) for name, tensor in found.items()} | change


BAD_CALLS = {
    "q_heads": ({"q": torch.ones(18, 8, 64)}, r"q must be \[18, 4, 64\] .* got \[18, 8, 64\]"),
    "k_heads": ({"k": torch.ones(18, 4, 64)}, r"k must be \[18, 2, 64\] .* got \[18, 4, 64\]"),
    "v_width": ({"v": torch.ones(18, 2, 32)}, r"v must be \[18, 2, 64\] .* got \[18, 2, 32\]"),
    "rows": ({"q": torch.ones(17, 4, 64)}, r"q must be \[18, 4, 64\] .* got \[17, 4, 64\]"),
    "q_dtype": ({"q": torch.ones(18, 4, 64).half()}, "q must be .*float32 .* got .*float16"),
    "v_dtype": ({"v": torch.ones(18, 2, 64).half()}, "v must be .*float32 .* got .*float16"),
    "k_device": ({"k": torch.ones(18, 2, 64, device="meta")}, "k must be .* got .* on meta"),
    "k_stride": ({"k": torch.ones(18, 64, 2).transpose(1, 2)}, "k must be dense in its last axis"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_layers_tensors_are_refused_before_the_pool_is_written(bad, message):
    layers = layered()
    attend, before = layers.bind(tree_plan()), layers.pool.k.clone()
    bad = {n: t if t.is_meta else t.to(DEVICE) for n, t in bad.items()}
    with pytest.raises(ValueError, match=message):
        attend(0, **qkv(**bad))
    assert not Failing.ran
    assert torch.equal(layers.pool.k, before)
    attend.fill()
    assert (attend(0, **qkv()) - 1).abs().max() < 1e-5


def test_commits_are_refused_before_anything_moves():
    pool = layered().pool
    before, path = pool.k.clone(), ints(2, 3, dtype=i32, value=0)
    kept = AcceptResult(path, path.long(), path[:, 0], path[:, 0].long())
    wrong = (ints(2, 9), "tail_slots .*int32"), (ints(3, 9, dtype=i32), r"\[2, 9\]")
    for slots, message in wrong:
        with pytest.raises(ValueError, match=message):
            pool.commit(slots, kept)
    with pytest.raises(ValueError, match=r"slots must be int32 or int64 .* got torch.float32"):
        pool.store(0, ints(2, 1).float(), before[0, :2], before[0, :2])
    assert torch.equal(pool.k, before)
    pool.commit(torch.arange(20, 38, dtype=i32, device=DEVICE).view(2, 9), kept)


def test_a_batch_above_the_buffers_is_not_cut_short():
    """A slice would be: the last requests would be missing, without a word."""
    one = world("torch_native", [1])
    steps = MultiStepDraftBackend(
        one.decoder.draft.backend, MultiStepDims.of(CONFIG), one.table.req_to_token, 4
    )
    for batch in (5, -1):
        with pytest.raises(ValueError, match=rf"batch must be 0\.\.4, got {batch}"):
            steps.bind(batch)
    assert len(steps.bind(4).inputs.seq_lens) == 4
