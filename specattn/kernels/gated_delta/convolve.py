"""The short convolution before the delta rule, with the gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from specattn.checks import require_dense, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.gated_delta.tokens import (
    LayerParts,
    LayerWeights,
    Tokens,
    check_parts,
    check_words,
)
from specattn.kernels.launch import cdiv, launch_options, power_of_2
from specattn.kernels.words import unpack_words

launch = TritonModule("specattn.kernels.gated_delta.triton_convolve")

# tokens of prompts and channels that a program takes
TOKENS, BLOCK = 16, 128


def convolve_nodes(
    parts: LayerParts,
    weights: LayerWeights,
    windows: Tensor,
    rows: Tensor,
    words: Tensor,
    *,
    inputs: Tensor,
    out: Tokens,
) -> None:
    """Convolve every node over its nearest ancestors, and compute its gates.

    Above the root are the last inputs of its request's text, the newest last. Products are rounded
    to the model's dtype, as without partials.

    Parameters
    ----------
    parts : LayerParts
        Of B n nodes, request by request.
    weights : LayerWeights
        The layer's.
    windows : Tensor
        ``[rows, C, W - 1]`` of the model's dtype, contiguous; read.
    rows : Tensor
        ``[B]`` int64.
    words : Tensor
        ``[B, n, 1]`` int64 ancestor words, contiguous; a node's parent comes before it.
    inputs : Tensor
        ``[B n, C]`` of the model's dtype, contiguous; written: what is convolved.
    out : Tokens
        Written.

    Raises
    ------
    ValueError
        Before anything is written: if a tensor is of another shape or dtype or not dense, or trees
        have more than 64 nodes.
    """
    check_parts(parts, weights, windows, out)
    check_words(words, rows, len(out.g))
    require_shape(tuple(parts.qkv.shape[1:]), out.k.dtype, inputs=inputs)
    require_dense(inputs=inputs)
    if not len(inputs):
        return
    (batch, n), width = words.shape[:2], weights.conv.shape[1]
    if on_triton(inputs):
        # a program takes the nodes of a request
        block = max(32, min(128, 2048 // power_of_2(n)))
        launch.convolve_nodes_kernel[batch, cdiv(inputs.shape[1], block) + 1](
            _strided(parts),
            weights.conv,
            (weights.a_log, weights.dt_bias),
            windows,
            rows,
            words,
            inputs,
            _tensors(out),
            n,
            N_BLOCK=power_of_2(n),
            BLOCK=block,
            **_sizes(parts, weights, out),
        )
        return
    inputs.copy_(parts.qkv.float().sum(0))
    seen = unpack_words(words, n)  # [B, n, n]
    # 1 of the node itself, 2 of its parent, and so on
    rank = torch.where(seen, seen.flip(-1).cumsum(-1).flip(-1), 0)
    depth = seen.sum(-1) - 1
    # the window, oldest first, then the nodes: [B, W - 1 + n, C]
    source = torch.cat([windows[rows].mT, inputs.unflatten(0, (batch, n))], 1).float()
    total = torch.zeros_like(source[:, width - 1 :])
    for back in range(width):
        node = (rank == back + 1).int().argmax(-1)  # [B, n]
        at = torch.where(back <= depth, node + width - 1, width - 1 + depth - back)
        taken = source.gather(1, at[..., None].expand(-1, -1, source.shape[2]))
        total += taken * weights.conv[:, width - 1 - back].float()
    _write(total.flatten(0, 1), parts, weights, out)


def convolve_pieces(
    parts: LayerParts,
    weights: LayerWeights,
    windows: Tensor,
    rows: Tensor,
    qo_indptr: Tensor,
    *,
    out: Tokens,
) -> None:
    """Convolve prompts' pieces, and carry their windows on.

    A piece begins with its row's window and leaves its last inputs there. Tokens of no piece are
    left as they are, and so is row 0.

    Parameters
    ----------
    parts : LayerParts
        Of T tokens.
    weights : LayerWeights
        The layer's.
    windows : Tensor
        ``[rows, C, W - 1]`` of the model's dtype, contiguous; in place.
    rows : Tensor
        ``[P]`` int64, the pieces' rows, each but 0 at most once.
    qo_indptr : Tensor
        ``[P + 1]`` int32, where pieces begin; a piece may be empty.
    out : Tokens
        Written.

    Raises
    ------
    ValueError
        Before anything is written: if a tensor is of another shape or dtype or not dense.
    """
    check_parts(parts, weights, windows, out)
    require_shape((len(rows),), torch.int64, rows=rows)
    require_shape((len(rows) + 1,), torch.int32, qo_indptr=qo_indptr)
    require_dense(rows=rows, qo_indptr=qo_indptr)
    if not len(out.g):
        return
    if on_triton(out.g):
        (count, channels), pieces = parts.qkv.shape[1:], len(rows)
        sizes = _sizes(parts, weights, out)
        launch.convolve_pieces_kernel[cdiv(count, TOKENS), cdiv(channels, BLOCK) + 1](
            _strided(parts),
            weights.conv,
            (weights.a_log, weights.dt_bias),
            windows,
            rows,
            qo_indptr,
            _tensors(out),
            pieces,
            T_BLOCK=TOKENS,
            P_BLOCK=power_of_2(pieces),
            BLOCK=BLOCK,
            **sizes,
        )
        shared = ("C", "WIDTH", "SPLIT", "PDL", "launch_pdl")
        launch.carry_windows_kernel[pieces, cdiv(channels, BLOCK)](
            _strided(parts)[0],
            windows,
            rows,
            qo_indptr,
            W_BLOCK=power_of_2(sizes["WIDTH"] - 1),
            BLOCK=BLOCK,
            **{name: sizes[name] for name in shared if name in sizes},
        )
        return
    inputs, width = parts.qkv.float().sum(0).to(out.k.dtype), weights.conv.shape[1]
    total, ends = torch.zeros_like(inputs, dtype=torch.float32), qo_indptr.tolist()
    for row, start, stop in zip(rows.tolist(), ends, ends[1:], strict=False):
        source = torch.cat([windows[row].T, inputs[start:stop]])  # [W - 1 + tokens, C]
        for tap in range(width):
            taken = source[tap : tap + stop - start].float()
            total[start:stop] += taken * weights.conv[:, tap].float()
        if row > 0:
            windows[row] = source[len(source) - width + 1 :].T
    _write(total, parts, weights, out, slice(ends[0], ends[-1]))


def _strided(parts: LayerParts) -> tuple[tuple[Tensor, int, int], ...]:
    """Return products with their first two strides."""
    return tuple((x, x.stride(0), x.stride(1)) for x in (parts.qkv, parts.b, parts.a))


def _tensors(out: Tokens) -> tuple[Tensor, ...]:
    return out.q, out.k, out.v, out.g, out.beta


def _sizes(parts: LayerParts, weights: LayerWeights, out: Tokens) -> dict[str, Any]:
    """Return constants and options that all launches share."""
    channels, width = weights.conv.shape
    return {
        "C": channels,
        "Q_SIZE": out.k.shape[1:].numel(),
        "V_SIZE": out.v.shape[1:].numel(),
        "WIDTH": width,
        "HEADS": out.v.shape[1],
        "H_BLOCK": power_of_2(out.v.shape[1]),
        "SPLIT": len(parts.qkv),
        **launch_options(out.g.device),
    }


def _write(
    total: Tensor,
    parts: LayerParts,
    weights: LayerWeights,
    out: Tokens,
    which: slice = slice(None),
) -> None:
    """Activate what was convolved, compute gates, and write some tokens of both."""
    heads = out.q, out.k, out.v
    mixed = silu(total).split([one.shape[1:].numel() for one in heads], 1)
    for to, values in zip(heads, mixed, strict=True):
        to[which] = values.to(to.dtype).unflatten(1, to.shape[1:])[which]
    b, a = (part.float().sum(0).to(out.k.dtype) for part in (parts.b, parts.a))
    rate = -weights.a_log.float().exp()
    out.g[which] = (rate * softplus(a.float() + weights.dt_bias.float()))[which]
    # models round it
    out.beta[which] = b.float().sigmoid().to(b.dtype).float()[which]
