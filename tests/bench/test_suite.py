"""The matrix, the trees, the batches and the command, without a GPU."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from bench.suite import cases, matrix, run, trees
from bench.suite.batch import Arena, Batch
from bench.suite.peers.base import ancestor_lists, branch_lists, full_mask
from specattn.cli.app import app

RUNNER = CliRunner()
ALL = [cell for part in matrix.parts().values() for cell in part.cells]


def fresh(case):
    arena = Arena(torch.device("cpu"), only_one=True)
    arena.reserve([case])
    return Batch(case, arena)


def test_the_matrix_is_what_was_asked_for():
    shapes = {(*case.heads, case.head_dim) for cell in ALL for case in cell.cases}
    assert {(32, 8, 128), (8, 1, 128), (16, 8, 128), (64, 8, 128), (32, 8, 64)} <= shapes
    assert {(16, 4, 256), (16, 1, 576), (128, 1, 576)} <= shapes
    assert {case.page_size for cell in ALL for case in cell.cases} == {1, 16, 64}
    found = {cell.case.shape for cell in ALL if cell.case.mode == "tree"}
    assert {(4, 3, 8), (4, 5, 16), (8, 3, 16), (8, 5, 32), (8, 7, 64), (8, 7, 128)} <= found
    assert {cell.case.batch for cell in ALL} >= {1, 8, 32, 64, 128, 256, 512}
    every = [case for cell in ALL for case in cell.cases]
    assert max(sum(case.lengths) for case in every) == 2**20
    assert {case.q_len for case in every if case.mode == "chain"} == {1, 4, 8}
    assert {case.dtype for case in every} == {"bfloat16", "float16"}
    assert {case.mode for case in every if case.stored} == {"tree", "chain", "draft", "prompt"}
    assert {case.mode for case in every if case.fixed} == {"tree", "chain", "draft", "extend"}
    assert {case.mode for case in every if case.sinks} == {"tree", "chain", "draft", "prompt"}


def test_drafts_take_every_step():
    """Of the widest trees of both branchings."""
    steps = {cell.case.shape for cell in ALL if cell.case.mode == "draft" and cell.peers}
    assert steps >= {(8, step) for step in range(7)} | {(4, step) for step in range(5)}


@pytest.mark.parametrize("page", [1, 64])
def test_prompts_follow_a_cached_prefix(page):
    found = {
        (cell.case.batch, cell.case.q_len)
        for cell in ALL
        if cell.case.mode == "prompt" and cell.case.page_size == page and min(cell.case.lengths)
    }
    assert found >= {(8, 512), (1, 8 * cases.K)}


@pytest.mark.parametrize("page", [16, 64])
def test_pages_are_beside_page_1(page):
    paged = [cell for cell in ALL if cell.case.page_size == page and not cell.case.stored]
    shapes = {cell.case.shape for cell in paged if "page 1" in dict(cell.variants)}
    assert shapes >= {(4, 3, 8), (4, 5, 16), (8, 7, 64)}


def test_names_tell_cells_apart():
    for part in matrix.parts().values():
        names = [cell.name for cell in part.cells]
        for cell in part.cells:
            assert len({label for label, _ in cell.variants}) == len(cell.variants)
        assert len(set(names)) == len(names)
    names = [cell.name for cell in matrix.quick().cells]
    assert len(set(names)) == len(names)


def test_a_name_says_size_and_shape():
    plain = [case for cell in ALL for case in cell.cases if not case.marks()]
    even = [case for case in plain if not case.name.startswith("ragged")]
    assert len(even) > 100
    for case in even:
        assert cases.make(case.name) == case
    assert cases.make("5 + 2 x 1k chain 4").lengths == (5, cases.K, cases.K)
    assert len(set(cases.make("ragged 32 x 800..8k decode").lengths)) > 30
    with pytest.raises(ValueError, match="a size and a mode, got '8 x 8k verify'"):
        cases.make("8 x 8k verify")


def test_the_quick_set_has_cells_of_every_part():
    names = {cell.name for cell in matrix.quick().cells}
    assert names == set(matrix.QUICK.split("; "))
    for part in matrix.parts().values():
        assert names & {cell.name for cell in part.cells}, part.name
    assert len(names) < 25


def test_every_case_is_compiled_once(monkeypatch):
    made, cells = [], matrix.quick().cells

    def batch(case, arena):
        made.append(case.name)
        raise ArithmeticError

    monkeypatch.setattr(run, "Arena", lambda *_, **__: SimpleNamespace(reserve=lambda _: None))
    monkeypatch.setattr(run, "Batch", batch)
    assert sum(run.compile_share(cells, at, 5) for at in range(5)) == len(made), (
        "failures are counted"
    )
    assert sorted(made) == sorted(case.name for cell in cells for case in cell.cases)


@pytest.mark.parametrize("shape", [(4, 3, 8), (4, 5, 16), (8, 3, 16), (8, 7, 64), (8, 7, 128)])
def test_trees_are_grown_by_steps(shape):
    topk, steps, nodes = shape
    parents = trees.grow(*shape, random.Random(0))
    bits, depths = trees.ancestry(parents)
    assert len(parents) == nodes
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert max(depths) <= steps
    assert parents.count(0) <= topk
    for node, parent in enumerate(parents):
        assert bits[node] >> node == 1
        assert bits[node].bit_count() == depths[node] + 1
        assert parent < 0 or bits[node] & bits[parent] == bits[parent]


def test_a_tree_of_more_nodes_than_candidates():
    with pytest.raises(ValueError, match="nodes must be at most 21"):
        trees.grow(4, 2, 22, random.Random(0))


def test_words_are_signed_halves_of_the_bits():
    assert trees.signed_words(1 << 63 | 1, 64) == [-(2**63) + 1]
    assert trees.signed_words(1 << 70 | 5, 72) == [5, 1 << 6]


@pytest.mark.parametrize("size", [1, 16, 64])
def test_slots_are_distinct_and_lie_in_their_pages(size):
    batch = fresh(cases.make("5 + 40 + 16 tree 4-3-8", page_size=size, heads=(2, 1), head_dim=8))
    used = []
    for b, length in enumerate(batch.case.lengths):
        slots = batch.table[b + 1, : length + 8].tolist()
        used += slots
        assert slots[length:] == batch.tails[b].tolist()
        for place, slot in enumerate(slots):
            page = int(batch.page_table[b, place // size])
            assert slot == page * size + place % size
    assert len(set(used)) == len(used)
    assert min(used) >= size
    assert max(used) < len(batch.k(0))


def test_lists_and_masks_say_what_the_bits_say():
    batch = fresh(cases.make("3 + 7 draft topk 4 step 2", heads=(2, 1), head_dim=8))
    offsets, slots = branch_lists(batch)
    own, counts = ancestor_lists(batch)
    mask, starts = full_mask(batch), (0, 4 * (batch.case.lengths[0] + 12))
    for row in range(8):
        b, i = divmod(row, 4)
        length = batch.case.lengths[b]
        seen = [j for j in range(12) if batch.bits[b][i] >> j & 1]
        tail = [int(batch.tails[b, j]) for j in seen]
        prefix = batch.table[b + 1, :length].tolist()
        assert slots[offsets[row] : offsets[row + 1]].tolist() == prefix + tail
        assert own[row, : counts[row]].tolist() == tail
        cells = mask[starts[b] + i * (length + 12) :][: length + 12].tolist()
        assert cells == [True] * length + [j in seen for j in range(12)]


def test_bytes_and_flops_by_hand():
    batch = fresh(cases.make("10 + 20 tree 4-3-8", heads=(4, 2), head_dim=16, dtype="float16"))
    assert batch.bytes == (30 + 16) * 2 * 2 * 16 * 2 + 16 * 4 * 32 * 2
    assert batch.flops == 4 * 4 * 16 * 8 * 30
    prompt = fresh(cases.make("10 prompt 4", heads=(4, 2), head_dim=16))
    assert prompt.flops == 4 * 4 * 16 * (4 * 10 + 10)
    latent = fresh(cases.mla(cases.make("100 decode"), 16))
    assert latent.bytes == 101 * 576 * 2 + 16 * (576 + 512) * 2


def test_float8_pools_are_half_as_large():
    case = cases.make("10 + 20 tree 4-3-8", heads=(4, 2), head_dim=16, dtype="float16")
    arena = Arena(torch.device("cpu"), only_one=True)
    arena.reserve([case, cases.float8(case)])
    batches = [Batch(one, arena) for one in (case, cases.float8(case))]
    assert [batch.pools[0].dtype for batch in batches] == [torch.float16, torch.float8_e4m3fn]
    rows = 16 * 4 * 32 * 2
    assert 2 * (batches[1].bytes - rows) == batches[0].bytes - rows
    for batch in batches:
        assert batch.pools[0].float().isfinite().all()
        assert 0.9 < batch.pools[0].float().std() < 1.1


def test_the_command_lists_what_it_would_run():
    out = RUNNER.invoke(app, ["bench", "--list", "--part", "latent", "--only", "mla128"])
    assert out.exit_code == 0, out.output
    assert "16 x 16k decode mla128 page 64" in out.output
    assert "mla16" not in out.output
    assert "FlashInfer mask" in out.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "bench: needs a CUDA device, and torch sees none here"),
        (
            ["--part", "tree"],
            "--part: must be one of trees, shapes, pages, chains, drafts, extends, "
            "options, latent, float8, fixed, sinks or quick, got 'tree'",
        ),
        (["--only", "zebra"], "--only: no cell's name contains 'zebra'"),
    ],
)
def test_a_mistake_is_one_line(args, line):
    out = RUNNER.invoke(app, ["bench", *args])
    assert out.exit_code == 2
    assert out.output == f"specattn: error: {line}\n"


def test_a_case_is_json():
    from bench.suite.run import describe

    found = json.loads(json.dumps(describe(ALL[0].case)))
    assert found["lengths"] == [1, 100]
    assert found["tail"] == 8
