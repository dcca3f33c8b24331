"""R07: sglang#21987, sglang#19807.

Capture laid ``cu_seqlens_q`` out uniformly, replay raggedly from the accepted lengths: the kernel
read one layout with the constants of the other.

There is one binding, and its fingerprint (addresses, shapes, strides, dtypes, constants) is the
same at capture, after any batch, and for an eager binding; another layout raises.
"""

from __future__ import annotations

import pytest

from specattn.errors import CaptureMismatch
from tests.worlds import BACKENDS, DEVICE, MODES, inputs, part_of, put, world


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_layout_is_the_same_whatever_runs(backend, mode):
    one = world(backend, [4, 8])
    captured = one.decoder.runner._captured[part_of(mode)]
    for lens in ([0], [244, 0, 17, 3], [64] * 8, [1, 200]):
        one.poison(lens)
        one.run(mode, lens, inputs(mode, lens, len(lens)))
        for bucket in (4, 8):
            assert captured[bucket].program.fingerprint() == captured[bucket].fingerprint
    eager = one.decoder._launch_of(part_of(mode), 4)

    def layouts(print_):
        return [(name, what[1:] if isinstance(what, tuple) else what) for name, what in print_]

    assert layouts(eager.fingerprint()) == layouts(captured[4].fingerprint)


def test_a_ragged_replay_of_a_uniform_capture_is_refused():
    """A table that is a column wider in the same place is not the captured one."""
    mode, lens = MODES[2], [5, 9]
    one = world(BACKENDS[-1], [2])
    states = one.decoder.states
    tokens = states.drafting["topk_tokens"]
    wide = tokens.new_zeros(len(tokens), tokens.shape[1] + 1)
    put(states, "topk_tokens", wide.to(DEVICE)[:, 1:])
    with pytest.raises(CaptureMismatch, match="topk_tokens changed since capture"):
        one.run(mode, lens, inputs(mode, lens, 0))
