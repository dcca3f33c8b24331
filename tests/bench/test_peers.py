"""Every contestant's metadata, with the libraries' entry points in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.suite import cases, oracle
from bench.suite.batch import Arena, Batch
from bench.suite.peers import PEERS, own
from bench.suite.peers.fa3 import BUILT
from bench.suite.peers.flashinfer import Workspace
from bench.suite.peers.xqa import halves
from tests.bench import fakes

SHAPE = {"heads": (4, 2), "head_dim": 16}
CASES = [
    cases.make("5 + 70 + 33 tree 4-3-8", **SHAPE),
    cases.make("5 + 40 tree 4-3-8", page_size=16, **SHAPE),
    cases.make("30 tree 8-7-70", page_size=64, **SHAPE),
    cases.make("20 + 41 draft topk 4 step 2", **SHAPE),
    cases.make("9 draft topk 3 step 0", **SHAPE),
    cases.make("30 + 47 decode", **SHAPE),
    cases.make("30 + 47 chain 4", page_size=16, **SHAPE),
    cases.make("30 + 47 + 12 extend 1..5", **SHAPE),
    cases.make("30 + 47 + 12 extend 1..5", page_size=64, **SHAPE),
    cases.make("30 + 9 prompt 17", **SHAPE),
    cases.make("0 prompt 20", page_size=16, **SHAPE),
    cases.mla(cases.make("20 + 40 chain 2"), 4),
    cases.mla(cases.make("20 + 40 decode"), 4, 1),
    cases.float8(cases.make("5 + 40 tree 4-3-8", page_size=16, **SHAPE)),
    cases.float8(cases.make("30 + 47 decode", **SHAPE)),
    cases.float8(cases.make("30 + 9 prompt 17", **SHAPE)),
    cases.fixed(cases.make("5 + 70 + 33 tree 4-3-8", **SHAPE)),
    cases.fixed(cases.make("20 + 41 draft topk 4 step 2", **SHAPE)),
    replace(cases.make("30 + 9 prompt 17", page_size=16, **SHAPE), auto=True),
    replace(cases.mla(cases.make("20 + 40 chain 2"), 4), auto=True),
    replace(cases.mla(cases.make("20 + 40 decode"), 4), auto=True),
]


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    fakes.install(monkeypatch)
    cpu = torch.device("cpu")
    monkeypatch.setattr(Workspace, "_held", {cpu: torch.zeros(1)})
    monkeypatch.setattr("bench.suite.peers.fa3.BUILT", BUILT | {(16, "float16")})
    monkeypatch.setattr("bench.suite.peers.xqa.SEMAPHORES", 16)


def fresh(case):
    arena = Arena(torch.device("cpu"), only_one=True)
    arena.reserve([case])
    return Batch(case, arena)


def served(case):
    return [kind for kind in PEERS if not kind.absent() and kind.refuses(case) is None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_everybody_computes_the_same(case):
    case = replace(case, dtype="float16")
    batch = fresh(case)
    expected = oracle.answers(batch)
    kinds = [own(case), *served(case)]
    assert len(kinds) >= (1 if case.fixed else 2 if case.stored else 3)
    for kind in kinds:
        contestant = kind(batch)
        contestant.plan()
        contestant.out.fill_(torch.nan)
        contestant.run(0)
        assert oracle.error(batch, expected, *contestant.result()) < 1e-3, kind.name


@pytest.mark.parametrize(
    "case",
    [
        cases.make("5 + 70 + 33 tree 4-3-8", window_left=20, **SHAPE),
        cases.make("20 + 41 draft topk 4 step 2", lse=True, **SHAPE),
        cases.make("30 + 9 prompt 17", lse=True, **SHAPE),
        cases.fixed(cases.make("5 + 70 + 33 tree 4-3-8", **SHAPE)),
        cases.float8(cases.make("30 + 47 decode", **SHAPE)),
    ],
    ids=lambda case: case.name,
)
def test_our_kernels_with_sinks(case):
    case = replace(case, dtype="float16", sinks=True)
    batch = fresh(case)
    contestant = own(case)(batch)
    contestant.plan()
    contestant.out.fill_(torch.nan)
    contestant.run(0)
    assert oracle.error(batch, oracle.answers(batch), *contestant.result()) < 1e-3
    batch.sinks = None
    assert oracle.error(batch, oracle.answers(batch), *contestant.result()) > 1e-2


def test_every_peer_is_tried():
    names = {kind.name for case in CASES for kind in served(replace(case, dtype="float16"))}
    assert names == {kind.name for kind in PEERS}


@pytest.mark.parametrize("kind", PEERS, ids=lambda kind: kind.name)
def test_a_missing_library_is_a_reason(kind, monkeypatch):
    for name in kind.needs:
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert "ModuleNotFoundError" in kind.absent()


def test_the_oracle_sees_what_is_wrong():
    case = cases.make("20 + 30 chain 3", dtype="float16", **SHAPE)
    batch = fresh(case)
    expected = oracle.answers(batch)
    right = torch.cat([found.out for found in expected]).half()
    assert oracle.error(batch, expected, right, None) < oracle.LIMIT
    assert oracle.error(batch, expected, right.flip(0), None) > oracle.LIMIT
    right[4, 0, 0] = torch.nan
    assert oracle.error(batch, expected, right, None) == torch.inf


def test_an_extend_is_held_to_its_accepted_rows():
    case = cases.make("20 + 30 + 11 extend 1..6", dtype="float16", **SHAPE)
    batch = fresh(case)
    assert any(n < 6 for n in batch.accepted)
    out = torch.full_like(batch.out, torch.nan)
    for found in (expected := oracle.answers(batch)):
        out[found.request * 6 : found.request * 6 + len(found.out)] = found.out.half()
    assert oracle.error(batch, expected, out, None) < oracle.LIMIT


def test_mask_words_are_16_bit_halves():
    assert halves(0x1_8001, 17) == [0x8001, 1]
    assert halves(1 << 40 | 5, 41) == [5, 0, 1 << 8, 0]
