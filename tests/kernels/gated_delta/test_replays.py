"""Steps in a CUDA graph, and rows at the far end of states of more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from specattn.cache.state_pool import StatePool
from specattn.config import StateConfig
from specattn.kernels.gated_delta import LayerParts, commit_nodes, read_pieces, verify_nodes
from tests.implementations import using
from tests.kernels.gated_delta.oracle import (
    DEVICE,
    NAN,
    Shape,
    apart,
    at,
    deepest,
    exact_path,
    exact_tree,
    nodes_of,
    parts_for,
    paths_of,
    tokens_of,
    tree,
    weights_for,
    words_of_trees,
)

CUDA = torch.cuda.is_available()


def test_rows_may_lie_far_apart():
    """The near end, where a wrapped offset would land, holds NaN."""
    shape, n = Shape((2, 4), (128, 128) if CUDA else (16, 16), states=torch.bfloat16), 5
    (_, heads), (k_dim, v_dim) = shape.heads, shape.dims
    count = 2**31 // (heads * k_dim * v_dim) + 8 if CUDA else 40
    states = torch.full((1, count, heads, v_dim, k_dim), NAN, dtype=torch.bfloat16, device=DEVICE)
    windows = torch.zeros(1, count, shape.channels, 3, device=DEVICE)
    rows = torch.tensor([count - 1, count - 3], device=DEVICE)
    states[0, rows] = shape.new_states(2)
    before, parents = states[0, rows].clone(), tree("any", n)
    tokens, path = tokens_of(shape, 2 * n), deepest(parents)
    inputs = torch.zeros(1, 2 * n, shape.channels, device=DEVICE)
    with using("triton"):
        found = verify_nodes(tokens, states[0], rows, words_of_trees([parents] * 2))
        nodes = nodes_of([tokens], inputs, n)
        commit_nodes(nodes, states, windows, rows, paths_of([path] * 2, n))
        after = states[0, rows].clone()
        states[0, rows] = before
        ends = torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE)
        read_pieces(tokens, states[0], rows, ends)
    for which in range(2):
        own = at(tokens, slice(which * n, which * n + n))
        assert (
            apart(found[which * n : which * n + n], exact_tree(own, before[which], parents)) < 2e-5
        )
        _, want = exact_path(at(own, path), before[which], rounded=torch.bfloat16)
        assert apart(after[which], want) < 5e-2
        _, want = exact_path(own, before[which])
        assert apart(states[0, rows[which]], want) < 3e-2


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_replay_is_a_fresh_run(dtype, n):
    """Trees, paths, rows and products change between replays; their addresses do not."""
    shape, layers, batch = Shape((2, 4), (64, 64), dtype=dtype), 2, 3
    config = StateConfig(2, 4, 64, 64, dtype=dtype)
    weights = weights_for(shape)
    held = [parts_for(shape, batch * n) for _ in range(layers)]
    words = words_of_trees([tree("any", n)] * batch)
    rows = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    index = paths_of([[0]] * batch, n)
    pools = [StatePool([config] * layers, 6, DEVICE) for _ in range(2)]
    nodes = [pool.nodes(batch, n) for pool in pools]

    def step(which):
        given = {"rows": rows, "words": words, "nodes": nodes[which]}
        found = [
            pools[which].verify(layer, parts, weights, **given) for layer, parts in enumerate(held)
        ]
        pools[which].commit(nodes[which], index, rows)
        return torch.stack(found)

    step(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(0)
    for tensor in (*pools[0].tensors().values(), *pools[1].tensors().values()):
        tensor.zero_()
    for seed in range(20):
        for layer, parts in enumerate(held):
            fresh = parts_for(shape, batch * n, seed=seed * layers + layer)
            for one, new in zip(vars(parts).values(), vars(fresh).values(), strict=True):
                one.copy_(new)
        trees = [tree("any", n, seed + one) for one in range(batch)]
        words.copy_(words_of_trees(trees))
        index.copy_(paths_of([deepest(one) for one in trees], n))
        rows.copy_(torch.randperm(6, device=DEVICE)[:batch])
        graph.replay()
        fresh_run = step(1)
        taken = (rows > 0).repeat_interleave(n)
        assert torch.equal(recorded[:, taken], fresh_run[:, taken])
        for name, tensor in pools[0].tensors().items():
            assert torch.equal(tensor, pools[1].tensors()[name]), name


def test_views_of_one_product_need_no_copy():
    """A batch within a larger one's buffers, over columns of a wider product."""
    shape, n = Shape(), 4
    pool = StatePool([StateConfig(2, 6, 16, 32)] * 2, 4, DEVICE)
    whole = parts_for(shape, 3 * n)
    parts = LayerParts(*(one[:, : 2 * n] for one in vars(whole).values()))
    rows, words = torch.tensor([1, 2], device=DEVICE), words_of_trees([tree("any", n)] * 2)
    nodes = pool.nodes(5, n)
    written = [one for one in vars(nodes).values() if one is not None]
    for one in written:
        one.fill_(NAN)
    found = {}
    for name in ("naive", "triton"):
        with using(name):
            given = {"rows": rows, "words": words, "nodes": nodes.bind(2)}
            found[name] = pool.verify(1, parts, weights_for(shape), **given)
    assert apart(found["triton"], found["naive"]) < 2e-5
    for one in written:
        assert torch.isnan(one[0]).all()
        assert torch.isnan(one[1, 2:]).all()
        assert not torch.isnan(one[1, :2]).any()
