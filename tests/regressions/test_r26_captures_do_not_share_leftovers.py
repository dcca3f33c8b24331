"""R26: vllm#48261.

Capturing the drafter reused the target's persistent metadata buffers: at capture, a combine kernel
ran past them.

Every mode has buffers of its own and is captured on padding, so the order of captures does not
show.
"""

from __future__ import annotations

import pytest

from specattn.cuda_graph import GraphRunner
from tests.worlds import BACKENDS, DEVICE, MODES, buffer_sets, identical, inputs, part_of, world


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_order_of_captures_gives_the_same_answers(backend):
    lens = [30, 0, 101]
    found = []
    for order in (MODES, MODES[::-1]):
        one = world(backend, [3])
        decoder = one.decoder
        runner = GraphRunner(decoder._launch_of, [3], DEVICE, before=decoder._before_capture)
        for mode in order:
            runner.capture(part_of(mode))
        # the host goes on from the entry that the captures have left
        decoder._in_flight.align()
        vars(decoder)["runner"] = runner
        outs = {}
        for mode in MODES:
            one.poison(lens)
            outs |= {(mode, n): v for n, v in one.run(mode, lens, inputs(mode, lens, 1)).items()}
        found.append(outs)
    identical(*found)


def test_phases_share_no_buffer():
    """But for what the first kernel of a step writes for all of them."""
    step = world("torch_native", [3]).step(MODES[0], 3)
    shared = {"req_pool_indices", "seq_lens", "branch_slots"}
    owner: dict[int, str] = {}
    for part in buffer_sets(step):
        for name, tensor in part.tensors().items():
            if tensor.numel() and not (part is not step.buffers and name in shared):
                assert owner.setdefault(tensor.data_ptr(), name) == name
