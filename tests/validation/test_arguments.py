"""Batches, values and settings are refused before any launch, and a good call afterwards works."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn import (
    Engine,
    Request,
    SamplingBatch,
    SamplingParams,
    SpecConfig,
    interop,
)
from specattn.batch import ForwardMode
from specattn.errors import TreeError
from specattn.speculative.decoder import SpecDecoder
from tests.tiny import TinyDraft, TinyTarget
from tests.validation.steps import LENS, PADDED, Failing, i32, ints, same, state_of
from tests.worlds import DEVICE, inputs

BAD_STEPS = {
    "rows_dtype": (
        {"req_pool_indices": ints(2, dtype=i32)},
        r"req_pool_indices must be \[2\] torch.int64 .* got \[2\] torch.int32",
    ),
    "rows_device": (
        {"req_pool_indices": ints(2, device="meta")},
        "req_pool_indices must be .* got .* on meta",
    ),
    "lens_dtype": ({"seq_lens": ints(2)}, "seq_lens must be .*int32 .* got .*int64"),
    "lens_shape": ({"seq_lens": ints(3, dtype=i32)}, r"seq_lens must be \[2\] .* got \[3\]"),
    "lens_device": ({"seq_lens": ints(2, dtype=i32, device="meta")}, "seq_lens .* got .* meta"),
    "mirror_dtype": ({"seq_lens_cpu": ints(2, device="cpu")}, "seq_lens_cpu must be .*int32 on c"),
    "mirror_device": ({"seq_lens_cpu": ints(2, dtype=i32, device="meta")}, "on cpu, got .* meta"),
    "negative": (
        {"seq_lens_cpu": torch.tensor([-1, 3], dtype=i32)},
        r"seq_lens must be 0\.\.247, .* got -1\.\.3",
    ),
    "too_long": ({"seq_lens_cpu": torch.tensor([3, 256], dtype=i32)}, r"0\.\.247.* got 3\.\.256"),
    "bonus_dtype": ({"bonus_tokens": ints(2, dtype=i32)}, "bonus_tokens must be .*int64 .*int32"),
    "bonus_count": ({"bonus_tokens": ints(1)}, r"bonus_tokens must be \[2\] .* got \[1\]"),
    "no_state": ({"state": None}, "state must be a DraftState with num_steps 4, got None"),
    "state_branches": (
        {"state": state_of(topk_tokens=ints(2, 4))},
        r"topk_tokens must be \[2, 3\] .* got \[2, 4\]",
    ),
    "state_dtype": (
        {"state": state_of(topk_tokens=ints(2, 3, dtype=i32))},
        "topk_tokens must be .*int64, got .*int32",
    ),
    "state_rows": (
        {"state": state_of(topk_probs=torch.rand(3, 3))},
        "topk_probs must have 2 rows, got 3",
    ),
    "state_device": (
        {"state": state_of(topk_tokens=ints(2, 3, device="meta"))},
        "topk_tokens must be on .* or the host, got meta",
    ),
    "sampling": (
        {"sampling": SamplingBatch.of([SamplingParams()] * 3, DEVICE)},
        r"sampling.temperature must be \[2\] .* got \[3\]",
    ),
}


@pytest.mark.parametrize(("bad", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_is_refused_before_any_launch(step, wanted, bad, message):
    with pytest.raises(ValueError, match=message):
        step.run(**bad)
    assert not Failing.ran
    same(step.outcome(), wanted)


BAD_VALUES = {
    "words_too_many": (
        {"tail_words": ints(2, 9, 2)},
        r"tail_words must be \[2, 9, 1\] .* got \[2, 9, 2\]",
    ),
    "words_dtype": ({"tail_words": ints(2, 9, 1, dtype=i32)}, "tail_words .*int64, got .*int32"),
    "a_mask": (
        {"tail_words": torch.ones(2, 9, 9, dtype=torch.bool)},
        r"tail_words must be \[2, 9, 1\] torch.int64, got \[2, 9, 9\] torch.bool",
    ),
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


def test_settings_are_refused():
    with pytest.raises(ValueError, match="validate must be 'off' or 'debug', got 'on'"):
        SpecDecoder(None, None, SpecConfig(0, 1, 1), None, validate="on")
    with pytest.raises(ValueError, match=r"max_new_tokens must be a whole number, got 2\.5"):
        Request([1], 2.5)


def test_an_unknown_word_of_indices_is_refused_where_the_engine_is_made():
    config = SpecConfig(2, 1, 3, max_context_len=64, max_num_reqs=1)
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    with pytest.raises(ValueError, match=r"^indices must be 'table' or 'csr', got 'lists'$"):
        Engine(*models, config, indices="lists")
    Engine(*models, config, indices="csr")


class Featureless(TinyTarget):
    """A target that nobody told which features the draft reads."""

    def forward(self, *args, **kwargs):
        return replace(super().forward(*args, **kwargs), hidden_states=None)


@pytest.mark.parametrize("validate", ["off", "debug"])
def test_a_target_without_the_drafts_features_is_refused(validate):
    config = SpecConfig(2, 1, 3, max_context_len=64, max_num_reqs=1)
    target, draft = Featureless(device=DEVICE), TinyDraft(device=DEVICE)
    with pytest.raises(ValueError, match=r"must give the 64 features .*, got 0: use target.with_f"):
        Engine(target, draft, config, validate=validate)


def test_features_of_another_width_are_refused(step):
    one = step.one.decoder
    with pytest.raises(ValueError, match="features must be the draft's feature_size, 64, got 65"):
        SpecDecoder(one.target, one.draft, one.config, one.req_to_token, features=65)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_slots": 0}, "num_slots must be at least two pages, got 0"),
        ({"buckets": []}, r"buckets must be batch sizes of at least 1, got \[\]"),
        ({"buckets": ()}, r"buckets must be batch sizes of at least 1, got \[\]"),
    ],
)
def test_an_engine_takes_what_is_empty_for_no_default(given, message):
    config = SpecConfig(0, 1, 1, max_context_len=64, max_num_reqs=1)
    with pytest.raises(ValueError, match=message):
        Engine(TinyTarget(device=DEVICE), None, config, backend="torch_native", **given)


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
