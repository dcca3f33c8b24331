"""The delta rule token by token in float64, and inputs that are hard for it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import conv1d, silu, softplus

from specattn.kernels.gated_delta import LayerParts, LayerWeights, Nodes, Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("chain", "deep", "wide", "any", "shallow")
GATES = ("one", "zero", "mixed", "model")
NAN = float("nan")
# of random numbers, so that no test depends on another
SEED = 11


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + seed)


def tree(kind: str, n: int, seed: int = 0) -> list[int]:
    """Return parents of a tree; -1 of the root."""
    gen, parents, depth = generator(seed), [-1], [0]
    for node in range(1, n):
        if kind == "chain":
            choices = [node - 1]
        elif kind == "deep":
            choices = [*range(max(0, node - 3), node)]
        elif kind == "wide":
            choices = [*range(min(node, 4))]
        else:
            most = 3 if kind == "shallow" else n
            choices = [one for one in range(node) if depth[one] < most]
        parents.append(choices[int(torch.randint(len(choices), (), generator=gen))])
        depth.append(depth[parents[-1]] + 1)
    return parents


def path_to(parents: Sequence[int], node: int) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def deepest(parents: Sequence[int]) -> list[int]:
    return max((path_to(parents, node) for node in range(len(parents))), key=len)


def words_of_trees(trees: Sequence[Sequence[int]]) -> Tensor:
    """Return ancestor words ``[B, n, 1]``."""
    words = [[sum(1 << one for one in path_to(t, node)) for node in range(len(t))] for t in trees]
    signed = [[word - (word >> 63 << 64) for word in row] for row in words]
    return torch.tensor(signed, device=DEVICE)[..., None]


def paths_of(paths: Sequence[Sequence[int]], width: int) -> Tensor:
    """Return ``accept_index``."""
    found = torch.full((len(paths), width), -1, dtype=torch.int32)
    for at, path in enumerate(paths):
        found[at, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return found.to(DEVICE)


@dataclass(frozen=True)
class Shape:
    """Heads and dimensions of a layer, its dtypes, and the convolution's width."""

    heads: tuple[int, int] = (2, 6)
    dims: tuple[int, int] = (16, 32)
    dtype: torch.dtype = torch.float32
    states: torch.dtype = torch.float32
    width: int = 4

    @property
    def channels(self) -> int:
        (hk, hv), (k, v) = self.heads, self.dims
        return 2 * hk * k + hv * v

    def new_states(self, *size: int, seed: int = 5) -> Tensor:
        (_, hv), (k, v) = self.heads, self.dims
        drawn = torch.randn(*size, hv, v, k, generator=generator(seed))
        return drawn.to(DEVICE, self.states)

    def new_windows(self, *size: int, seed: int = 6) -> Tensor:
        drawn = torch.randn(*size, self.channels, self.width - 1, generator=generator(seed))
        return drawn.to(DEVICE, self.dtype)


def tokens_of(
    shape: Shape, count: int, gates: str = "model", *, alike: bool = False, seed: int = 0
) -> Tokens:
    """Return tokens whose gates are near 1, near 0, both, or as models have them.

    Keys resemble each other; ``alike`` ones are the same, with beta 1: the hardest to solve for.
    """
    gen, (hk, hv), (k_dim, v_dim) = generator(seed), shape.heads, shape.dims
    q, k = (torch.randn(count, hk, k_dim, generator=gen) for _ in range(2))
    v = torch.randn(count, hv, v_dim, generator=gen)
    k = k + 0.7 * torch.randn(1, hk, k_dim, generator=gen)
    beta = torch.sigmoid(torch.randn(count, hv, generator=gen))
    if alike:
        k, beta = k[:1].repeat(count, 1, 1), torch.ones(count, hv)
    far, near = (low * torch.rand(count, hv, generator=gen) for low in (-60.0, -1e-4))
    size = torch.rand(hv, generator=gen) * 16 + 0.01
    g = {
        "one": near,
        "zero": far,
        "mixed": torch.where(torch.rand(count, hv, generator=gen) < 0.5, far, near),
        "model": -size * softplus(torch.randn(count, hv, generator=gen) - 3),
    }[gates]
    heads = (one.to(DEVICE, shape.dtype) for one in (q, k, v))
    return Tokens(*heads, g.to(DEVICE), beta.to(DEVICE))


def at(tokens: Tokens, which: object) -> Tokens:
    """Return some tokens."""
    return Tokens(*(getattr(tokens, one.name)[which] for one in fields(tokens)))


