"""What was not captured, or changed since, is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specattn.batch import ForwardMode
from specattn.errors import CaptureMismatch, NotCapturedError
from tests.validation.steps import Failing, same


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
