"""Fold accepted paths into states and windows."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.checks import require_dense, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.gated_delta.tiles import commit_tile
from specattn.kernels.gated_delta.tokens import Nodes, normalised, of_value_heads, step
from specattn.kernels.launch import cdiv, launch_options, power_of_2

launch = TritonModule("specattn.kernels.gated_delta.triton_commit")

# channels of a window that a program moves
BLOCK = 512


def commit_nodes(
    nodes: Nodes,
    states: Tensor,
    windows: Tensor,
    rows: Tensor,
    accept_index: Tensor,
    *,
    into: Tensor | None = None,
) -> None:
    """Go on by the accepted nodes, in all layers.

    A state goes on by the recurrence, node by node, whatever their number: the commit of m nodes
    has the bits of m commits of one. A request of row 0 keeps what it has.

    Parameters
    ----------
    nodes : Nodes
        What verification left.
    states : Tensor
        ``[L, rows, HV, V, K]`` float32 or bfloat16, contiguous; in place.
    windows : Tensor
        ``[L, rows, C, W - 1]`` of the model's dtype, contiguous; in place.
    rows : Tensor
        ``[B]`` int64, each but 0 at most once.
    accept_index : Tensor
        ``[B, N + 1]`` int32, nodes of the accepted path, -1 past its end; dense rows.
    into : Tensor, optional
        ``[B]`` int64, each but 0 at most once: the rows that get what comes of it, in place of
        ``rows``; 0 for none.

    Raises
    ------
    ValueError
        Before anything is written: if a tensor is of another shape or dtype or not dense.
    """
    into = rows if into is None else into
    _check(nodes, states, windows, rows, accept_index)
    require_shape(tuple(rows.shape), torch.int64, into=into)
    require_dense(into=into)
    if not len(rows):
        return
    if on_triton(rows):
        layers, _, n, k_heads, k_dim = nodes.k.shape
        (v_heads, v_dim), (channels, width) = nodes.v.shape[3:], windows.shape[2:]
        batch, path = accept_index.shape
        options = launch_options(rows.device)
        tile = commit_tile(v_dim)
        launch.commit_states_kernel[v_dim // tile.values * v_heads, batch, layers](
            states,
            (nodes.k, nodes.v, nodes.g, nodes.beta),
            rows,
            into,
            accept_index,
            n,
            path,
            nodes.k.stride(0) // (k_heads * k_dim),
            states.shape[1],
            HK=k_heads,
            HV=v_heads,
            K=k_dim,
            V=v_dim,
            BV=tile.values,
            num_warps=tile.warps,
            **options,
        )
        launch.commit_windows_kernel[cdiv(channels, BLOCK), batch, layers](
            windows,
            nodes.inputs,
            rows,
            into,
            accept_index,
            n,
            path,
            nodes.k.stride(0) // (k_heads * k_dim),
            windows.shape[1],
            C=channels,
            WIDTH=width + 1,
            W_BLOCK=power_of_2(width),
            BLOCK=BLOCK,
            num_warps=4,
            **options,
        )
        return
    width, heads = windows.shape[3], nodes.v.shape[3]
    keys = of_value_heads(normalised(nodes.k), heads)
    at = torch.arange(len(rows), device=rows.device)
    known = (accept_index >= 0) & (accept_index < nodes.k.shape[2])
    known &= ((rows > 0) & (into > 0))[:, None]
    source = rows
    for node, goes_on in zip(accept_index.long().T, known.int().cumprod(1).bool().T, strict=True):
        here, which, row, to = at[goes_on], node[goes_on], source[goes_on], into[goes_on]
        k, v, g, beta = (
            one[:, here, which].float() for one in (keys, nodes.v, nodes.g, nodes.beta)
        )
        states[:, to] = step(states[:, row].float(), k, v, g, beta).to(states.dtype)
        new = nodes.inputs[:, here, which][..., None]
        windows[:, to] = torch.cat([windows[:, row], new], -1)[..., -width:]
        source = into


def _check(
    nodes: Nodes, states: Tensor, windows: Tensor, rows: Tensor, accept_index: Tensor
) -> None:
    layers, batch, n, k_heads, k_dim = nodes.k.shape
    v_heads, v_dim = nodes.v.shape[3:]
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    step_shape, dtype = (layers, batch, n), nodes.k.dtype
    require_shape((*step_shape, channels), dtype, inputs=nodes.inputs)
    require_shape((*step_shape, v_heads, v_dim), dtype, v=nodes.v)
    require_shape((*step_shape, v_heads), torch.float32, g=nodes.g, beta=nodes.beta)
    require_dense(1, inputs=nodes.inputs, k=nodes.k, v=nodes.v, g=nodes.g, beta=nodes.beta)
    held = states.shape[1]
    require_shape((layers, held, v_heads, v_dim, k_dim), states=states)
    require_shape((layers, held, channels, windows.shape[-1]), dtype, windows=windows)
    require_shape((batch,), torch.int64, rows=rows)
    require_shape((batch, accept_index.shape[-1]), torch.int32, accept_index=accept_index)
    require_dense(states=states, windows=windows, rows=rows, accept_index=accept_index)
