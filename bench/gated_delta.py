"""Gated DeltaNet layers of a step: verification and commit, how exact and how long.

All layers of a model's shape verify a tree or a chain from their committed states, then fold the
deepest path into these. Before anything is timed, a layer's outputs and states are compared with a
float64 recurrence along every path, and a commit of a path with commits of its nodes one by one.
Each cell is a graph; what is printed is milliseconds, the bytes that have to move by that time, and
the largest errors of a head's vector.

    python -m bench.gated_delta [--requests 1,4,16] [--models 27B,9B] [--sweep] [--out FILE]
    python -m bench.gated_delta --small     # errors of a small shape, on any device
"""

from __future__ import annotations

import argparse
import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bench.suite.machine import machine
from bench.suite.results import write
from bench.suite.timing import record, replay_in_turn
from specattn.kernels import on_triton
from specattn.kernels.gated_delta import Nodes, Tokens, commit_nodes, tiles, verify_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Calls = dict[str, Callable[[], object]]

#: Layers with states, key and value heads, and what a head has of each.
MODELS = {"27B": (48, 16, 48, 128), "9B": (24, 16, 32, 128), "small": (2, 2, 4, 16)}
#: What is verified: whether it is a chain, and its nodes.
SHAPES = (("plain", True, 1), ("chain", True, 4), ("tree", False, 16), ("tree", False, 64))
#: A draft tree's depth below its root.
DEPTH = 7
#: Most errors: of outputs, which are rounded to bfloat16, and of states.
MOST_ERROR, MOST_STATE_ERROR = 2e-2, 2e-5
#: What may be chosen otherwise: tiles of (values, warps, whether they solve), warps, limits.
SWEEP: dict[str, list[Any]] = {
    "commit_tile": [tiles.Tile(v, w) for v, w in itertools.product((8, 16, 32, 64), (1, 2, 4))],
    "read_tile": [
        tiles.Tile(v, w, solves)
        for v, w, solves in itertools.product((16, 32, 64, 128), (4, 8), (False, True))
    ],
    "solve_warps": [1, 2, 4, 8],
}


def draft_tree(n: int, *, chain: bool, seed: int) -> list[int]:
    """Return parents: -1 of the root."""
    gen, parents, depth = torch.Generator().manual_seed(seed), [-1], [0]
    for node in range(1, n):
        choices = [node - 1] if chain else [at for at in range(node) if depth[at] < DEPTH]
        parents.append(choices[int(torch.randint(len(choices), (), generator=gen))])
        depth.append(depth[parents[-1]] + 1)
    return parents


def path_to(parents: Sequence[int], node: int) -> list[int]:
    found: list[int] = []
    while node >= 0:
        found.insert(0, node)
        node = parents[node]
    return found


@dataclass(frozen=True)
class World:
    """States of all layers, and what the nodes of a step bring to them."""

    states: Tensor
    windows: Tensor
    queries: Tensor
    nodes: Nodes
    rows: Tensor
    words: Tensor
    path: Tensor
    trees: list[list[int]]

    @classmethod
    def of(cls, model: str, batch: int, n: int, *, chain: bool, device: str) -> World:
        """Draw one; numbers are as models have them."""
        layers, hk, hv, dim = MODELS[model]
        torch.manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(layers, batch, n, *shape, device=device)

        q, k, v = (draw(heads, dim).bfloat16() for heads in (hk, hk, hv))
        size = torch.rand(hv, device=device) * 16 + 0.01
        gates = -size * softplus(draw(hv) - 3), torch.sigmoid(draw(hv))
        channels = (2 * hk + hv) * dim
        nodes = Nodes(draw(channels).bfloat16(), k, v, *gates)
        trees = [draft_tree(n, chain=chain, seed=seed) for seed in range(batch)]
        paths = [max((path_to(tree, at) for at in range(n)), key=len) for tree in trees]
        path = torch.full((batch, max(map(len, paths))), -1, dtype=torch.int32)
        for at, found in enumerate(paths):
            path[at, : len(found)] = torch.tensor(found, dtype=torch.int32)
        bits = [[sum(1 << one for one in path_to(tree, at)) for at in range(n)] for tree in trees]
        words = torch.tensor([[word - (word >> 63 << 64) for word in row] for row in bits])
        states = torch.randn(layers, batch + 1, hv, dim, dim, device=device)
        windows = torch.randn(layers, batch + 1, channels, 3, device=device).bfloat16()
        rows = torch.arange(1, batch + 1, device=device)
        moved = words[..., None].to(device), path.to(device)
        return cls(states, windows, q, nodes, rows, *moved, trees)

    def tokens(self, layer: int) -> Tokens:
        found, nodes = [self.queries], self.nodes
        found += [nodes.k, nodes.v, nodes.g, nodes.beta]
        return Tokens(*(one[layer].flatten(0, 1) for one in found))

    def verify(self) -> None:
        for layer, states in enumerate(self.states):
            verify_nodes(
                self.tokens(layer),
                states,
                self.rows,
                self.words,
                follows=layer > 0,
            )

    def commit(self) -> None:
        commit_nodes(self.nodes, self.states, self.windows, self.rows, self.path)

    def both(self) -> None:
        self.verify()
        self.commit()

    def calls(self) -> Calls:
        return {"both": self.both, "verify": self.verify, "commit": self.commit}

    def bytes(self) -> dict[str, int]:
        """Bytes that have to move, by call."""
        used = self.states[:, 1:].numel() * self.states.element_size()
        window = 2 * self.windows[:, 1:].numel() * self.windows.element_size()
        kept = self.nodes.size - self.nodes.inputs.numel() * self.nodes.inputs.element_size()
        outputs = self.queries.nbytes + self.nodes.v.nbytes
        share = float((self.path >= 0).sum()) / self.words.numel()
        found = {"verify": used + kept + outputs, "commit": int(2 * used + window + share * kept)}
        return found | {"both": sum(found.values())}


