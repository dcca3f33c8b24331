"""R05: sglang#22958, sglang#18647, sglang#18984.

Rows past the batch kept stale request rows, draft tokens, hidden states and extend lengths of one
of two graph runners (the fix was not ported to its twin): illegal accesses and failed asserts.

One copy rule pads every buffer of every mode: with hostile values in all of them beforehand, the
answers are those of fresh buffers.
"""

from __future__ import annotations

import pytest

from tests.worlds import BACKENDS, DEVICE, MODES, buffer_sets, identical, inputs, world


def make_hostile(step) -> None:
    """NaN and huge integers, in every row of every buffer that a batch writes."""
    for part in (*(part.tensors() for part in buffer_sets(step)), step.bound.gathers):
        for tensor in part.values():
            # the words of the first draft forward never change: every node sees itself
            if tensor is step.bound.multi_step.inputs.words:
                tensor = tensor[:, 1:]
            value = float("nan") if tensor.is_floating_point() else 2**31 - 1
            assert tensor.device.type == DEVICE.type
            tensor.fill_(value)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hostile_leftovers_change_nothing(backend, mode):
    stale, fresh = world(backend, [8]), world(backend, [8])
    lens = [200, 0, 65]
    values = inputs(mode, lens, 3)
    make_hostile(stale.step(mode, 8))
    for one in (stale, fresh):
        one.poison(lens)
    identical(stale.run(mode, lens, values), fresh.run(mode, lens, values))
