"""R04: sglang#10892, sglang#6309, sglang#8296, sglang#8336, sglang#9888.

Positions of padded rows kept the values of an earlier, larger batch, and the draft's ``kv_indptr``
was derived from positions: an EAGLE replay read indices outside the pool.

After a larger batch, every padded row holds its declared padding, offsets come from lengths and
never decrease, and every listed slot is one the pool has.
"""

from __future__ import annotations

import pytest

from specattn.batch import ForwardMode
from tests.worlds import BACKENDS, DEVICE, inputs, world


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_after_the_batch_are_padding_after_a_larger_batch(backend):
    mode = ForwardMode.DRAFT_DECODE
    one = world(backend, [8], indices="csr")
    for lens in ([240, 3, 99, 64, 7, 200, 1, 244], [17, 200, 0]):
        one.poison(lens)
        one.run(mode, lens, inputs(mode, lens, len(lens)))
    steps = one.step(mode, 8).bound.multi_step
    given = steps.inputs
    assert given.seq_lens.device.type == DEVICE.type
    assert not given.req_pool_indices[3:].any()
    assert not given.seq_lens[3:].any()
    assert not given.branch_slots[3:].any(), "padding writes outside slot 0"
    assert given.positions[3:, :, 0].tolist() == [[0, 1, 2]] * 5
    slots = one.pools[1].k.shape[1]
    for step in range(3):
        indptr = steps.kv_indptr[step]
        assert (indptr.diff() > 0).all()
        listed = steps.kv_indices[step, : int(indptr[-1])]
        assert listed.min() >= 0
        assert listed.max() < slots
