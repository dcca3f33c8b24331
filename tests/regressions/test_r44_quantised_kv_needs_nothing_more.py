"""R44: sglang#36010, sglang#36038, sglang#36045, vllm#54992.

Speculation over a quantised KV cache needed prefix lengths on the host, or lost its graphs, and
said so at the first request only.

A float8 pool is served by the same bound forwards: lengths are read on the device, and one recorded
graph per bucket serves every length. A backend or a GPU that cannot read it says so by name when
the engine is made, before there is any request.
"""

from __future__ import annotations

import pytest
import torch

from specattn.backends import available, backend_names, load_backend
from specattn.config import AttnConfig, SpecConfig
from specattn.engine.engine import Engine
from specattn.errors import UnsupportedError
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE, MODES, identical, inputs, part_of, world

FLOAT8 = torch.float8_e4m3fn
# the Triton kernels multiply float8 keys by 16-bit queries
DTYPES = {"torch_native": torch.float32, "triton": torch.float16}
BATCHES = [[9, 0, 77], [240, 1, 130, 64], [0, 0]]


def run(one, mode, lens: list[int], on_host: torch.Tensor | None) -> dict[str, torch.Tensor]:
    one.poison(lens)
    values = inputs(mode, lens, len(lens))
    return one.run(mode, lens, values, on_host=on_host is not None)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_every_length_without_host_lengths(backend, mode):
    one = world(backend, [4], dtype=DTYPES[backend], kv_dtype=FLOAT8)
    eager = world(backend, [4], dtype=DTYPES[backend], kv_dtype=FLOAT8, record=False)
    runner = one.decoder.runner
    assert runner.captured(part_of(mode)) == [4]
    graphs = load_backend(backend).capabilities.graphs and DEVICE.type == "cuda"
    assert runner.recorded(part_of(mode)) == graphs
    for lens in BATCHES:
        replayed = run(one, mode, lens, None)
        assert not any(value.isnan().any() for value in replayed.values())
        identical(replayed, run(eager, mode, lens, torch.tensor(lens, dtype=torch.int32)))
    assert runner.stats.replays[part_of(mode)] == len(BATCHES)
    assert not runner.stats.eager


@pytest.mark.parametrize("name", backend_names())
def test_who_cannot_read_it_says_so_before_the_first_request(name):
    if FLOAT8 in load_backend(name).capabilities.kv_dtypes:
        pytest.skip("reads it")
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    with pytest.raises(UnsupportedError, match=r"kv_dtype must be torch\.float32, got"):
        Engine(target, draft, SpecConfig(3, 1, 4, 64, 2), backend=name, kv_dtype=FLOAT8)


@pytest.mark.parametrize(
    ("capability", "reasons"),
    [
        ((8, 0), ["a float8 KV cache needs compute capability 8.9, got 8.0"]),
        ((8, 6), ["a float8 KV cache needs compute capability 8.9, got 8.6"]),
        ((8, 9), []),
        ((9, 0), []),
        ((10, 0), []),
    ],
)
def test_a_gpu_without_e4m3_is_named(monkeypatch, capability, reasons):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    config = AttnConfig(8, 2, 128, dtype=torch.bfloat16, kv_dtype=FLOAT8)
    assert available("triton", config, torch.device("cuda")) == reasons
    assert available("torch_native", config, torch.device("cuda")) == []
