"""Accepted paths folded into states and windows, against the recurrence and against themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.kernels.gated_delta import Nodes, commit_nodes
from tests.implementations import IMPLEMENTATIONS, using
from tests.kernels.gated_delta.oracle import (
    DEVICE,
    GATES,
    KINDS,
    NAN,
    Shape,
    apart,
    at,
    deepest,
    exact_path,
    generator,
    nodes_of,
    paths_of,
    tokens_of,
    tree,
)
from tests.samples import half, on_cpu

by_each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def step_of(shape, layers, batch, n, gates="model", *, alike=False, seed=0):
    """Return the nodes of a step, its layers' tokens, and what the convolution read."""
    tokens = [
        tokens_of(shape, batch * n, gates, alike=alike, seed=seed + 31 * layer)
        for layer in range(layers)
    ]
    drawn = torch.randn(layers, batch * n, shape.channels, generator=generator(seed))
    inputs = drawn.to(DEVICE, shape.dtype)
    return nodes_of(tokens, inputs, n), tokens, inputs


def memory(shape, layers, rows, used):
    """Return states and windows, NaN where no request is."""
    states, windows = shape.new_states(layers, rows), shape.new_windows(layers, rows)
    unused = [row for row in range(rows) if row not in used]
    states[:, unused], windows[:, unused] = NAN, NAN
    return states, windows


def poison_rejected(nodes: Nodes, paths) -> Nodes:
    """Return nodes of which only accepted ones hold numbers."""
    found = [one.clone() for one in vars(nodes).values() if one is not None]
    for which, path in enumerate(paths):
        rest = [node for node in range(nodes.k.shape[2]) if node not in path]
        for tensor in found:
            tensor[:, which, rest] = NAN
    return Nodes(*found)


@on_cpu(half, "states", "kind", "gates", "implementation")
@by_each
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_a_state_goes_on_by_the_accepted_nodes(states, kind, gates, implementation):
    shape, layers, n = Shape((2, 6), (16, 32), states=states), 2, 9
    trees = [tree(kind, n, seed) for seed in range(4)]
    nodes, tokens, inputs = step_of(shape, layers, len(trees), n, gates)
    # permuted rows; of the third request, which is padding, and of the last, which keeps one node
    rows, paths = [5, 2, 0, 4], [deepest(trees[0]), deepest(trees[1]), deepest(trees[2]), [0]]
    held, windows = memory(shape, layers, 7, {0, 5, 2, 4})
    before, windows_before = held.clone(), windows.clone()
    where, index = torch.tensor(rows, device=DEVICE), paths_of(paths, n)
    with using(implementation):
        commit_nodes(poison_rejected(nodes, paths), held, windows, where, index)
    for now, then in ((held, before), (windows, windows_before)):
        assert torch.isnan(now[:, [1, 3, 6]]).all()
        assert torch.equal(now[:, 0], then[:, 0])
    for which in (0, 1, 3):
        for layer in range(layers):
            path = [which * n + node for node in paths[which]]
            start = before[layer, rows[which]]
            _, want = exact_path(at(tokens[layer], path), start, rounded=states)
            # two that are rounded may lie on both sides of a middle
            limit = 1e-5 if states == torch.float32 else 5e-2
            assert apart(held[layer, rows[which]], want) < limit
            text = torch.cat([windows_before[layer, rows[which]], inputs[layer, path].T], 1)
            assert torch.equal(windows[layer, rows[which]], text[:, -(shape.width - 1) :])


@on_cpu(half, "dtype", "states", "gates", "implementation")
@by_each
@pytest.mark.parametrize("gates", ["one", "mixed"])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_commit_of_m_nodes_is_m_commits_of_one(dtype, states, gates, implementation):
    """To the bit, and whatever was drafted beside the path: plain decoding leaves the same."""
    shape, layers, n = Shape((1, 3), (16, 32), dtype, states), 2, 12
    parents = tree("deep", n, 4)
    path = deepest(parents)
    nodes, tokens, inputs = step_of(shape, layers, 2, n, gates)
    rows = torch.tensor([3, 1], device=DEVICE)
    whole, single = (memory(shape, layers, 4, {1, 3}) for _ in range(2))
    with using(implementation):
        commit_nodes(nodes, *whole, rows, paths_of([path, path[:2]], len(path) + 3))
        for node in path:
            # as plain decoding: a step of one node, whose request is the only one
            one = [at(layer, [node]) for layer in tokens]
            commit_nodes(nodes_of(one, inputs[:, [node]], 1), *single, rows[:1], paths_of([[0]], 1))
        for node in path[:2]:
            one = [at(layer, [n + node]) for layer in tokens]
            commit_nodes(
                nodes_of(one, inputs[:, [n + node]], 1), *single, rows[1:], paths_of([[0]], 1)
            )
    for found, want in zip(whole, single, strict=True):
        assert torch.equal(found[:, [1, 3]], want[:, [1, 3]])


