"""R22: NVIDIA/TensorRT-LLM#17110.

A host loop appended KV under capture when a request had several query tokens: the write positions
froze to the dummy blocks of the capture, and accuracy fell while acceptance looked fine.

The slots a forward writes are read from the table on the device, inside the recording: a replay
for another request writes that request's tail and nothing else.
"""

from __future__ import annotations

import pytest

from specattn.batch import ForwardMode
from tests.worlds import BACKENDS, DEVICE, MODES, inputs, world


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replay_writes_only_the_tails_of_its_requests(backend, mode):
    one = world(backend, [4])
    config = one.decoder.config
    tail = config.layout(mode, config.num_draft_forwards - 1).tail
    pool = one.pools[0 if mode is ForwardMode.TARGET_VERIFY else 1]
    for lens in ([70, 9, 200, 31], [3, 130]):
        one.rows.reverse()  # other requests than before
        one.poison(lens)
        one.run(mode, lens, inputs(mode, lens, 0))
        # poison left NaN everywhere but in the prefixes
        written = (~pool.k[0, :, 0, 0].isnan()).nonzero()[:, 0].tolist()
        want = {0} if len(lens) < 4 else set()
        for row, length in zip(one.rows, lens, strict=False):
            want |= set(one.table.req_to_token[row, : length + tail].tolist())
        assert pool.k.device.type == DEVICE.type
        assert set(written) == want
