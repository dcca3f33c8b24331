"""R49: vllm#55013.

After the engine had slept and woken, its KV caches lay elsewhere and graphs replayed over the
freed memory.

A replay first compares the addresses of the request table and of every static buffer with those of
the capture, those of the KV pools among them.
"""

from __future__ import annotations

import pytest

from specattn.batch import ForwardMode
from specattn.errors import CaptureMismatch
from tests.worlds import BACKENDS, DEVICE, MODES, inputs, world


def refused(one, mode, name: str) -> None:
    lens = [9, 40]
    one.poison(lens)
    with pytest.raises(CaptureMismatch, match=name):
        one.run(mode, lens, inputs(mode, lens, 0))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_that_moved_is_refused(backend, mode):
    one = world(backend, [2])
    table = one.decoder.table
    assert table.req_to_token.device.type == DEVICE.type
    with pytest.raises(AttributeError, match=r"SlotTable\.req_to_token is read-only"):
        table.req_to_token = table.req_to_token.clone()
    table.req_to_token.set_(table.req_to_token.clone())
    refused(one, mode, "req_to_token")


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_that_moved_is_refused(backend, mode, which):
    one = world(backend, [2])
    pool = one.pools[0 if mode is ForwardMode.TARGET_VERIFY else 1]
    with pytest.raises(AttributeError, match=f"KVPool.{which} is read-only"):
        setattr(pool, which, getattr(pool, which).clone())
    captured = getattr(pool, which)
    kept = captured.view(captured.shape)  # a graph that does replay writes to it
    captured.set_(captured.clone())
    refused(one, mode, which)
    del kept
