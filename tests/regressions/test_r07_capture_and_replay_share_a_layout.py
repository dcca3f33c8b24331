"""R07: sglang#21987, sglang#19807.

Capture laid ``cu_seqlens_q`` out uniformly, replay raggedly from the accepted lengths: the kernel
read one layout with the constants of the other.

There is one binding, and its fingerprint (addresses, shapes, strides, dtypes, constants) is the
same at capture, after any batch, and for an eager binding; another layout raises.
"""

from __future__ import annotations

import pytest

from specattn.errors import CaptureMismatch
from tests.worlds import BACKENDS, DEVICE, MODES, inputs, world


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_layout_is_the_same_whatever_runs(backend, mode):
    one = world(backend, [4, 8])
    captured = one.decoder.runner._captured[mode]
    for lens in ([0], [244, 0, 17, 3], [64] * 8, [1, 200]):
        one.poison(lens)
        one.run(mode, lens, inputs(mode, lens, len(lens)))
        for bucket in (4, 8):
            assert captured[bucket].bound.fingerprint() == captured[bucket].fingerprint
    eager = one.decoder._program(mode, 8).bind(4)

    def layouts(print_):
        return [(name, what[1:] if isinstance(what, tuple) else what) for name, what in print_]

    assert layouts(eager.fingerprint()) == layouts(captured[4].fingerprint)


def test_a_ragged_replay_of_a_uniform_capture_is_refused():
    mode, lens = MODES[2], [5, 9]
    one = world(BACKENDS[-1], [2])
    taken = one.bound(mode, 2).accepted
    wide = taken.tokens.new_zeros(2, taken.tokens.shape[1] + 1).to(DEVICE)
    object.__setattr__(taken, "tokens", wide[:, 1:])
    with pytest.raises(CaptureMismatch, match="tokens changed since capture"):
        one.run(mode, lens, inputs(mode, lens, 0))
