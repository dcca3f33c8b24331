"""R09: sglang#37975.

A FlashInfer MLA replay rebuilt ``kv_indptr`` in the eager path's buffer, while the captured
wrapper read another one.

There is one buffer: every step of every bucket reads the memory that ``fill`` writes, and reading
other memory than was captured is an error that names it.
"""

from __future__ import annotations

import pytest

from specattn.batch import ForwardMode
from specattn.errors import CaptureMismatch
from tests.worlds import BACKENDS, DEVICE, MODES, buffer_sets, inputs, world


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_fill_writes_is_what_the_steps_read(backend):
    one = world(backend, [2, 8], indices="csr")
    shared = one.bound(ForwardMode.DRAFT_DECODE, 8).steps
    assert shared.kv_indptr.device.type == DEVICE.type
    for bucket in (2, 8):
        steps = one.bound(ForwardMode.DRAFT_DECODE, bucket).steps
        for step, layers in enumerate(steps.steps):
            for name in ("kv_indptr", "kv_indices"):
                read, filled = getattr(layers.plan, name), getattr(shared, name)[step]
                assert read.data_ptr() == filled.data_ptr()
                assert layers.bounds[0].plan is layers.plan


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_memory_is_an_error_that_names_the_buffer(backend, mode):
    lens = [5]
    names = [name for part in buffer_sets(world(backend, [1]).bound(mode, 1))
             for name in part.tensors()]
    for name in ("seq_lens", "req_pool_indices", names[-1]):
        one = world(backend, [1])
        part = next(p for p in buffer_sets(one.bound(mode, 1)) if name in p.tensors())
        object.__setattr__(part, name, getattr(part, name).clone())
        with pytest.raises(CaptureMismatch, match=rf"{name} changed since capture"):
            one.run(mode, lens, inputs(mode, lens, 0))