def exact_path(
    tokens: Tokens, state: Tensor, *, rounded: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return outputs ``[T, HV, V]`` and the last state of a text, in float64.

    States are ``rounded`` after every token.
    """
    text, state, states = by_token(tokens), state.double().cpu(), []
    for _, *token in text:
        states.append(went_on(state, *token))
        state = states[-1].to(rounded).double()
    return read(states, text), state


def exact_tree(tokens: Tokens, state: Tensor, parents: Sequence[int]) -> Tensor:
    """Return outputs ``[n, HV, V]``, of each node by the recurrence along its own path."""
    text, states = by_token(tokens), {-1: state.double().cpu()}
    for node, parent in enumerate(parents):
        _, *token = text[node]
        states[node] = went_on(states[parent], *token)
    return read([states[node] for node in range(len(parents))], text)


def by_token(tokens: Tokens) -> list[tuple[Tensor, ...]]:
    """Return tokens one by one: by value head, q, k, v, what a state keeps, and beta."""
    q, k, v, g, beta = (
        getattr(tokens, name).double().cpu() for name in ("q", "k", "v", "g", "beta")
    )
    q, k = (
        (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
            v.shape[1] // k.shape[1], 1
        )
        for one in (q, k)
    )
    columns = (k[:, :, None], v[..., None], g.exp()[..., None, None], beta[..., None, None])
    return [*zip(q * q.shape[2] ** -0.5, *columns, strict=True)]


def went_on(state: Tensor, key: Tensor, value: Tensor, kept: Tensor, beta: Tensor) -> Tensor:
    """Return the states ``[HV, V, K]`` of all heads after another token."""
    state = state * kept
    return state + beta * (value - (state * key).sum(-1, keepdim=True)) * key


def read(states: Sequence[Tensor], text: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """Return what the tokens' queries read of the states after them."""
    queries = torch.stack([query for query, *_ in text])
    return torch.einsum("thvk,thk->thv", torch.stack([*states]), queries)


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest error, by the root mean square of what is expected."""
    expected = expected.double().cpu()
    assert found.shape == expected.shape
    return float((found.double().cpu() - expected).abs().max() / expected.square().mean().sqrt())


def parts_for(shape: Shape, count: int, *, split: int = 1, seed: int = 3) -> LayerParts:
    """Return products as views of one, with a gap, which holds NaN."""
    channels, hv, gen = shape.channels, shape.heads[1], generator(seed)
    whole = torch.full((split, count, channels + 2 * hv + 5), NAN)
    drawn = torch.randn(split, count, channels + 2 * hv, generator=gen) * split**-0.5
    whole[..., :channels], whole[..., channels + 5 :] = drawn[..., :channels], drawn[..., channels:]
    whole = whole.to(DEVICE, torch.float32 if split > 1 else shape.dtype)
    return LayerParts(
        whole[..., :channels], whole[..., channels + 5 : -hv], whole[..., channels + 5 + hv :]
    )


def weights_for(shape: Shape, seed: int = 4) -> LayerWeights:
    gen, hv = generator(seed), shape.heads[1]
    conv = torch.randn(shape.channels, shape.width, generator=gen) * 0.5
    a_log = (torch.rand(hv, generator=gen) * 16 + 0.01).log()
    bias = torch.randn(hv, generator=gen) - 3
    return LayerWeights(conv.to(DEVICE, shape.dtype), a_log.to(DEVICE), bias.to(DEVICE))


def exact_mixed(
    shape: Shape, parts: LayerParts, weights: LayerWeights, window: Tensor
) -> tuple[Tokens, Tensor]:
    """Return a text's tokens after the convolution, in float64, and the window that it leaves."""
    x, b, a = (one.float().sum(0).to(shape.dtype).double() for one in vars(parts).values())
    text = torch.cat([window.double(), x.T], 1)
    mixed = silu(conv1d(text[None], weights.conv.double()[:, None], groups=len(text))[0].T)
    (hk, hv), (k_dim, v_dim) = shape.heads, shape.dims
    q, k, v = mixed.split([hk * k_dim, hk * k_dim, hv * v_dim], 1)
    g = -weights.a_log.double().exp() * softplus(a + weights.dt_bias.double())
    beta = b.sigmoid().to(shape.dtype).double()
    heads = (q.unflatten(1, (hk, k_dim)), k.unflatten(1, (hk, k_dim)), v.unflatten(1, (hv, v_dim)))
    return Tokens(*heads, g, beta), text[:, len(x) :]


def unwritten(shape: Shape, count: int) -> Tokens:
    """Return room for tokens, full of NaN."""
    like = torch.empty(0, dtype=shape.dtype, device=DEVICE)
    tokens = Tokens.alloc(like, count, shape.heads, shape.dims)
    for one in fields(tokens):
        getattr(tokens, one.name).fill_(NAN)
    return tokens


def nodes_of(layers: Sequence[Tokens], inputs: Tensor, n: int, *, spare: int = 1) -> Nodes:
    """Return the nodes of a step from its layers' tokens; a batch's last requests are NaN."""

    def stacked(parts: Sequence[Tensor]) -> Tensor:
        found = torch.stack([one.unflatten(0, (-1, n)) for one in parts])
        shape = (len(found), found.shape[1] + spare, *found.shape[2:])
        whole = torch.full(shape, NAN, dtype=found.dtype, device=DEVICE)
        whole[:, : found.shape[1]] = found
        return whole

    names = ("k", "v", "g", "beta")
    made = [stacked([getattr(one, name) for one in layers]) for name in names]
    nodes = Nodes(stacked([*inputs]), *made)
    return nodes.bind(nodes.k.shape[1] - spare)
