"""R28: local-inference-lab/vllm#396, local-inference-lab/vllm#398.

FlashInfer decode wrappers were not keyed by the captured shape: capturing another batch size bound
them anew, under the graph that had been captured first.

A capture owns what it bound. Replaying each bucket after all the others gives what a decoder with
that bucket alone gives.
"""

from __future__ import annotations

import pytest

from tests.worlds import BACKENDS, DEVICE, MODES, identical, inputs, world


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_buckets_replay_after_one_another(backend, mode):
    many = world(backend, [1, 2, 4])
    assert many.decoder.runner.captured(mode) == [1, 2, 4]
    for size in (4, 1, 2, 1, 4):
        lens = [65, 0, 130, 7][:size]
        alone = world(backend, [size])
        assert alone.pools[0].k.device.type == DEVICE.type
        values = inputs(mode, lens, size)
        for one in (many, alone):
            one.poison(lens)
        identical(many.run(mode, lens, values), alone.run(mode, lens, values))