@by_each
@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_windows_of_any_width_and_paths_of_any_length(length, width, implementation):
    shape, n = Shape((1, 1), (16, 16), torch.float16, width=width), 7
    nodes, _, inputs = step_of(shape, 3, 1, n)
    held, windows = memory(shape, 3, 3, {2})
    before, path = windows.clone(), [*range(n)][:length]
    with using(implementation):
        commit_nodes(nodes, held, windows, torch.tensor([2], device=DEVICE), paths_of([path], n))
    text = torch.cat([before[:, 2], inputs[:, path].mT], 2)
    assert torch.equal(windows[:, 2], text[..., -(width - 1) :])


@by_each
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_what_comes_of_a_path_may_go_elsewhere(states, implementation):
    """To the bit what a commit in place would leave; where it began stays as it is."""
    shape, layers, n = Shape((2, 4), (16, 32), states=states), 2, 9
    path = deepest(tree("deep", n, 4))
    nodes, _, _ = step_of(shape, layers, 4, n)
    rows, into = (torch.tensor(one, device=DEVICE) for one in ([5, 2, 4, 3], [6, 0, 1, 7]))
    held, windows = memory(shape, layers, 8, {0, 2, 3, 4, 5})
    here, window = held.clone(), windows.clone()
    # one goes nowhere, one is longer than a window, one is short, and one has no node
    index = paths_of([path, path, path[:2], []], n)
    with using(implementation):
        commit_nodes(nodes, held, windows, rows, index, into=into)
        for now, then in ((held, here), (windows, window)):
            assert torch.equal(now[:, [0, 2, 3, 4, 5]], then[:, [0, 2, 3, 4, 5]])
            assert torch.isnan(now[:, 7]).all()
        commit_nodes(nodes, here, window, rows, index)
    for now, then in ((held, here), (windows, window)):
        assert torch.equal(now[:, [6, 1]], then[:, [5, 4]])


@by_each
def test_a_path_of_no_node_changes_nothing(implementation):
    shape = Shape((1, 2), (16, 16))
    nodes, _, _ = step_of(shape, 2, 2, 3)
    held, windows = memory(shape, 2, 3, {1, 2})
    before = held.clone(), windows.clone()
    index = torch.tensor([[-1, -1], [3, 0]], dtype=torch.int32, device=DEVICE)
    with using(implementation):
        commit_nodes(nodes, held, windows, torch.tensor([1, 2], device=DEVICE), index)
    for now, then in zip((held, windows), before, strict=True):
        assert torch.equal(now[:, 1:], then[:, 1:])


@on_cpu(half, "gates", "alike", "implementation")
@by_each
@pytest.mark.parametrize(("gates", "alike"), [("one", False), ("model", False), ("one", True)])
def test_ten_thousand_tokens_do_not_drift(gates, alike, implementation):
    """Errors of a state are forgotten, or overwritten, as fast as they are made."""
    shape, n, steps = Shape((1, 1), (16, 16)), 64, 16 if implementation == "triton" else 160
    held, windows = memory(shape, 1, 2, {1})
    exact, rows = held[0, 1].double(), torch.tensor([1], device=DEVICE)
    index = paths_of([[*range(n)]], n)
    for step in range(steps):
        nodes, tokens, _ = step_of(shape, 1, 1, n, gates, alike=alike, seed=step)
        with using(implementation):
            commit_nodes(nodes, held, windows, rows, index)
        _, exact = exact_path(tokens[0], exact)
    # nothing overwrites what the rounding of one and the same key leaves beside it
    assert apart(held[0, 1], exact) < (1e-4 if alike else 2e-5)


def test_mistakes_are_refused_by_name():
    shape, n = Shape((1, 2), (16, 16)), 3
    nodes, _, _ = step_of(shape, 2, 1, n)
    held, windows = memory(shape, 2, 3, {1})
    rows, index = torch.tensor([1], device=DEVICE), paths_of([[0, 1]], n)
    before = held.clone(), windows.clone()
    for message, given in (
        (r"^states must be \[2, 3, 2, 16, 16\]", (nodes, held[:1], windows, rows, index)),
        (r"^windows must be \[2, 3, 64, 64\]", (nodes, held, windows.mT, rows, index)),
        (r"^rows must be \[1\] torch.int64", (nodes, held, windows, rows.int(), index)),
        (r"^accept_index must be \[1, 3\] torch.int32", (nodes, held, windows, rows, index.long())),
        (r"^states must be contiguous", (nodes, held.mT, windows, rows, index)),
        (
            r"^inputs must be \[2, 1, 3, 64\]",
            (replace(nodes, inputs=nodes.v), *before, rows, index),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            commit_nodes(*given)
    assert torch.equal(held[:, 1], before[0][:, 1])
    assert torch.equal(windows[:, 1], before[1][:, 1])
