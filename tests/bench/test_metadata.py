"""The two sides of bench/metadata.py fill what they should, and the checks would notice."""

from __future__ import annotations

import json
import re

import pytest
import torch

from bench import metadata_sglang
from bench.metadata_sglang import EAGER, GRAPH, OPERATIONS, PHASES, RUNS
from bench.metadata_sides import OneGraph, Requests, check_plan, check_sglang
from bench.suite import metadata as report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = [(2, 3, 5), (1, 3, 4)]


class Launch:
    """A kernel that is a function of all programs, for `kernel[grid](...)`."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return lambda *given, **named: self.run(grid, *given, **named)


def slots(table, rows, begin, count):
    return torch.cat(
        [
            table[r, b : b + c]
            for r, b, c in zip(rows.tolist(), begin.tolist(), count.tolist(), strict=True)
        ]
    )


def draft_slots(grid, rows, table, lens, out, width, topk, steps):
    out.copy_(slots(table, rows, lens, torch.full_like(lens, topk * steps)))


def extend_slots(grid, rows, table, begin, end, out, width, upper):
    out.copy_(slots(table, rows, begin, end - begin))


def draft_lists(grid, rows, table, lens, indices, indptr, positions, width, stride, *uppers):
    steps, batch, topk = grid
    for step in range(steps):
        at = 0
        for b in range(batch):
            for branch in range(topk):
                row, length = table[rows[b]], int(lens[b])
                first = length + branch * steps
                keys = torch.cat([row[:length], row[first : first + step + 1]])
                indices[step, at : at + len(keys)] = keys
                at += len(keys)
                indptr[step, b * topk + branch + 1] = at


def lists(grid, table, rows, lens, indptr, starts, indices, stride):
    keys = slots(table, rows, torch.zeros_like(lens), lens)
    assert indptr[-1] == len(keys)
    indices[: len(keys)] = keys


def splits(grid, out, *others, **named):
    out.fill_(1)


def positions(grid, out, starts, prefix, extend, has_prefix):
    out.copy_(
        torch.cat(
            [torch.arange(p, p + e) for p, e in zip(prefix.tolist(), extend.tolist(), strict=True)]
        )
    )


#: What SGLang's kernels leave, said again.
TWINS = {
    "assign_draft_cache_locs_contiguous": draft_slots,
    "assign_extend_cache_locs": extend_slots,
    "generate_draft_decode_kv_indices": draft_lists,
    "get_num_kv_splits_triton": splits,
    "create_flashinfer_kv_indices_triton": lists,
    "compute_position_kernel": positions,
}


def requests(setting, batch=3):
    return Requests(batch, setting, 90, DEVICE, heads=(4, 2))


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_graph_begins_with_the_same(setting):
    for hidden in (8, 0):
        OneGraph(requests(setting), hidden, 16).check()


@pytest.mark.parametrize("setting", SETTINGS)
def test_sglangs_sequence_lists_the_same_keys(setting):
    assert set(TWINS) == set(metadata_sglang.KERNELS)
    batch = requests(setting)
    s = batch.sglang({name: Launch(run) for name, run in TWINS.items()})
    check_sglang(s, batch)
    # and again, as every step does
    check_sglang(s, batch)
    s.extend["positions"][1] += 1
    s.verify["positions"][0] += 1
    s.lists["verify"][2].zero_()
    check_sglang(s, batch)


@pytest.mark.parametrize(
    "broken",
    [
        "assign_extend_cache_locs",
        "generate_draft_decode_kv_indices",
        "create_flashinfer_kv_indices_triton",
        "compute_position_kernel",
    ],
)
def test_a_kernel_that_does_nothing_is_noticed(broken, monkeypatch):
    # memory that is given again may hold what another test's kernel wrote there
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(-1))
    twins = {name: Launch(run) for name, run in TWINS.items()}
    batch = requests(SETTINGS[0])
    kernels = twins | {broken: Launch(lambda *given, **named: None)}
    with pytest.raises(ArithmeticError):
        check_sglang(batch.sglang(kernels), batch)


def test_a_lost_tile_is_noticed():
    whole = OneGraph(requests(SETTINGS[0]), 8, 16)
    whole.check()
    (bound,) = whole.layers[-1].bounds
    bound.kernel.tables.splits[0, 0] += 1
    with pytest.raises(ArithmeticError, match="are in splits"):
        check_plan(whole.layers[-1], whole.requests)


def test_the_list_says_where_everything_stands():
    for entry in OPERATIONS:
        assert entry.phase in PHASES
        assert entry.runs in (EAGER, GRAPH)
        assert re.fullmatch(r"[\w/]+\.py:[\d, -]+", entry.place), entry.place
    assert [entry.run for entry in OPERATIONS] == [
        run for phase in PHASES for run in RUNS[phase, None]
    ]
    for phase in PHASES:
        assert RUNS[phase, None] == RUNS[phase, EAGER] + RUNS[phase, GRAPH]


def test_the_record_has_ratios(tmp_path):
    assert not any(ratio.points for ratio in report.ratios(tmp_path))
    lines = [(report.PEER, phase, 10.0, 200.0) for phase in report.PHASES]
    lines += [(report.PEER, "step", 30.0, 600.0), (report.WHOLE, "step", 6.0, 12.0)]
    cell = {
        "name": "batch 1",
        "contestants": [
            {"name": name, "phase": phase, "us": us, "host_us": host}
            for name, phase, us, host in lines
        ],
    }
    (tmp_path / report.RECORD).write_text(json.dumps({"cells": [cell]}))
    assert [ratio.geomean for ratio in report.ratios(tmp_path)] == pytest.approx([5, 50])
    disturbed = {"name": report.PEER, "phase": "step", "us": 30.0, "host_us": 1300.0}
    whole = [line for line in cell["contestants"] if line["phase"] == "step"]
    slow = cell | {"contestants": [*cell["contestants"][:3], disturbed, whole[1]]}
    (tmp_path / report.RECORD).write_text(json.dumps({"cells": [slow]}))
    assert [ratio.geomean for ratio in report.ratios(tmp_path)] == pytest.approx([5, 50])
