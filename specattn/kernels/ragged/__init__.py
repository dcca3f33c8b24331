"""Verify lengths per request: share a batch's rows among its trees."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels import implementation
from specattn.kernels.checks import require_dense, require_rows
from specattn.kernels.ragged import naive
from specattn.kernels.ragged.outputs import PackedRows

__all__ = ["PackedRows", "pack_rows", "share_rows"]

# chunks that one program holds in registers; those of more are sorted by torch
MAX_CHUNKS = 8192


def share_rows(worth: Tensor, rows: Tensor, *, chunk: int, chunks: int, lens_out: Tensor) -> None:
    """Choose how many nodes of each tree are verified.

    What nodes are worth decides. They come in chunks of ``chunk``. Every request gets its first
    chunk. The others go to the chunks of highest worth, the sum of their nodes', of whichever
    request. A chunk counts for no more than the one before it, so that what is verified of a tree
    are its first nodes. Among equals the chunk of lower number comes first, then the request that
    comes first. If worth falls from node to node, no other choice of as many chunks is worth more.

    One launch, which can be recorded in a CUDA graph.

    Parameters
    ----------
    worth : Tensor
        ``[B, n]`` float32, dense, n a multiple of ``chunk`` above it. NaN and numbers below 0
        count as 0, numbers above 1e30 as that.
    rows : Tensor
        ``[B]`` int64; requests with row 0 are padding, and get nothing.
    chunk, chunks : int
        Nodes of a chunk, and chunks of the batch, B at least.
    lens_out : Tensor
        ``[B]`` int32, written: multiples of ``chunk``, n at most; 0 for padding.

    Raises
    ------
    ValueError
        If a number is out of range, or a tensor of another shape, dtype or layout.
    """
    if worth.dim() != 2 or worth.dtype != torch.float32:
        raise ValueError(
            f"worth must be [B, n] {torch.float32}, got {list(worth.shape)} {worth.dtype}"
        )
    batch, nodes = worth.shape
    if chunk < 1 or nodes % chunk or nodes == chunk:
        raise ValueError(f"worth must have a multiple of chunk {chunk} nodes above it, got {nodes}")
    if chunks < batch:
        raise ValueError(f"chunks must be at least {batch}, one per request, got {chunks}")
    if rows.shape != (batch,) or lens_out.shape != (batch,):
        raise ValueError(
            f"rows and lens_out must be [{batch}], got {list(rows.shape)} and "
            f"{list(lens_out.shape)}"
        )
    require_dense(worth=worth, rows=rows, lens_out=lens_out)
    if not batch:
        return
    many = batch * (nodes // chunk) > MAX_CHUNKS
    share = naive.share_rows if many else implementation(naive.share_rows, worth.device)
    share(worth, rows, chunk, chunks, lens_out)


def pack_rows(
    lens: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    window: Tensor,
    tokens: Tensor,
    positions: Tensor,
    words: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    *,
    index_out: Tensor,
    out: PackedRows,
) -> None:
    """Pack each tree's first nodes; cut the trees there.

    Nodes past a request's length become padding in place, as `link_tree` makes it: no link leads to
    them, they see themselves alone, and are as deep as the root.

    One launch, which can be recorded in a CUDA graph.

    Parameters
    ----------
    lens : Tensor
        ``[B]`` int32, from `share_rows`: multiples of m, together at most C m.
    rows, seq_lens : Tensor
        ``[B]`` int64 and int32: table rows and committed lengths.
    window : Tensor
        ``[B, at least n]`` int32, slots after the committed tokens; rows may have a stride.
    tokens, positions, next_token, next_sibling : Tensor
        ``[B, n]`` int64, dense: the `specattn.batch.DraftTree`, in which parents come before their
        children and siblings ascend. All but the tokens are cut in place.
    words : Tensor
        ``[B, n, W]`` int64, dense, cut in place.
    index_out : Tensor
        ``[B, n]`` int64, dense: the row of every node among the C m rows; that of the root for a
        node which is not verified, and 0 for padding.
    out : PackedRows
        Dense tensors, written.

    Raises
    ------
    ValueError
        If a tensor is of another shape or layout.
    """
    batch, nodes = tokens.shape
    chunks, chunk = out.tokens.shape
    wanted = {
        "positions": (positions, (batch, nodes)),
        "next_token": (next_token, (batch, nodes)),
        "next_sibling": (next_sibling, (batch, nodes)),
        "index_out": (index_out, (batch, nodes)),
        "words": (words, (batch, nodes, -(-nodes // 64))),
        "lens": (lens, (batch,)),
        "rows": (rows, (batch,)),
        "seq_lens": (seq_lens, (batch,)),
        "out.rows": (out.rows, (chunks,)),
        "out.seq_lens": (out.seq_lens, (chunks,)),
        "out.positions": (out.positions, (chunks, chunk)),
        "out.words": (out.words, (chunks, chunk, -(-nodes // 64))),
        "out.slots": (out.slots, (chunks, chunk)),
        "out.tail_slots": (out.tail_slots, (chunks, nodes)),
        "out.tail_positions": (out.tail_positions, (chunks, nodes)),
        "out.requests": (out.requests, (chunks,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if len(window) != batch or window.shape[1] < nodes:
        raise ValueError(f"window must be [{batch}, at least {nodes}], got {list(window.shape)}")
    require_dense(tokens=tokens, **{name: tensor for name, (tensor, _) in wanted.items()})
    require_rows(window=window)
    if not batch:
        return
    implementation(naive.pack_rows, tokens.device)(
        lens,
        rows,
        seq_lens,
        window,
        tokens,
        positions,
        words,
        next_token,
        next_sibling,
        index_out,
        out,
    )
