"""FlashInfer recorded: one graph for other lengths and trees, plans ahead of the device.

Without a GPU, replaying is calling; see `tests/backends/test_flashinfer.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.backends import fake_flashinfer as fake
from tests.backends.flashinfer_cases import (
    BATCHES,
    CUDA,
    DEVICE,
    RECORDED,
    TOLERANCES,
    Live,
    batches,
)
from tests.oracle import Case, check, oracle_tree


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    fake.install(monkeypatch)


def test_recordings_in_turn_do_not_disturb_each_other():
    """R28: one backend, its float workspace shared, a wrapper and an int workspace each."""
    made: list[tuple[Live, list[Case]]] = []
    for options in (RECORDED["chain"], RECORDED["tree"], RECORDED["draft"]):
        first, *others = batches(options)
        backend = made[0][0].backend if made else None
        live = Live(first, options.get("mode") == "chain", backend)
        live.record()
        made.append((live, others))
    ints = {live.bound.wrapper._int_workspace_buffer.data_ptr() for live, _ in made}
    assert len(ints) == len(made)
    for turn in range(len(BATCHES)):
        for live, others in made:
            live.load(others[turn])
        for live, _ in reversed(made):
            live.replay()
        for live, _ in made:
            live.verdict()


def test_the_host_may_run_ahead_of_the_device():
    """A plan waits in pinned memory until the device has fetched it."""
    first, *others = batches(RECORDED["tree"])
    live = Live(first, causal=False)
    live.record()
    weight = torch.randn(4096, 4096, device=DEVICE) if CUDA else torch.ones(1, 1)
    found, lens = [], [case.args["seq_lens"].cpu() for case in others]
    for case, on_host in zip(others, lens, strict=True):
        for _ in range(20):
            weight = weight @ weight * 1e-3
        live.load(case)
        live.replay(on_host)
        found.append((live.case.out.clone(), live.case.lse.clone()))
    for case, (out, lse) in zip(others, found, strict=True):
        case.out, case.lse = out, lse
        check(case, oracle_tree(case), tolerances=TOLERANCES)
