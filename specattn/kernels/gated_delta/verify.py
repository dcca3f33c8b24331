"""Verify trees by one read of each state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_dense, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.gated_delta.tokens import (
    Tokens,
    check_states,
    check_words,
    normalised,
    of_value_heads,
)
from specattn.kernels.words import unpack_words

if TYPE_CHECKING:
    from specattn.kernels.gated_delta import triton_verify as launch
else:
    launch = TritonModule("specattn.kernels.gated_delta.triton_verify")


def verify_nodes(
    tokens: Tokens,
    states: Tensor,
    rows: Tensor,
    words: Tensor,
    *,
    follows: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return what the delta rule gives after every node of trees.

    Parameters
    ----------
    tokens : Tokens
        Of B n nodes, request by request.
    states : Tensor
        ``[rows, HV, V, K]`` float32 or bfloat16, contiguous; the layer's.
    rows : Tensor
        ``[B]`` int64.
    words : Tensor
        ``[B, n, 1]`` int64 ancestor words, contiguous; a node's parent comes before it.
    follows : bool
        Whether another layer of the same forward was verified before: then states and ``rows`` may
        be read while the kernel in front still runs. Neither was written since.
    out : Tensor, optional
        ``[B n, HV, V]`` of the model's dtype, contiguous: where to write; if None, a new tensor.

    Returns
    -------
    Tensor
        ``out``.

    Raises
    ------
    ValueError
        If a tensor is of another shape or dtype or not dense, or trees have more than 64 nodes.
    """
    check_states(tokens, states, rows)
    check_words(words, rows, len(tokens.g))
    if out is None:
        out = torch.empty_like(tokens.v)
    require_shape(tuple(tokens.v.shape), tokens.v.dtype, out=out)
    require_dense(out=out)
    if not len(out):
        return out
    if on_triton(out):
        return launch.verify(
            tokens=tokens,
            states=states,
            rows=rows,
            words=words,
            follows=follows,
            out=out,
        )
    (batch, n), heads = words.shape[:2], tokens.v.shape[1]

    def by_head(x: Tensor) -> Tensor:
        return x.view(batch, n, *x.shape[1:]).float().transpose(1, 2)

    k = by_head(of_value_heads(normalised(tokens.k), heads))  # [B, HV, n, K]
    q = by_head(of_value_heads(normalised(tokens.q), heads)) * tokens.k.shape[2] ** -0.5
    v, beta, seen = by_head(tokens.v), by_head(tokens.beta)[..., None], unpack_words(words, n)
    # sums of multiples are exact, and so are differences of these
    large = (by_head(tokens.g) * 1024).round() / 1024
    parts = torch.stack([large, by_head(tokens.g) - large])[..., None]
    sums = seen[:, None].float() @ parts  # [2, B, HV, n, 1]
    spans = (sums - sums.mT).sum(0).clamp(max=0)
    decay, gate = spans.masked_fill(~seen[:, None], -torch.inf).exp(), sums.sum(0).exp()
    state = states[rows].float().mT
    above = beta * decay * (k @ k.mT)
    given = beta * (v - gate * (k @ state))
    u = torch.linalg.solve_triangular(above, given, upper=False, unitriangular=True)
    found = gate * (q @ state) + (decay * (q @ k.mT)) @ u
    return out.copy_(found.transpose(1, 2).flatten(0, 1))
