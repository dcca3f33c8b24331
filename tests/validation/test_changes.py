"""What was not captured, or changed since, is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specattn.batch import ForwardMode
from specattn.cuda_graph.runner import _addresses
from specattn.errors import CaptureMismatch, NotCapturedError
from specattn.speculative.step.level import Level, StepPart
from tests.validation.steps import Failing, same, step_of
from tests.worlds import put


def test_replay_before_capture(step, wanted):
    with pytest.raises(NotCapturedError, match=r"'decode' was never captured \(captured: draft_d"):
        step.one.decoder.runner.ready((StepPart(ForwardMode.DECODE),), 1)
    with pytest.raises(NotCapturedError, match=r"'target_verify \(sampled\)' was never captured"):
        step.one.decoder.step(step.rows, sampled=True)
    same(step.outcome(), wanted)


CHANGES = {
    "config": lambda d: replace(d.config, num_draft_tokens=8),
    "table": lambda d: None,
    "states": lambda d: replace(d.states),
    "target": lambda d: replace(d.target, backend=d.draft.backend),
    "draft": lambda d: None,
    "setup": lambda d: replace(d.setup),
    "options": lambda d: replace(d.options, indices="csr"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_graphs_bake_in_cannot_be_replaced(step, wanted, name):
    decoder = step.one.decoder
    with pytest.raises(AttributeError, match=rf"StepDecoder\.{name} is read-only"):
        setattr(decoder, name, CHANGES[name](decoder))
    with pytest.raises(AttributeError, match=rf"StepDecoder\.{name} is read-only"):
        delattr(decoder, name)
    same(step.outcome(), wanted)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_pool_that_moved_after_capture_is_a_mismatch(step, wanted, model, which):
    pool = getattr(step.one.decoder, model).pool
    with pytest.raises(AttributeError, match=rf"KVPool\.{which} is read-only"):
        setattr(pool, which, getattr(pool, which).clone())
    cache = getattr(pool, which)
    before = cache.data
    cache.data = before.clone()
    with pytest.raises(CaptureMismatch, match=f"{which}_cache changed since capture"):
        step.run()
    assert not Failing.ran
    cache.data = before
    same(step.outcome(), wanted)


@pytest.mark.parametrize("name", ["seq_lens", "bonus_tokens", "topk_probs", "hidden_states"])
@pytest.mark.parametrize("by_force", [True, False])
def test_states_that_were_replaced_after_capture_are_a_mismatch(step, wanted, name, by_force):
    """The graphs would go on with the old ones, and nobody would be told."""
    states = step.one.decoder.states
    old = states.tensors()[name]
    before = old.data
    step.prepare()
    if by_force:
        put(states, name, old.clone())
    else:
        old.data = before.clone()
    with pytest.raises(CaptureMismatch, match=rf"states\.{name} changed since capture"):
        step.go()
    assert not Failing.ran
    put(states, name, old)
    old.data = before
    same(step.outcome(), wanted)


def test_every_part_of_a_step_is_compared_with_its_own_capture(step, wanted):
    """Parts are captured one after the other: the first may be right where a later one is not."""
    decoder = step.one.decoder
    for part in decoder.parts[Level.GREEDY]:
        captured = decoder.runner._captured[part][4]
        object.__setattr__(captured, "addresses", [1, *captured.addresses[1:]])
        object.__setattr__(captured, "fingerprint", (("part", None), *captured.fingerprint[1:]))
        with pytest.raises(CaptureMismatch, match="part changed since capture"):
            step.run()
        assert not Failing.ran
        now = captured.program
        object.__setattr__(captured, "fingerprint", now.fingerprint())
        object.__setattr__(captured, "addresses", _addresses(now.holders()))
    same(step.outcome(), wanted)


def test_debugging_compares_what_nobody_can_replace_but_by_force(wanted):
    step = step_of(validate="debug")
    Failing.ran.clear()
    (launched,) = step.one.decoder._launches[4].steps
    sets = {"buffers": launched.buffers, "drafting": launched.bound.multi_step.inputs}
    for owner, buffers in sets.items():
        for name, tensor in buffers.tensors().items():
            object.__setattr__(buffers, name, tensor.clone())
            if tensor.numel():
                with pytest.raises(CaptureMismatch, match=rf"{owner}\.{name} changed since"):
                    step.run()
            object.__setattr__(buffers, name, tensor)
    layer = step.one.decoder.target.backend.layers[0].backend.config
    scale = layer.sm_scale
    object.__setattr__(layer, "sm_scale", 0.5)
    with pytest.raises(CaptureMismatch, match=r"AttnConfig\[0\]\.sm_scale changed since capture"):
        step.run()
    object.__setattr__(layer, "sm_scale", scale)
    assert not Failing.ran
    same(step.outcome(), wanted)
