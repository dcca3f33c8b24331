"""Batches, values and settings are refused before any launch, and a good call afterwards works."""

from __future__ import annotations

from dataclasses import fields, replace
from inspect import signature

import pytest

from specattn import (
    Engine,
    Request,
    SpecConfig,
)
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.setup import StepArguments, StepKeywords, StepOptions
from tests.tiny import TinyDraft, TinyTarget
from tests.validation.steps import Failing, i32, ints, same
from tests.worlds import DEVICE

BAD_STEPS = {
    "lens_dtype": ({"lens": ints(2, device="cpu")}, "seq_lens_cpu must be .*int32 on cpu"),
    "lens_shape": ({"lens": ints(3, dtype=i32, device="cpu")}, r"seq_lens_cpu .* \[2\] .* \[3\]"),
    "lens_device": ({"lens": ints(2, dtype=i32, device="meta")}, "on cpu, got .* meta"),
    "row_twice": ({"rows": [3, 3]}, r"rows must be distinct rows 1\.\.8, .* got \[3, 3\]"),
    "row_outside": ({"rows": [3, 9]}, r"rows must be distinct rows 1\.\.8, .* got \[3, 9\]"),
    "row_negative": ({"rows": [3, -1]}, r"rows must be distinct rows 1\.\.8, .* got \[3, -1\]"),
    "row_half": ({"rows": [3, 1.5]}, r"every row must be a whole number, got 1\.5"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_is_refused_before_any_launch(step, wanted, bad, message):
    with pytest.raises(ValueError, match=message):
        step.run(**bad)
    assert not Failing.ran
    same(step.outcome(), wanted)


def test_settings_are_refused():
    with pytest.raises(ValueError, match="validate must be 'off' or 'debug', got 'on'"):
        StepDecoder(None, None, SpecConfig(0, 1, 1), None, None, validate="on")
    with pytest.raises(ValueError, match=r"max_new_tokens must be a whole number, got 2\.5"):
        Request([1], 2.5)


@pytest.mark.parametrize("tree", [(0, 1, 1), (1, 1, 2), (2, 1, 3)])
def test_an_unknown_word_of_indices_is_refused_where_the_engine_is_made(tree):
    config = SpecConfig(*tree, max_context_len=64, max_num_reqs=1)
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE) if tree[0] else None
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


def test_type_checkers_know_every_keyword():
    options = {field.name for field in fields(StepOptions)}
    assert StepKeywords.__annotations__.keys() == options
    taken = signature(StepDecoder.step_async).parameters.keys() - {"self", "rows"}
    assert StepArguments.__annotations__.keys() == taken
