"""R29: vllm#26499.

A graph was chosen by the number of decode requests where its key was the number of decode tokens.

The key is the number of requests, the only count a caller states; the width belongs to the mode.
"""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from tests.worlds import BACKENDS, DEVICE, MODES, inputs, part_of, world

CHOSEN = {1: 1, 2: 4, 3: 4, 4: 4, 5: 8, 8: 8}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "config", [SpecConfig(1, 3, 4, 256, 8), SpecConfig(3, 1, 4, 256, 8)], ids=["topk3", "chain"]
)
def test_the_smallest_bucket_that_holds_the_requests(mode, config):
    """A width of 4 tokens: counting tokens would pick other buckets."""
    one = world(BACKENDS[-1], [1, 4, 8], config)
    ran = {}
    for bucket, captured in one.decoder.runner._captured[part_of(mode)].items():
        assert captured.bucket == bucket
    for count in CHOSEN:
        lens = [5] * count
        one.poison(lens)
        (captured,) = one.decoder.runner.ready((part_of(mode),), count)
        ran[count] = captured.bucket
        out = one.run(mode, lens, inputs(mode, lens, 0, config))
        assert {len(value) for value in out.values()} == {count}
        assert next(iter(out.values())).device.type == DEVICE.type
    assert ran == CHOSEN
    assert not one.decoder.runner.stats.eager
