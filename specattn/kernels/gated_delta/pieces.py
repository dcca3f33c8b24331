"""Read prompts' pieces into their states."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.checks import require_dense, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.gated_delta.tiles import chunk_tile, chunk_tokens, parts_of, solve_warps
from specattn.kernels.gated_delta.tokens import (
    Tokens,
    check_states,
    normalised,
    of_value_heads,
    step,
)
from specattn.kernels.launch import launch_options, power_of_2

launch = TritonModule("specattn.kernels.gated_delta.triton_pieces")
solving = TritonModule("specattn.kernels.gated_delta.triton_solve")


def read_pieces(tokens: Tokens, states: Tensor, rows: Tensor, qo_indptr: Tensor) -> Tensor:
    """Return what the delta rule gives after every token of prompts' pieces.

    A piece begins with its row's state and leaves its own there.

    Parameters
    ----------
    tokens : Tokens
        Of T tokens.
    states : Tensor
        ``[rows, HV, V, K]`` float32 or bfloat16, contiguous; in place. A bfloat16 state is rounded
        at the piece's end.
    rows : Tensor
        ``[P]`` int64, the pieces' rows, each but 0 at most once.
    qo_indptr : Tensor
        ``[P + 1]`` int32, where pieces begin; a piece may be empty.

    Returns
    -------
    Tensor
        ``[T, HV, V]`` of the model's dtype; 0 for tokens of no piece.

    Raises
    ------
    ValueError
        Before anything is written: if a tensor is of another shape or dtype or not dense.
    """
    check_states(tokens, states, rows)
    require_shape((len(rows) + 1,), torch.int32, qo_indptr=qo_indptr)
    require_dense(qo_indptr=qo_indptr)
    out = torch.zeros_like(tokens.v)
    if not len(out):
        return out
    heads = tokens.v.shape[1]
    if on_triton(out):
        (count, v_dim), (k_heads, k_dim) = (len(out), out.shape[2]), tokens.k.shape[1:]
        pieces, chunk, scale = len(rows), chunk_tokens(out.dtype), k_dim**-0.5
        sizes = {"HK": k_heads, "HV": heads, "K": k_dim, "N": chunk}
        sizes |= {"P_BLOCK": power_of_2(pieces), "SPLIT": parts_of(out.dtype)}
        sizes |= launch_options(out.device)
        # a piece's last chunk may have any number of tokens
        chunks = count // chunk + pieces
        split = sizes["SPLIT"]
        kind = out if split > 1 else tokens.g
        solved, reads = (kind.new_empty(split, chunks, heads, chunk, chunk) for _ in range(2))
        solving.solve_chunks_kernel[heads, chunks](
            (tokens.q, tokens.k, tokens.g, tokens.beta),
            qo_indptr,
            solved,
            reads,
            pieces,
            scale,
            num_warps=solve_warps(chunk, out.dtype),
            **sizes,
        )
        tile = chunk_tile(v_dim)
        launch.read_chunks_kernel[v_dim // tile.values * heads, pieces](
            states,
            (tokens.q, tokens.k, tokens.v, tokens.g),
            rows,
            qo_indptr,
            solved,
            reads,
            out,
            solved.stride(0),
            scale,
            V=v_dim,
            BV=tile.values,
            num_warps=tile.warps,
            **sizes,
        )
        return out
    ends = qo_indptr.tolist()
    k = of_value_heads(normalised(tokens.k), heads)
    q = of_value_heads(normalised(tokens.q), heads) * tokens.k.shape[2] ** -0.5
    for row, start, stop in zip(rows.tolist(), ends, ends[1:], strict=False):
        state = states[row].float()
        for at in range(start, stop):
            state = step(state, k[at], tokens.v[at].float(), tokens.g[at], tokens.beta[at])
            out[at] = (state * q[at][:, None]).sum(-1).to(out.dtype)
        if row > 0:
            states[row] = state
    return out
