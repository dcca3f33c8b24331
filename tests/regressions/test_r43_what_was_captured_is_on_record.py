"""R43: sglang#31198.

A verify graph was captured on a stale prefill fallback: it ran, through another path than asked.

A capture is kept under its mode with what it bound: the backend that was asked for, the layout of
the mode, and a recorded graph exactly where one was wanted.
"""

from __future__ import annotations

import pytest

from specattn.backends import load_backend
from tests.worlds import BACKENDS, CONFIG, DEVICE, MODES, part_of, world


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_capture_is_the_one_asked_for(backend, record):
    one = world(backend, [1, 2], record=record)
    chosen = load_backend(backend)
    for slot in (one.decoder.target, one.decoder.draft):
        assert slot.backend.name == backend
    for mode in MODES:
        assert one.decoder.runner.captured(part_of(mode)) == [1, 2]
        for bucket in (1, 2):
            captured = one.decoder.runner._captured[part_of(mode)][bucket]
            graph = record and DEVICE.type == "cuda" and chosen.capabilities.graphs
            assert (captured.graph is not None) == graph
            for step, attend in enumerate(one.step(mode, bucket).attention(mode)):
                assert attend.plan.layout == CONFIG.layout(mode, step)
                assert attend.plan.batch == bucket
                for layer in attend.layers:
                    assert type(layer.backend).__module__ == chosen.__module__
                for one_bound in attend.bounds:
                    assert one_bound.plan is attend.plan
