"""Bad input is refused before any launch, in words, and a good call afterwards works.

docs/validation.md has the same table for readers. Every message names the argument, what was
expected and what was got.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from specattn import (
    AttnConfig,
    AttnPlan,
    CapacityError,
    CaptureMismatch,
    CsrPlan,
    DraftState,
    Engine,
    ExtendPlan,
    ForwardMode,
    GraphRunner,
    KVPool,
    LayeredBackend,
    MultiStepDraftBackend,
    NotCapturedError,
    Request,
    SamplingBatch,
    SamplingParams,
    SlotTable,
    SpecBatch,
    SpecConfig,
    SpecDecoder,
    TboBackend,
    TreeError,
    interop,
)
from specattn.backends.torch_native import TorchNativeBackend
from specattn.batch import AcceptResult
from specattn.plan import AttnInputs
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import CONFIG, DEVICE, inputs, world

LENS = [5, 17]
PADDED = 4


class Failing(TorchNativeBackend):
    """Fails in one call if told to; counts what it was asked to compute."""

    name = "failing"
    capabilities = replace(TorchNativeBackend.capabilities, host_plan=True)
    fails: ClassVar[str | None] = None
    ran: ClassVar[list[int]] = []

    def bind(self, plan):
        return BoundFailing(super().bind(plan))


@dataclass
class BoundFailing:
    inner: object

    def _maybe(self, call: str) -> None:
        if Failing.fails == call:
            raise RuntimeError(f"{call} failed")

    def schedule(self, seq_lens_cpu):
        self._maybe("schedule")

    def fill(self):
        self._maybe("fill")

    def run(self, q, *rest):
        Failing.ran.append(len(q))
        self.inner.run(q, *rest)
        self._maybe("run")


@pytest.fixture(autouse=True)
def _calm():
    Failing.fails = None
    Failing.ran.clear()


@dataclass
class Step:
    """A decoder that was captured for 4 requests, and a good step of 2."""

    one: object
    batch: SpecBatch
    state: DraftState
    sampling: SamplingBatch

    def run(self, **bad):
        """Step; ``bad`` replaces fields of the batch, or the state or the sampling."""
        self.one.poison(LENS)
        parts = {"state": self.state, "sampling": self.sampling}
        parts |= {name: bad.pop(name) for name in parts if name in bad}
        batch = replace(self.batch, **bad)
        return self.one.decoder.step(batch, parts["state"], parts["sampling"])

    def outcome(self):
        return vars(self.run().accepted)


def step_of(backend=Failing) -> Step:
    one = world(backend, [PADDED])
    lens = torch.tensor(LENS, dtype=torch.int32)
    rows = torch.tensor(one.rows[:2], device=DEVICE)
    bonus = torch.tensor([3, 14], device=DEVICE)
    values = inputs(ForwardMode.DRAFT_DECODE, LENS, 1)
    sampling = SamplingBatch.of([SamplingParams()] * 2, DEVICE)
    return Step(one, SpecBatch(rows, lens.to(DEVICE), lens, bonus), DraftState(**values), sampling)


@pytest.fixture(scope="module")
def step():
    return step_of()


@pytest.fixture(scope="module")
def wanted():
    return step_of().outcome()


def same(got, want) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def ints(*shape, dtype=torch.int64, device=DEVICE, value=1):
    return torch.full(shape, value, dtype=dtype, device=device)


def state_of(**change):
    return replace(DraftState(**inputs(ForwardMode.DRAFT_DECODE, LENS, 1)), **change)


i32 = torch.int32
BAD_STEPS = {
    "rows_dtype": ({"req_pool_indices": ints(2, dtype=i32)},
                   r"req_pool_indices must be \[2\] torch.int64 .* got \[2\] torch.int32"),
    "rows_device": ({"req_pool_indices": ints(2, device="meta")},
                    "req_pool_indices must be .* got .* on meta"),
    "lens_dtype": ({"seq_lens": ints(2)}, "seq_lens must be .*int32 .* got .*int64"),
    "lens_shape": ({"seq_lens": ints(3, dtype=i32)}, r"seq_lens must be \[2\] .* got \[3\]"),
    "lens_device": ({"seq_lens": ints(2, dtype=i32, device="meta")}, "seq_lens .* got .* meta"),
    "mirror_dtype": ({"seq_lens_cpu": ints(2, device="cpu")}, "seq_lens_cpu must be .*int32 on c"),
    "mirror_device": ({"seq_lens_cpu": ints(2, dtype=i32, device="meta")}, "on cpu, got .* meta"),
    "negative": ({"seq_lens_cpu": torch.tensor([-1, 3], dtype=i32)},
                 r"seq_lens must be 0\.\.247, .* got -1\.\.3"),
    "too_long": ({"seq_lens_cpu": torch.tensor([3, 256], dtype=i32)}, r"0\.\.247.* got 3\.\.256"),
    "bonus_dtype": ({"bonus_tokens": ints(2, dtype=i32)}, "bonus_tokens must be .*int64 .*int32"),
    "bonus_count": ({"bonus_tokens": ints(1)}, r"bonus_tokens must be \[2\] .* got \[1\]"),
    "no_state": ({"state": None}, "state must be a DraftState with num_steps 4, got None"),
    "state_branches": ({"state": state_of(topk_tokens=ints(2, 4))},
                       r"topk_tokens must be \[2, 3\] .* got \[2, 4\]"),
    "state_dtype": ({"state": state_of(topk_tokens=ints(2, 3, dtype=i32))},
                    "topk_tokens must be .*int64, got .*int32"),
    "state_rows": ({"state": state_of(topk_probs=torch.rand(3, 3))},
                   "topk_probs must have 2 rows, got 3"),
    "state_device": ({"state": state_of(topk_tokens=ints(2, 3, device="meta"))},
                     "topk_tokens must be on .* or the host, got meta"),
    "sampling": ({"sampling": SamplingBatch.of([SamplingParams()] * 3, DEVICE)},
                 r"sampling.temperature must be \[2\] .* got \[3\]"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_is_refused_before_any_launch(step, wanted, bad, message):
    with pytest.raises(ValueError, match=message):
        step.run(**bad)
    assert not Failing.ran
    same(step.outcome(), wanted)


BAD_VALUES = {
    "words_too_many": ({"tail_words": ints(2, 9, 2)},
                       r"tail_words must be \[2, 9, 1\] .* got \[2, 9, 2\]"),
    "words_dtype": ({"tail_words": ints(2, 9, 1, dtype=i32)}, "tail_words .*int64, got .*int32"),
    "a_mask": ({"tail_words": torch.ones(2, 9, 9, dtype=torch.bool)},
               r"tail_words must be \[2, 9, 1\] torch.int64, got \[2, 9, 9\] torch.bool"),
    "words_device": ({"tail_words": ints(2, 9, 1, device="meta")}, "tail_words must be on .* meta"),
    "scalar": ({"tokens": torch.tensor(3)}, "tokens must have 2 rows, got 0"),
    "width": ({"tokens": ints(2, 8)}, r"tokens must be \[2, 9\] .* got \[2, 8\]"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_values_of_a_forward_are_refused_and_no_buffer_is_written(step, bad, message):
    mode = ForwardMode.TARGET_VERIFY
    good = inputs(mode, LENS, 3)
    step.one.poison(LENS)
    want = step.one.run(mode, LENS, good)
    bound, other = step.one.bound(mode, PADDED), inputs(mode, LENS, 4)
    before = {n: t.clone() for s in (bound.inputs, bound.tokens) for n, t in s.tensors().items()}
    Failing.ran.clear()
    with pytest.raises(ValueError, match=message):
        step.one.run(mode, LENS, other | bad)
    assert not Failing.ran
    for name, tensor in (bound.inputs.tensors() | bound.tokens.tensors()).items():
        assert torch.equal(tensor, before[name]), name
    step.one.poison(LENS)
    same(step.one.run(mode, LENS, good), want)


HEADS = AttnConfig(4, 2, 64)
BAD_SETTINGS = {
    "heads": (lambda: AttnConfig(6, 4, 64), "num_qo_heads must be a multiple .* got 6 and 4"),
    "no_heads": (lambda: AttnConfig(0, 1, 64), "num_qo_heads must be at least 1, got 0"),
    "dtype": (lambda: AttnConfig(4, 2, 64, dtype=torch.int8), "dtype must be .* got torch.int8"),
    "page_size": (lambda: SpecConfig(page_size=3), "page_size must be a power of two, got 3"),
    "table_page": (lambda: SlotTable(max_num_reqs=1, max_context_len=9, num_slots=64, page_size=6),
                   "page_size must be a power of two, got 6"),
    "table_page_0": (lambda: SlotTable(max_num_reqs=1, max_context_len=9, num_slots=64,
                                       page_size=0), "page_size must be a power of two, got 0"),
    "table_rows": (lambda: SlotTable(max_num_reqs=0, max_context_len=9, num_slots=64),
                   "max_num_reqs must be at least 1, got 0"),
    "table_slots": (lambda: SlotTable(max_num_reqs=1, max_context_len=9, num_slots=16,
                                      page_size=16),
                    "num_slots must be at least two pages, got 16"),
    "pool_slots": (lambda: KVPool([HEADS], 2**31, "cpu"),
                   r"num_slots must be 1\.\..* got 2147483648"),
    "geometry": (lambda: KVPool([HEADS, AttnConfig(4, 4, 64)], 9, "cpu"), "must share .* got"),
    "buckets": (lambda: GraphRunner(None, [0], DEVICE), r"buckets must be .* got \[0\]"),
    "halves": (lambda: TboBackend(TorchNativeBackend, (TorchNativeBackend,)),
               "children must be 2 backends, got 1"),
    "validate": (lambda: SpecDecoder(None, None, SpecConfig(0, 1, 1), None, validate="on"),
                 "validate must be 'off' or 'debug', got 'on'"),
    "temperature": (lambda: SamplingParams(temperature=-1), "temperature must be .* got -1"),
}


@pytest.mark.parametrize(("make", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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
    return replace(CsrPlan(layout, ints(7, dtype=i32), ints(9, dtype=i32), ints(2, 3, dtype=i32)),
                   **change)


def prompt_plan(**change) -> ExtendPlan:
    table = ints(3, 40, dtype=i32)
    return replace(ExtendPlan(table, ints(2), ints(2, dtype=i32), ints(3, dtype=i32),
                              ints(1, 4, dtype=i32), 3, 5), **change)


BAD_PLANS = {
    "table_dtype": (tree_plan, {"req_to_token": ints(3, 40)},
                    "req_to_token must be .*int32 .* got .*int64"),
    "table_stride": (tree_plan, {"req_to_token": ints(40, 3, dtype=i32).T},
                     r"req_to_token must be dense in its last axis, got \(1, 3\)"),
    "table_device": (tree_plan, {"req_to_token": ints(3, 40, dtype=i32, device="meta")},
                     "req_to_token must be .* got .* on meta"),
    "rows_dtype": (tree_plan, {"req_pool_indices": ints(2, dtype=i32)}, "req_pool_indices .*int64"),
    "lens_dtype": (tree_plan, {"seq_lens": ints(2)}, "seq_lens must be .*int32"),
    "slots_dtype": (tree_plan, {"tail_slots": ints(2, 9)}, "tail_slots must be .*int32"),
    "tail_width": (tree_plan, {"tail_slots": ints(2, 8, dtype=i32)},
                   r"tail_slots must be \[2, 9\] .* got \[2, 8\]"),
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
    with pytest.raises(ValueError, match=r"slots must be int32 .* got torch.int64"):
        pool.store(0, ints(2, 1), before[0, :2], before[0, :2])
    assert torch.equal(pool.k, before)
    pool.commit(torch.arange(20, 38, dtype=i32, device=DEVICE).view(2, 9), kept)


def test_a_batch_above_the_buffers_is_not_cut_short():
    """A slice would be: the last requests would be missing, without a word."""
    one = world("torch_native", [1])
    steps = MultiStepDraftBackend(one.decoder.draft.backend, CONFIG, one.table.req_to_token, 4)
    for batch in (5, -1):
        with pytest.raises(ValueError, match=rf"batch must be 0\.\.4, .* got {batch}"):
            steps.bind(batch)
    assert len(steps.bind(4).plan.seq_lens) == 4


BAD_BOOKS = {
    "context": (lambda t, r: t.reserve([r], [65]), CapacityError, "65 tokens .* context of 64"),
    "pages": (lambda t, r: t.reserve([r, r + 1], [64, 30]), CapacityError,
              r"16 more pages of 4 KV slots are needed, \d+ are free"),
    "rows": (lambda t, r: t.allocate(), CapacityError, "all 2 request rows are taken"),
    "negative": (lambda t, r: t.reserve([r], [-1]), ValueError,
                 r"lens must be 0 or more, got \[-1\]"),
    "unknown": (lambda t, r: t.reserve([7], [1]), ValueError, r"row must be allocated .* got 7"),
    "twice": (lambda t, r: t.reserve([r, r], [9, 9]), ValueError, "rows must differ, got"),
    "free": (lambda t, r: t.free(7), ValueError, "row must be allocated .* got 7"),
    "commit_negative": (lambda t, r: t.commit(r, -1), ValueError, r"0\.\.\d+ tokens, not for -1"),
    "commit_long": (lambda t, r: t.commit(r, 65), ValueError, r"0\.\.\d+ tokens, not for 65"),
    "commit_unknown": (lambda t, r: t.commit(7, 1), ValueError, "row must be allocated .* got 7"),
    "share": (lambda t, r: t.allocate(share=r, share_len=8), CapacityError, "rows are taken"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD_BOOKS.values(), ids=BAD_BOOKS)
def test_the_slot_table_refuses_and_stays_as_it_was(call, error, message):
    table = SlotTable(max_num_reqs=2, max_context_len=64, num_slots=72, page_size=4, device=DEVICE)
    row, other = sorted([table.allocate(), table.allocate()])
    table.reserve([row, other], [9, 20])
    before, free = table.req_to_token.clone(), table.num_free_slots
    with pytest.raises(error, match=message):
        call(table, row)
    assert torch.equal(table.req_to_token, before)
    assert (table.num_free_slots, table.committed(row)) == (free, 0)
    table.check()
    table.commit(row, 9)
    table.free(other)
    table.reserve([row], [33])
    table.check()


def test_an_engine_short_of_slots_says_so_and_goes_on():
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    config = SpecConfig(3, 2, 6, max_context_len=64, max_num_reqs=2)
    engine = Engine(target, draft, config, num_slots=50)
    free = engine.table.num_free_slots
    long, short = list(range(1, 40)), [5, 6, 7]
    with pytest.raises(CapacityError, match=r"more pages of 1 KV slots are needed, .* are free"):
        engine.generate([Request(long), Request([9, *long])])
    assert (engine.table.num_free_slots, engine.table.num_free_rows) == (free, 2)
    engine.table.check()
    (result,) = engine.generate([Request(short, max_new_tokens=9)])
    assert result.tokens == dense_greedy(target, short, 9)


BAD_REQUESTS = {
    "empty": (Request([]), "the prompt is empty"),
    "long": (Request([1] * 65), "the prompt has 65 tokens, the context holds 64"),
    "none": (Request([1], max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    "stop": (Request([1], stop=("x",)), "stop strings need detokenize"),
}


@pytest.fixture(scope="module")
def engine():
    config = SpecConfig(3, 2, 6, max_context_len=64, max_num_reqs=2)
    return Engine(TinyTarget(device=DEVICE), TinyDraft(device=DEVICE), config, backend=Failing)


@pytest.mark.parametrize(("request_", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_request_is_refused_before_anything_runs(engine, request_, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([Request([3]), request_])
    assert not Failing.ran
    assert engine.table.num_free_rows == 2
    (result,) = engine.generate([Request([5, 6], max_new_tokens=5)])
    assert len(result.tokens) == 5


@pytest.mark.parametrize("call", ["schedule", "fill", "run"])
@pytest.mark.parametrize("at", ["prompt", "step"])
def test_a_call_that_failed_leaves_an_engine_usable(engine, call, at):
    if at == "step":
        engine.add([Request([5, 6, 7], max_new_tokens=9)])
    Failing.fails = call
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        engine.step() if at == "step" else engine.generate([Request([5, 6, 7])])
    Failing.fails = None
    if at == "prompt":
        assert engine.table.num_free_rows == 2
        engine.add([Request([5, 6, 7], max_new_tokens=9)])
    result = engine._live[0].result
    while engine.num_live:  # the very step that failed, again
        engine.step()
    assert result.tokens == dense_greedy(TinyTarget(device=DEVICE), [5, 6, 7], 9)
    engine.table.check()
    assert engine.table.num_free_rows == 2


def test_a_group_that_finished_is_not_freed_twice_when_the_next_one_fails(engine, monkeypatch):
    """Near its context a request steps in a group of its own, and the other group may fail."""
    engine.add([Request([5, 6, 7], max_new_tokens=2), Request([9] * 60, max_new_tokens=30)])
    whole = engine._step_group

    def second_fails(config, group):
        if config != engine.config:
            raise RuntimeError("no more")
        return whole(config, group)

    monkeypatch.setattr(engine, "_step_group", second_fails)
    with pytest.raises(RuntimeError, match="no more"):
        engine.step()
    assert engine.num_live == 1
    engine.clear()
    engine.table.check()
    assert engine.table.num_free_rows == 2


@pytest.mark.parametrize("call", ["schedule", "fill", "run"])
def test_a_call_that_failed_leaves_a_decoder_usable(step, wanted, call):
    Failing.fails = call
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        step.run()
    Failing.fails = None
    same(step.outcome(), wanted)


def test_replay_before_capture(step, wanted):
    with pytest.raises(NotCapturedError, match=r"'extend' was never captured \(captured: target_v"):
        step.one.decoder.runner.run(ForwardMode.EXTEND, 1, None)
    same(step.outcome(), wanted)


CHANGES = {
    "config": lambda d: replace(d.config, num_draft_tokens=8),
    "req_to_token": lambda d: d.req_to_token.clone(),
    "target": lambda d: replace(d.target, backend=d.draft.backend),
    "draft": lambda d: None,
    "indices": lambda d: "csr",
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_capture_is_a_mismatch_that_names_it(step, wanted, name):
    decoder = step.one.decoder
    before = getattr(decoder, name)
    setattr(decoder, name, CHANGES[name](decoder))
    with pytest.raises(CaptureMismatch, match=f"{name} changed since capture: expected"):
        step.run()
    assert not Failing.ran
    setattr(decoder, name, before)
    same(step.outcome(), wanted)


def test_a_pool_that_moved_after_capture_is_a_mismatch(step, wanted):
    pool = step.one.decoder.target.pool
    before, pool.k = pool.k, pool.k.clone()
    with pytest.raises(CaptureMismatch, match="k_cache changed since capture"):
        step.run()
    pool.k = before
    same(step.outcome(), wanted)


DEFECTS = {
    "cycle": ([-1, 2, 1, 0], r"node 1 is in or below a cycle: \[1, 2, 1\]"),
    "itself": ([-1, 0, 2, 0], r"node 2 is in or below a cycle: \[2, 2\]"),
    "missing": ([-1, 0, -1, 0], "node 2 has no parent, and only node 0 is a root"),
    "outside": ([-1, 0, 4, 0], r"node 2: parent 4 is outside its row \(n 4\)"),
    "no_root": ([0, 0, 1, 2], "node 0 is the root, its parent must be -1, got 0"),
}


@pytest.mark.parametrize(("parents", "message"), DEFECTS.values(), ids=DEFECTS)
def test_trees_of_users_are_refused(parents, message):
    for build in (interop.links_from_parents, interop.words_from_parents):
        with pytest.raises(TreeError, match=message):
            build(torch.tensor(parents))
    good = torch.tensor([[-1, 0, 1, 0]])
    interop.validate_tree(*interop.links_from_parents(good), interop.words_from_parents(good))


@pytest.fixture(scope="module")
def debug():
    found = step_of()
    found.one.decoder.validate = "debug"
    return found


CONTENTS = {
    "padding_row": ({"req_pool_indices": torch.tensor([0, 3])},
                    r"req_pool_indices must be distinct rows 1\.\.8, got \[0, 3\]"),
    "one_row_twice": ({"req_pool_indices": torch.tensor([3, 3])}, r"distinct rows .* got \[3, 3\]"),
    "row_outside": ({"req_pool_indices": torch.tensor([3, 9])}, r"distinct rows .* got \[3, 9\]"),
    "mirror": ({"seq_lens": torch.tensor([5, 16], dtype=i32)},
               r"seq_lens must be seq_lens_cpu \[5, 17\], got \[5, 16\]"),
}


@pytest.mark.parametrize(("bad", "message"), CONTENTS.values(), ids=CONTENTS)
def test_debugging_looks_at_a_batchs_contents(debug, wanted, bad, message):
    with pytest.raises(ValueError, match=message):
        debug.run(**{name: value.to(DEVICE) for name, value in bad.items()})
    assert not Failing.ran
    same(debug.outcome(), wanted)


SLOTS = {
    "unreserved": (20, 0, r"slot of row \d+, position 20 must be 1\.\.\d+, got 0"),
    "outside": (3, 2**30, r"slot of row \d+, position 3 must be 1\.\.\d+, got 1073741824"),
    "negative": (3, -4, r"slot of row \d+, position 3 must be 1\.\.\d+, got -4"),
    "not_in_its_page": (2, 1, r"position 2 must be number 2 of a page of 4 \(page_size\)"),
    "borrowed": (18, None, r"slots row \d+ writes must be its own, got \["),
}


@pytest.mark.parametrize(("position", "slot", "message"), SLOTS.values(), ids=SLOTS)
def test_debugging_looks_at_the_slots(debug, wanted, position, slot, message):
    table, (first, row) = debug.one.table.req_to_token, debug.one.rows[:2]
    before = int(table[row, position])
    debug.one.poison(LENS)
    table[row, position] = table[first, LENS[0] + 1] if slot is None else slot
    with pytest.raises(ValueError, match=message):
        debug.one.decoder.step(debug.batch, debug.state, debug.sampling)
    assert not Failing.ran
    table[row, position] = before
    same(debug.outcome(), wanted)


TREES = {
    "cycle": ("retrieve_next_token", lambda t: t * 0 + 1, TreeError, "cycle, or a second parent"),
    "missing": ("retrieve_next_token", lambda t: t * 0 - 1, TreeError, "missing parent"),
    "words": ("words", lambda t: t | 2, TreeError, r"words name nodes \[.*\], its path is \["),
    "tokens": ("tokens", lambda t: t + 61, ValueError, r"tree.tokens must be 0\.\.60, got"),
    "positions": ("positions", lambda t: t + 1, ValueError, "tree.positions must be .* got"),
}


@pytest.mark.parametrize(("field", "spoil", "error", "message"), TREES.values(), ids=TREES)
def test_debugging_looks_at_the_tree(debug, wanted, field, spoil, error, message):
    debug.one.poison(LENS)
    tree = debug.run().tree
    debug.one.decoder.verify(debug.batch, tree)
    Failing.ran.clear()
    with pytest.raises(error, match=message):
        debug.one.decoder.verify(debug.batch, replace(tree, **{field: spoil(getattr(tree, field))}))
    assert not Failing.ran
    same(debug.outcome(), wanted)


def test_an_engine_may_validate_every_step():
    target, config = TinyTarget(device=DEVICE), SpecConfig(4, 2, 7, max_context_len=64)
    engine = Engine(target, TinyDraft(device=DEVICE), config, validate="debug")
    prompts = [list(range(1, 30)), list(range(1, 25)), [7]]
    out = engine.generate([Request(prompt, max_new_tokens=30) for prompt in prompts])
    for prompt, result in zip(prompts, out, strict=True):
        assert result.tokens == dense_greedy(target, prompt, 30)
