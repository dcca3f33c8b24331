"""What packing writes: the verified rows of a batch, chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class PackedRows(NamedTuple):
    """The rows of a target forward, in chunks.

    Each of C chunks has m nodes of one request. A chunk that no request has is padding: row 0 and
    length 0, and its nodes see slot 0.

    Parameters
    ----------
    rows, seq_lens : Tensor
        ``[C]`` int64 and int32: table row and committed length of each chunk's request.
    tokens, positions : Tensor
        ``[C, m]`` int64.
    words : Tensor
        ``[C, m, W]`` int64: which nodes of the request's tree each one sees.
    slots : Tensor
        ``[C, m]`` int32, where keys and values of the chunk's nodes go.
    tail_slots, tail_positions : Tensor
        ``[C, n]`` int32 and int64: slots and positions of all nodes of the request; those of the
        root where a node is not verified.
    requests : Tensor
        ``[C]`` int64: the request in the batch; 0 for padding.
    """

    rows: Tensor
    seq_lens: Tensor
    tokens: Tensor
    positions: Tensor
    words: Tensor
    slots: Tensor
    tail_slots: Tensor
    tail_positions: Tensor
    requests: Tensor
