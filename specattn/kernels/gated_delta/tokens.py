"""What tokens bring to a layer's state, as records that travel together.

Shapes: T tokens; HK key and HV value heads of K and V numbers; C = 2 HK K + HV V channels of a
convolution of width W; L layers; B requests of n nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from specattn.checks import require_dense, require_rows, require_shape

#: Most nodes of a tree: an ancestor word holds as many.
MAX_NODES = 64
#: Added to the square of a query's or key's norm.
EPS = 1e-6


@dataclass(frozen=True, eq=False)
class LayerParts:
    """What a layer's products give for every token, as partials.

    All are dense in their last axis; views of one product will do.

    Parameters
    ----------
    qkv : Tensor
        ``[S, T, C]``: queries, keys and values, head by head, before the convolution.
    b, a : Tensor
        ``[S, T, HV]``: what betas and gates are made of.
    """

    qkv: Tensor
    b: Tensor
    a: Tensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """A layer's weights beside its products; all contiguous.

    Parameters
    ----------
    conv : Tensor
        ``[C, W]``; the last column is the token's own.
    a_log, dt_bias : Tensor
        ``[HV]`` each: a gate is ``-exp(a_log) softplus(a + dt_bias)``.
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, eq=False)
class Tokens:
    """What tokens bring to a state; all contiguous.

    Parameters
    ----------
    q, k : Tensor
        ``[T, HK, K]``, not normalised.
    v : Tensor
        ``[T, HV, V]``.
    g, beta : Tensor
        ``[T, HV]`` float32: the log of the gate, at most 0, and the share that is written.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def alloc(cls, like: Tensor, count: int, heads: tuple[int, int], dims: tuple[int, int]) -> Self:
        """Return room for tokens.

        It is for ``count`` tokens of (HK, HV) heads of (K, V) numbers. Queries, keys and values
        have the dtype of ``like``, all its device.
        """
        (k_heads, v_heads), (k_dim, v_dim) = heads, dims
        q, k = (like.new_empty(count, k_heads, k_dim) for _ in range(2))
        g, beta = (like.new_empty(count, v_heads, dtype=torch.float32) for _ in range(2))
        return cls(q, k, like.new_empty(count, v_heads, v_dim), g, beta)

    def check(self) -> None:
        """Raise a ValueError unless all are as described."""
        count, k_heads, k_dim = self.k.shape
        v_heads, v_dim = self.v.shape[1:]
        require_shape((count, k_heads, k_dim), self.v.dtype, q=self.q, k=self.k)
        require_shape((count, v_heads, v_dim), v=self.v)
        require_shape((count, v_heads), torch.float32, g=self.g, beta=self.beta)
        require_dense(q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta)
        if v_heads % k_heads:
            raise ValueError(f"v must have a multiple of {k_heads} heads, got {v_heads}")


@dataclass(frozen=True, eq=False)
class Nodes:
    """What the nodes of a step leave for its commit.

    Static buffers of all layers, which outlive no step. Verification writes a layer's part
    (`layer`), the commit reads all.

    Parameters
    ----------
    inputs : Tensor
        ``[L, B, n, C]``, what the convolution reads.
    k : Tensor
        ``[L, B, n, HK, K]``, not normalised.
    v : Tensor
        ``[L, B, n, HV, V]``.
    g, beta : Tensor
        ``[L, B, n, HV]`` float32, as in `Tokens`.
    places : Tensor, optional
        ``[B]`` int64, where the requests' states are, if not in their rows.
    """

    inputs: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    places: Tensor | None = None

    def bind(self, batch: int) -> Self:
        """Return views of the first ``batch`` requests."""
        places = None if self.places is None else self.places[:batch]
        inputs, k, v, g, beta = (one[:, :batch] for one in self._of_layers)
        return type(self)(inputs, k, v, g, beta, places)

    def layer(self, index: int) -> tuple[Tensor, Tokens]:
        """Return a layer's inputs ``[T, C]`` and tokens, with room for queries."""
        inputs, k, v, g, beta = (one[index].flatten(0, 1) for one in self._of_layers)
        return inputs, Tokens(torch.empty_like(k), k, v, g, beta)

    @property
    def size(self) -> int:
        """Bytes, of all layers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._of_layers)

    @property
    def _of_layers(self) -> tuple[Tensor, ...]:
        return self.inputs, self.k, self.v, self.g, self.beta


def check_parts(parts: LayerParts, weights: LayerWeights, windows: Tensor, out: Tokens) -> None:
    """Raise a ValueError unless a layer's products, weights and windows fit ``out``."""
    out.check()
    count, v_heads = out.g.shape
    channels = 2 * out.k.shape[1:].numel() + out.v.shape[1:].numel()
    split, width = len(parts.qkv), weights.conv.shape[-1]
    require_shape((split, count, channels), qkv=parts.qkv)
    require_shape((split, count, v_heads), parts.qkv.dtype, b=parts.b, a=parts.a)
    require_rows(qkv=parts.qkv, b=parts.b, a=parts.a)
    require_shape((channels, width), conv=weights.conv)
    require_shape((v_heads,), a_log=weights.a_log, dt_bias=weights.dt_bias)
    require_shape((len(windows), channels, width - 1), out.k.dtype, windows=windows)
    require_dense(conv=weights.conv, a_log=weights.a_log, dt_bias=weights.dt_bias, windows=windows)


def check_states(tokens: Tokens, states: Tensor, rows: Tensor) -> None:
    """Raise a ValueError unless a layer's states fit tokens."""
    tokens.check()
    shape = (len(states), *tokens.v.shape[1:], tokens.k.shape[2])
    require_shape(shape, states=states)
    require_shape((len(rows),), torch.int64, rows=rows)
    require_dense(states=states, rows=rows)


def check_words(words: Tensor, rows: Tensor, count: int) -> None:
    """Raise a ValueError unless words are those of all nodes."""
    batch = len(rows)
    require_shape((batch, words.shape[1], 1), torch.int64, words=words)
    require_shape((batch,), torch.int64, rows=rows)
    require_dense(words=words, rows=rows)
    if batch * words.shape[1] != count:
        raise ValueError(f"words must be those of {count} nodes, got {list(words.shape)}")
    if words.shape[1] > MAX_NODES:
        raise ValueError(f"a tree must have at most {MAX_NODES} nodes, got {words.shape[1]}")


def normalised(x: Tensor) -> Tensor:
    """Normalise the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def of_value_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat ``[..., HK, D]`` for each value head: ``[..., HV, D]``."""
    return x.repeat_interleave(heads // x.shape[-2], -2)


def step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return states ``[..., V, K]`` after one token: the recurrence."""
    state = state * g.exp()[..., None, None]
    delta = (v - (state * k[..., None, :]).sum(-1)) * beta[..., None]
    return state + delta[..., None] * k[..., None, :]
