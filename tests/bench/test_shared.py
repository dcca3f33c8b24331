"""The batches of shared prefixes, and everybody who is timed over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.suite import cases, oracle
from bench.suite.batch import Arena
from bench.suite.peers.flashinfer import Workspace
from bench.tools.shared import Cascade, SharedBatch, Sharing, Work, contestants
from tests.bench import fakes


@pytest.mark.parametrize("name", ["4 x 270 decode", "4 x 270 tree 4-3-8"])
def test_everybody_computes_the_same(name, monkeypatch):
    fakes.install(monkeypatch)
    monkeypatch.setattr(Workspace, "_held", {torch.device("cpu"): torch.zeros(1)})
    case = replace(cases.make(name, heads=(4, 2), head_dim=16), dtype="float16")
    arena = Arena(torch.device("cpu"), only_one=True)
    arena.reserve([case])
    batch = SharedBatch(Work(case, group=2, common=260), arena)
    expected = oracle.answers(batch)
    kinds = list(contestants(batch.work))
    assert (Cascade in kinds) == (case.q_len == 1)
    for kind in kinds:
        contestant = kind(batch)
        contestant.plan()
        contestant.out.fill_(torch.nan)
        contestant.run(0)
        assert oracle.error(batch, expected, *contestant.result()) < 1e-3, kind.name
        if kind is Sharing:
            shared = contestant.kernel.tables.requests[:4, 2] * contestant.kernel.tile.block_n
            assert shared.tolist() == [256] * 4
