"""R08: sglang#26019, sglang#26134.

A replay forgot to recompute the split-KV plan (and its sliding-window twin), so a captured kernel
cut its work for ever as at capture.

The cut is part of ``fill``, which is recorded: captured on empty padding, a graph serves the
longest context, then the shortest, as an eager decoder does.
"""

from __future__ import annotations

import pytest

from tests.worlds import BACKENDS, DEVICE, MODES, identical, inputs, world

LENGTHS = [[0, 0], [244, 1], [1, 244], [1, 1], [63, 65], [244, 244]]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_length_replays_as_it_runs_eagerly(backend, mode):
    """Bit by bit; the target has a sliding-window layer."""
    replayed, eager = world(backend, [2]), world(backend, [2], record=False)
    assert replayed.decoder.runner.recording == (DEVICE.type == "cuda")
    for seed, lens in enumerate(LENGTHS):
        values = inputs(mode, lens, seed)
        for one in (replayed, eager):
            one.poison(lens)
        identical(replayed.run(mode, lens, values), eager.run(mode, lens, values))
