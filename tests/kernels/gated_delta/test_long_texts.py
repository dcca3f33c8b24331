"""Texts of thousands of steps: trees leave what decoding token by token leaves, and stay exact."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.cache.state_pool import StatePool
from specattn.config import StateConfig
from specattn.kernels.gated_delta import LayerParts
from tests.implementations import IMPLEMENTATIONS, using
from tests.kernels.gated_delta.oracle import (
    DEVICE,
    NAN,
    Shape,
    generator,
    parts_for,
    path_to,
    paths_of,
    tree,
    weights_for,
    words_of_trees,
)
from tests.samples import half, on_cpu

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.kernels.gated_delta import Nodes

CUDA = torch.cuda.is_available()
LAYERS, NODES = 2, 8
# most nodes of a path
MOST = 4
# steps of different inputs, and of different trees: all pairs of them come on a GPU
INPUTS, TREES = 31, 17
# by implementation: all trees in torch, in the interpreter a tree of each kind
STEPS = {"naive": 100 if CUDA else 2 * TREES, "triton": 10_000 if CUDA else 4}
# what trees, tokens one by one, and padding write
TREE_ROWS, SINGLE_ROWS, ROWS = [3, 1, 0], [2, 5, 0], 6
BATCH = len(TREE_ROWS)
NAMES = ("inputs", "k", "v", "g", "beta")
# gates, dtypes of layers and of states, and the limit of errors
CASES = {
    "float32": ("model", torch.float32, torch.float32, 2e-5),
    # nothing is forgotten but what is overwritten: roundings add up as a random walk does
    "lasting": ("one", torch.float32, torch.float32, 1e-4),
    "16 bits": ("model", torch.bfloat16 if CUDA else torch.float16, torch.float32, 2e-5),
    # an exact one is rounded, too: two may lie on both sides of a middle
    "rounded states": ("model", torch.float32, torch.bfloat16, 5e-2),
}


def inputs_of(shape: Shape, seed: int) -> LayerParts:
    """Return a layer's products for the steps' nodes, ``[INPUTS, 1, BATCH NODES, ...]``."""
    made = [parts_for(shape, BATCH * NODES, seed=LAYERS * at + seed) for at in range(INPUTS)]
    return LayerParts(
        *(torch.stack([getattr(one, name) for one in made]) for name in vars(made[0]))
    )


def trees_and_paths() -> tuple[Tensor, Tensor]:
    """Return ancestor words ``[TREES, BATCH, NODES, 1]``, and paths ``[TREES, BATCH, NODES]``."""
    kinds, words, paths = ("any", "deep", "chain", "shallow"), [], []
    ends = torch.randint(NODES, (TREES, BATCH), generator=generator(0)).tolist()
    for at, end in enumerate(ends):
        trees = [tree(kinds[at % len(kinds)], NODES, at + one) for one in range(BATCH)]
        words.append(words_of_trees(trees))
        kept = [path_to(*pair)[:MOST] for pair in zip(trees, end, strict=True)]
        paths.append(paths_of(kept, NODES))
    return torch.stack(words), torch.stack(paths)


class Texts:
    """Three requests, of which one is padding, in one pool: by trees, and token by token.

    All of a step runs on the device, from what it counts there, so that one graph is every step.
    """

    def __init__(self, shape: Shape, gates: str, *, same_nodes: bool) -> None:
        # whether what a token brings is copied from its tree, or computed again
        self.shape, self.same_nodes = shape, same_nodes
        (hk, hv), dims = shape.heads, shape.dims
        config = StateConfig(hk, hv, *dims, dtype=shape.dtype, state_dtype=shape.states)
        self.pool = StatePool([config] * LAYERS, ROWS, DEVICE)
        self.nodes, self.single = (self.pool.nodes(BATCH, count) for count in (NODES, 1))
        self.rows, self.single_rows = (
            torch.tensor(rows, device=DEVICE) for rows in (TREE_ROWS, SINGLE_ROWS)
        )
        self.weights = [weights_for(shape, seed) for seed in range(LAYERS)]
        if gates == "one":
            self.weights = [replace(one, a_log=one.a_log - 12) for one in self.weights]
        self.parts = [inputs_of(shape, seed) for seed in range(LAYERS)]
        self.words, self.paths = trees_and_paths()
        self.one = torch.ones(BATCH, 1, 1, dtype=torch.int64, device=DEVICE)
        self.at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.differ, self.unlike = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        self.errors, self.sizes = torch.zeros(2, max(STEPS.values()), device=DEVICE)
        self.exact = self.pool.states[:, self.rows].double()
        self.inputs = self.pool.windows[:, self.rows]
        self.begin()

    def begin(self) -> None:
        """Let all texts begin anew, in the same states."""
        for one in (self.at, self.differ, self.unlike):
            one.zero_()
        for tensor, new in (
            (self.pool.states, self.shape.new_states(LAYERS, BATCH)),
            (self.pool.windows, self.shape.new_windows(LAYERS, BATCH)),
        ):
            tensor.fill_(NAN)
            tensor[:, self.rows] = new
            tensor[:, self.single_rows[:-1]] = new[:, :-1]
        self.before = self.pool.states[:, 0].clone(), self.pool.windows[:, 0].clone()
        self.exact.copy_(self.pool.states[:, self.rows])
        self.inputs.copy_(self.pool.windows[:, self.rows])

    def step(self) -> None:
        """Verify trees and keep their paths; then decode these, and go on in float64."""
        parts = [
            LayerParts(*(one[self.at % INPUTS][0] for one in vars(layer).values()))
            for layer in self.parts
        ]
        index = self.paths[self.at % TREES][0]
        self._verify(parts, self.rows, self.words[self.at % TREES][0], self.nodes)
        self.pool.commit(self.nodes, index, self.rows)
        for rank in range(MOST):
            node = index[:, rank]
            which = torch.arange(BATCH, device=DEVICE), node.clamp(min=0).long()
            # what the tree's nodes hold of these tokens, [LAYERS, BATCH, ...]
            held = [getattr(self.nodes, name)[:, *which] for name in NAMES]
            self._decode(parts, node, held)
            self._go_on(node >= 0, *held)
        for tensor in (self.pool.states, self.pool.windows):
            found, want = tensor[:, self.rows[:-1]], tensor[:, self.single_rows[:-1]]
            self.differ += (found != want).sum()
        found, want = self.pool.states[:, self.rows].double()[:, :-1], self.exact[:, :-1]
        size = want.square().mean((2, 3, 4), keepdim=True).sqrt()
        self.errors[self.at] = ((found - want) / size).abs().max().float()
        self.sizes[self.at] = size.max().float()
        self.differ += (self.pool.windows[:, self.rows] != self.inputs)[:, :-1].sum()
        self.at += 1

    def _verify(self, parts: list[LayerParts], rows: Tensor, words: Tensor, nodes: Nodes) -> None:
        given = {"rows": rows, "words": words, "nodes": nodes}
        for layer, (one, weights) in enumerate(zip(parts, self.weights, strict=True)):
            self.pool.verify(layer, one, weights, **given)

    def _decode(self, parts: list[LayerParts], node: Tensor, held: list[Tensor]) -> None:
        """Decode the same token in other rows, of requests whose path is so long."""
        which = torch.arange(BATCH, device=DEVICE) * NODES + node.clamp(min=0)
        single = [LayerParts(*(one[:, which] for one in vars(layer).values())) for layer in parts]
        self._verify(single, self.single_rows, self.one, self.single)
        taken = (node >= 0) & (self.single_rows > 0)
        for name, want in zip(NAMES, held, strict=True):
            found = getattr(self.single, name)[:, :, 0]
            unlike = (found != want).flatten(2).any(-1).any(0)
            self.unlike += (unlike & taken).sum()
            if self.same_nodes:
                found.copy_(want)
        # node 0, or -1 where the path has ended
        index = (node >= 0).int()[:, None] - 1
        self.pool.commit(self.single, index, self.single_rows)

    def _go_on(
        self, kept: Tensor, inputs: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> None:
        """Go on by the recurrence in float64, and remember what the convolution read."""
        k, v, g, beta = (one.double() for one in (k, v, g, beta))
        group = self.shape.heads[1] // self.shape.heads[0]
        k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 2)
        state = self.exact * g.exp()[..., None, None]
        missing = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
        state = (state + missing[..., None] * k[..., None, :]).to(self.shape.states)
        self.exact.copy_(torch.where(kept[:, None, None, None], state.double(), self.exact))
        window = torch.cat([self.inputs[..., 1:], inputs[..., None]], -1)
        self.inputs.copy_(torch.where(kept[:, None, None], window, self.inputs))


@on_cpu(half, "case", "implementation")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_the_state_after_any_commit_is_that_of_decoding(case, implementation):
    """To the bit, after each of so many steps; and it neither drifts nor grows.

    In torch, what a token brings has other roundings among others, so that is taken from its tree.
    """
    gates, dtype, states, limit = CASES[case]
    shape, steps = Shape((1, 2), (16, 32), dtype, states), STEPS[implementation]
    texts = Texts(shape, gates, same_nodes=implementation == "naive")
    with using(implementation):
        run = texts.step
        if CUDA and implementation == "triton":
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                texts.step()
            texts.begin()
            run = graph.replay
        for _ in range(steps):
            run()
    assert int(texts.at) == steps
    if implementation == "triton":
        assert int(texts.unlike) == 0, "a token brings other things in a tree"
    assert int(texts.differ) == 0
    errors, sizes = texts.errors[:steps], texts.sizes[:steps]
    assert float(errors.max()) < limit, "drift"
    half = steps // 2
    assert float(sizes[half:].max()) < 2 * float(sizes[:half].max()), "growth"
    for now, then in zip((texts.pool.states, texts.pool.windows), texts.before, strict=True):
        assert torch.equal(now[:, 0], then)
        assert torch.isnan(now[:, 4]).all()
