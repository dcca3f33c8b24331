"""Prompts by chunks, against the recurrence in float64 and whole prompts against their pieces."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from specattn.kernels.gated_delta import convolve_pieces, pieces, read_pieces
from tests.implementations import IMPLEMENTATIONS, using
from tests.kernels.gated_delta.oracle import (
    DEVICE,
    GATES,
    NAN,
    Shape,
    apart,
    at,
    exact_mixed,
    exact_path,
    parts_for,
    tokens_of,
    unwritten,
    weights_for,
)
from tests.samples import half, on_cpu

by_each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
# what a GPU takes for models in bfloat16, beyond what its registers hold in float32, and for others
CHUNKS = (pytest.param(64, id="64 beyond registers"), 16)


def starts(lengths, first=0):
    ends = [first]
    for length in lengths:
        ends.append(ends[-1] + length)
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def chunks_of(tokens):
    return mock.patch.object(pieces, "chunk_tokens", return_value=tokens)


@on_cpu(half, "lengths", "gates", "chunk", "implementation")
@by_each
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("lengths", [(1,), (15, 16, 17), (130, 0, 3), (64, 64)])
def test_a_piece_is_the_recurrence(lengths, gates, chunk, implementation):
    shape, padding = Shape((1, 2)), 4
    tokens = tokens_of(shape, sum(lengths) + padding, gates)
    rows, ends = [4, 2, 1][: len(lengths)], starts(lengths)
    states = shape.new_states(6)
    unused = [row for row in range(6) if row not in rows]
    states[unused] = NAN
    before = states.clone()
    for one in vars(tokens).values():
        one[sum(lengths) :] = NAN
    with chunks_of(chunk), using(implementation):
        found = read_pieces(tokens, states, torch.tensor(rows, device=DEVICE), ends)
    assert not found[sum(lengths) :].any()
    assert torch.isnan(states[unused]).all()
    for which, row in enumerate(rows):
        own = slice(int(ends[which]), int(ends[which + 1]))
        if not lengths[which]:
            assert torch.equal(states[row], before[row])
            continue
        want, last = exact_path(at(tokens, own), before[row])
        assert apart(found[own], want) < 2e-5
        assert apart(states[row], last) < 2e-5


@by_each
@pytest.mark.parametrize("chunk", CHUNKS)
def test_keys_alike_with_beta_1(chunk, implementation):
    shape = Shape((1, 1), (32, 16))
    tokens, states = tokens_of(shape, 90, "one", alike=True), shape.new_states(2)
    want, last = exact_path(tokens, states[1])
    with chunks_of(chunk), using(implementation):
        found = read_pieces(tokens, states, torch.tensor([1], device=DEVICE), starts([90]))
    assert apart(found, want) < 2e-5
    assert apart(states[1], last) < 2e-5


@by_each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_dtypes(states, dtype, implementation):
    shape = Shape((2, 4), (16, 16), dtype=dtype, states=states)
    tokens, held = tokens_of(shape, 70), shape.new_states(2)
    want, last = exact_path(tokens, held[1])
    with using(implementation):
        found = read_pieces(tokens, held, torch.tensor([1], device=DEVICE), starts([70]))
    assert apart(found, want) < 3e-2
    assert apart(held[1], last) < (5e-5 if states == torch.float32 else 3e-2)


@by_each
def test_padding_pieces_leave_row_0(implementation):
    shape = Shape((1, 1), (16, 16))
    tokens, states = tokens_of(shape, 5), shape.new_states(3)
    before, rows = states.clone(), torch.tensor([2, 0, 0], device=DEVICE)
    parts, weights, windows = parts_for(shape, 5), weights_for(shape), shape.new_windows(3)
    windows_before = windows.clone()
    with using(implementation):
        read_pieces(tokens, states, rows, starts([3, 0, 0]))
        read_pieces(tokens, states, rows, starts([3, 2, 0]))
        convolve_pieces(parts, weights, windows, rows, starts([3, 2, 0]), out=unwritten(shape, 5))
    for now, then in ((states, before), (windows, windows_before)):
        assert torch.equal(now[:2], then[:2])
        assert not torch.equal(now[2], then[2])


@by_each
@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_convolution_carries_its_window(dtype, split, width, implementation):
    shape, lengths = Shape((1, 3), (16, 32), dtype=dtype, width=width), (1, 40, 0, 2)
    total, rows, ends = sum(lengths), [3, 1, 6, 2], starts(lengths)
    parts, weights = parts_for(shape, total + 3, split=split), weights_for(shape)
    for one in vars(parts).values():
        one[:, total:] = NAN
    windows, out = shape.new_windows(8), unwritten(shape, total + 3)
    unused = [0, 4, 5, 7]
    windows[unused] = NAN
    before = windows.clone()
    with using(implementation):
        convolve_pieces(parts, weights, windows, torch.tensor(rows, device=DEVICE), ends, out=out)
    assert all(torch.isnan(one[total:]).all() for one in vars(out).values())
    assert torch.isnan(windows[unused]).all()
    limit = 1e-5 if dtype == torch.float32 else 6e-3
    for which, row in enumerate(rows):
        if not lengths[which]:
            assert torch.equal(windows[row], before[row])
            continue
        own = slice(int(ends[which]), int(ends[which + 1]))
        mine = type(parts)(*(one[:, own] for one in vars(parts).values()))
        want, after = exact_mixed(shape, mine, weights, before[row])
        assert torch.equal(windows[row].double(), after)
        for name, one in vars(want).items():
            assert apart(getattr(out, name)[own], one) < limit, name


@by_each
def test_pieces_of_a_prompt_are_the_whole(implementation):
    shape, cuts = Shape((1, 2)), (5, 64, 1, 30)
    parts, weights, total = parts_for(shape, sum(cuts)), weights_for(shape), sum(cuts)
    rows, kept = torch.tensor([1], device=DEVICE), {}
    for name, lengths in (("whole", (total,)), ("pieces", cuts)):
        states, windows = shape.new_states(2), shape.new_windows(2)
        found, first = [], 0
        for length in lengths:
            own = type(parts)(*(one[:, first : first + length] for one in vars(parts).values()))
            out = unwritten(shape, length)
            with using(implementation):
                convolve_pieces(own, weights, windows, rows, starts([length]), out=out)
                found.append(read_pieces(out, states, rows, starts([length])))
            first += length
        kept[name] = torch.cat(found), states[1], windows[1]
    for found, want in zip(kept["pieces"], kept["whole"], strict=True):
        assert apart(found, want) < 1e-5


def test_mistakes_are_refused_by_name():
    shape = Shape((1, 1), (16, 16))
    tokens, states, rows = tokens_of(shape, 3), shape.new_states(2), torch.tensor([1]).to(DEVICE)
    with pytest.raises(ValueError, match=r"^qo_indptr must be \[2\] torch.int32"):
        read_pieces(tokens, states, rows, starts([1, 2]))
    with pytest.raises(ValueError, match=r"^states must be \[2, 1, 16, 16\]"):
        read_pieces(tokens, states[..., :8], rows, starts([3]))
    parts, weights, windows = parts_for(shape, 3), weights_for(shape), shape.new_windows(2)
    with pytest.raises(ValueError, match=r"^qkv must be \[1, 4, 48\]"):
        convolve_pieces(parts, weights, windows, rows, starts([3]), out=unwritten(shape, 4))
    with pytest.raises(ValueError, match=r"^windows must be \[2, 48, 3\] torch.float32"):
        convolve_pieces(parts, weights, windows.half(), rows, starts([3]), out=unwritten(shape, 3))
