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
from tests.backends.fake_flashinfer import install
from tests.backends.test_flashinfer_mla import BF16, bind, lens_of
from tests.oracle import make_lists_case, make_tree_case
from tests.worlds import BACKENDS, DEVICE, MODES, buffer_sets, inputs, part_of, put, world


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_fill_writes_is_what_the_steps_read(backend):
    one = world(backend, [2, 8], indices="csr")
    shared = one.step(ForwardMode.DRAFT_DECODE, 8).bound.multi_step
    assert shared.kv_indptr.device.type == DEVICE.type
    for bucket in (2, 8):
        steps = one.step(ForwardMode.DRAFT_DECODE, bucket).bound.multi_step
        for step, layers in enumerate(steps.steps):
            for name in ("kv_indptr", "kv_indices"):
                read, filled = getattr(layers.plan, name), getattr(shared, name)[step]
                assert read.data_ptr() == filled.data_ptr()
                assert layers.bounds[0].plan is layers.plan


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_memory_is_an_error_that_names_the_buffer(backend, mode):
    """What others can reach is compared every time, private buffers when debugging."""
    lens = [5]
    for name in ("seq_lens", "bonus_tokens", "hidden_states"):
        one = world(backend, [1])
        states = one.decoder.states
        put(states, name, states.tensors()[name].clone())
        with pytest.raises(CaptureMismatch, match=rf"states\.{name} changed since capture"):
            one.run(mode, lens, inputs(mode, lens, 0))
    for part in range(2):
        one = world(backend, [1])
        step = one.step(mode, 1)
        (captured,) = one.decoder.runner.ready((part_of(mode),), 1)
        for name, tensor in buffer_sets(step)[part].tensors().items():
            object.__setattr__(buffer_sets(step)[part], name, tensor.clone())
            if tensor.numel():
                with pytest.raises(CaptureMismatch, match=rf"{name} changed since capture"):
                    captured.compare()
            object.__setattr__(buffer_sets(step)[part], name, tensor)
        captured.compare()


@pytest.mark.parametrize("lists", [False, True])
def test_flashinfers_mla_wrapper_reads_what_fill_writes(monkeypatch, lists):
    """Before any batch, and after each."""
    install(monkeypatch)
    form = {
        "heads": (4, 1),
        "head_dim": 576,
        "v_head_dim": 512,
        "latent": True,
        "dtype": BF16,
        "device": DEVICE,
    }
    case = (
        make_lists_case([9, 3], topk=2, step=1, **form)
        if lists
        else make_tree_case([9, 3], mode="chain", q_len=3, **form)
    )
    bound = bind(case)
    filled = bound.lists.indices.data_ptr()
    for lens in (lens_of(case), lens_of(case) // 2):
        assert bound.wrapper._kv_indices_buf.data_ptr() == filled
        bound.schedule(lens)
        bound.fill()
