"""R28: local-inference-lab/vllm#396, local-inference-lab/vllm#398.

FlashInfer decode wrappers were not keyed by the captured shape: capturing another batch size bound
them anew, under the graph that had been captured first.

A capture owns what it bound. Replaying each bucket after all the others gives what a decoder with
that bucket alone gives.
"""

from __future__ import annotations

import pytest

from specattn.backends.flashinfer import FlashInferBackend
from tests.backends import fake_flashinfer as fake
from tests.backends.flashinfer_cases import BF16, Live, config_of
from tests.oracle import make_tree_case
from tests.worlds import BACKENDS, DEVICE, MODES, identical, inputs, part_of, world


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_buckets_replay_after_one_another(backend, mode):
    many = world(backend, [1, 2, 4])
    assert many.decoder.runner.captured(part_of(mode)) == [1, 2, 4]
    for size in (4, 1, 2, 1, 4):
        lens = [65, 0, 130, 7][:size]
        alone = world(backend, [size])
        assert alone.pools[0].k.device.type == DEVICE.type
        values = inputs(mode, lens, size)
        for one in (many, alone):
            one.poison(lens)
        identical(many.run(mode, lens, values), alone.run(mode, lens, values))


@pytest.mark.parametrize(("mode", "q_len"), [("chain", 1), ("tree", 5)])
def test_flashinfers_wrappers_are_those_of_their_bucket(monkeypatch, mode, q_len):
    """One backend, captured at 1, 2 and 4 requests, replayed at 1 after 4."""
    fake.install(monkeypatch)

    def drawn(size: int, seed: int):
        lens = [5 + seed, 130, 0, 64][:size]
        return make_tree_case(
            lens,
            mode=mode,
            q_len=q_len,
            width=200,
            slots=800,
            head_dim=64,
            dtype=BF16,
            device=DEVICE,
            seed=seed,
        )

    backend, captured = None, {}
    for size in (1, 2, 4):
        case = drawn(size, 0)
        backend = backend or FlashInferBackend(config_of(case), DEVICE)
        captured[size] = Live(case, mode == "chain", backend)
        captured[size].record()
    assert (
        len({live.bound.wrapper._int_workspace_buffer.data_ptr() for live in captured.values()})
        == 3
    )
    for seed, size in enumerate((4, 1, 2, 1, 4)):
        captured[size].load(drawn(size, seed))
        captured[size].replay()
        captured[size].verdict()
