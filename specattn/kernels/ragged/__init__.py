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
    What no request needs, padding gets: all chunks are given away.

    One launch up to `MAX_CHUNKS`; in either case it can be recorded in a CUDA graph.

    Parameters
    ----------
    worth : Tensor
        ``[B, n]`` float32, dense, n a multiple of ``chunk`` above it. NaN and numbers below 0
        count as 0, numbers above 1e30 as that.
    rows : Tensor
        ``[B]`` int64; requests with row 0 are padding.
    chunk, chunks : int
        Nodes of a chunk, and chunks of the batch: B at least, and ``B (n / chunk - 1)`` at most.
    lens_out : Tensor
        ``[B]`` int32, written: multiples of ``chunk`` that add up to ``chunk * chunks``, n at most.

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
    most = batch * (nodes // chunk - 1)
    if not batch <= chunks <= most:
        raise ValueError(f"chunks must be {batch}..{most} for {batch} requests, got {chunks}")
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
    seq_lens: Tensor,
    window: Tensor,
    tokens: Tensor,
    positions: Tensor,
    words: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    *,
    out: PackedRows,
) -> None:
    """Pack each tree's first nodes; cut the trees there.

    Nodes past a request's length become padding in place, as `link_tree` makes it: no link leads to
    them, they see themselves alone, and are as deep as the root.

    One launch, which can be recorded in a CUDA graph.

    Parameters
    ----------
    lens : Tensor
        ``[B]`` int32, from `share_rows`: n at most, R together.
    seq_lens : Tensor
        ``[B]`` int32, committed lengths.
    window : Tensor
        ``[B, at least n]`` int32, slots after the committed tokens; rows may have a stride.
    tokens, positions, next_token, next_sibling : Tensor
        ``[B, n]`` int64, dense: the `specattn.batch.DraftTree`, in which parents come before their
        children and siblings ascend. All but the tokens are cut in place.
    words : Tensor
        ``[B, n, W]`` int64, dense, cut in place.
    out : PackedRows
        Dense tensors, written.

    Raises
    ------
    ValueError
        If a tensor is of another shape or layout.
    """
    batch, nodes = tokens.shape
    rows = len(out.tokens)
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "positions": (positions, (batch, nodes)),
        "next_token": (next_token, (batch, nodes)),
        "next_sibling": (next_sibling, (batch, nodes)),
        "words": (words, (batch, nodes, -(-nodes // 64))),
        "lens": (lens, (batch,)),
        "seq_lens": (seq_lens, (batch,)),
        "out.qo_indptr": (out.qo_indptr, (batch + 1,)),
        "out.tokens": (out.tokens, (rows,)),
        "out.positions": (out.positions, (rows,)),
        "out.slots": (out.slots, (rows,)),
        "out.requests": (out.requests, (rows,)),
        "out.tail_slots": (out.tail_slots, (batch, nodes)),
        "out.retrieve_index": (out.retrieve_index, (batch, nodes)),
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
        lens, seq_lens, window, tokens, positions, words, next_token, next_sibling, out
    )
