"""R26: vllm#48261.

Capturing the drafter reused the target's persistent metadata buffers: at capture, a combine kernel
ran past them.

Every mode has buffers of its own and is captured on padding, so the order of captures does not
show.
"""

from __future__ import annotations

import pytest

from specattn.cuda_graph import GraphRunner
from tests.worlds import BACKENDS, DEVICE, MODES, buffer_sets, identical, inputs, world


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_order_of_captures_gives_the_same_answers(backend):
    lens = [30, 0, 101]
    found = []
    for order in (MODES, MODES[::-1]):
        one = world(backend, [3])
        one.decoder.runner = GraphRunner(one.decoder._program, [3], DEVICE)
        for mode in order:
            one.decoder.runner.capture(mode)
        outs = {}
        for mode in MODES:
            one.poison(lens)
            outs |= {(mode, n): v for n, v in one.run(mode, lens, inputs(mode, lens, 1)).items()}
        found.append(outs)
    identical(*found)


def test_modes_share_no_buffer():
    one = world("torch_native", [3])
    owner: dict[int, object] = {}
    for mode in MODES:
        for part in buffer_sets(one.bound(mode, 3)):
            for tensor in part.tensors().values():
                if tensor.numel():
                    assert owner.setdefault(tensor.data_ptr(), mode) is mode