def exact(world: World, layer: int, request: int) -> tuple[Tensor, Tensor]:
    """Return outputs ``[n, HV, V]`` and the state after the path, by the recurrence in float64."""
    nodes, group = world.nodes, world.nodes.v.shape[3] // world.nodes.k.shape[3]
    q, k, v, g, beta = (
        one[layer, request].double()
        for one in (world.queries, nodes.k, nodes.v, nodes.g, nodes.beta)
    )
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1)
        for x in (q, k)
    )
    states, outputs = {-1: world.states[layer, world.rows[request]].double()}, []
    for node, parent in enumerate(world.trees[request]):
        s = states[parent] * g[node].exp()[:, None, None]
        delta = beta[node][:, None] * (v[node] - (s * k[node][:, None]).sum(-1))
        states[node] = s = s + delta[..., None] * k[node][:, None]
        outputs.append((s * q[node][:, None]).sum(-1) * q.shape[-1] ** -0.5)
    last = int(world.path[request].max())
    return torch.stack(outputs), states[last]


def apart(found: Tensor, want: Tensor) -> float:
    """Return the largest error of a head's vector, by the root mean square of their lengths."""
    lengths = want.norm(dim=-1).square().mean().sqrt()
    return float((found.double() - want).norm(dim=-1).max() / lengths)


def errors(world: World) -> dict[str, float]:
    """Compare the last layer with float64; leave states as they were."""
    layer, n = len(world.states) - 1, world.words.shape[1]
    last = len(world.rows) - 1
    before = world.states.clone(), world.windows.clone()
    found = verify_nodes(
        world.tokens(layer), world.states[layer], world.rows, world.words
    ).unflatten(0, (-1, n))
    (first, state), (other, _) = exact(world, layer, 0), exact(world, layer, last)
    world.commit()
    whole = world.states.clone(), world.windows.clone()
    for tensor, old in zip((world.states, world.windows), before, strict=True):
        tensor.copy_(old)
    for node in world.path.T.contiguous():
        one = node[:, None].contiguous()
        commit_nodes(world.nodes, world.states, world.windows, world.rows, one)
    again = world.states, world.windows
    assert all(map(torch.equal, whole, again)), "a commit is not that of its nodes one by one"
    for tensor, old in zip(again, before, strict=True):
        tensor.copy_(old)
    out = max(apart(found[0], first), apart(found[last], other))
    return {"out": out, "state": apart(whole[0][layer, world.rows[0]], state)}


def measured(model: str, batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare and time all shapes for so many requests."""
    device, cells = "cuda" if torch.cuda.is_available() else "cpu", []
    for name, chain, n in SHAPES:
        world = World.of(model, batch, n, chain=chain, device=device)
        off = errors(world)
        assert off["out"] < MOST_ERROR, (model, batch, name, n, off)
        assert off["state"] < MOST_STATE_ERROR, (model, batch, name, n, off)
        cell: dict[str, Any] = {"model": model, "requests": batch, "shape": name, "nodes": n}
        cell |= {"depth": world.path.shape[1] - 1, **off}
        if on_triton(world.states):
            cell |= times(world, options.rounds)
            if options.sweep and n > 1:
                sweep(world, options.rounds)
        cells.append(cell)
        shown = {key: f"{one:.3g}" if isinstance(one, float) else one for key, one in cell.items()}
        print(*(f"{key} {one}" for key, one in shown.items()), flush=True)
    return cells


def times(world: World, rounds: int) -> dict[str, float]:
    """Return milliseconds and GB/s of each call, in graphs of their own."""
    graphs = {name: record(call) for name, call in world.calls().items()}
    replay_in_turn([*graphs.values()], rounds, 1e6)
    found, moved = {}, world.bytes()
    for name, graph in graphs.items():
        found[f"{name}_ms"] = graph.median / 1e3
        found[f"{name}_gb_s"] = moved[name] / graph.median / 1e3
    return found


def sweep(world: World, rounds: int) -> None:
    """Print what every other choice takes, of what it changes."""
    v_dim = world.states.shape[3]
    for name, choices in SWEEP.items():
        for choice in choices:
            if isinstance(choice, tuple) and choice[0] > v_dim:
                continue
            call = world.commit if name == "commit_tile" else world.verify
            with ExitStack() as stack:
                for module in ("commit", "triton_verify"):
                    place = f"specattn.kernels.gated_delta.{module}.{name}"
                    if module == "triton_verify" or name == "commit_tile":
                        stack.enter_context(mock.patch(place, return_value=choice))
                try:
                    graph = record(call)
                except Exception as problem:
                    print(f"  {name} {choice}: {str(problem)[:60]}")
                    continue
                replay_in_turn([graph], rounds, 1e6)
            print(f"  {name} {choice}: {graph.median / 1e3:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="1,4,16")
    parser.add_argument("--models", default="27B,9B")
    parser.add_argument("--small", action="store_true", help="errors of a small shape alone")
    parser.add_argument("--sweep", action="store_true", help="time other tiles, too")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    models = ["small"] if options.small else options.models.split(",")
    cells = []
    for model in models:
        for batch in map(int, options.requests.split(",")):
            cells += measured(model, batch, options)
    if options.out:
        write({"machine": machine(), "cells": cells}, options.out)


if __name__ == "__main__":
    main()
