"""What packing writes: the verified rows of a batch, request after request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class PackedRows(NamedTuple):
    """The R rows of a target forward, request after request.

    Parameters
    ----------
    qo_indptr : Tensor
        ``[B + 1]`` int32, offsets of each request's rows; the last is R.
    tokens, positions : Tensor
        ``[R]`` int64.
    slots : Tensor
        ``[R]`` int32, where keys and values go.
    requests : Tensor
        ``[R]`` int64, each row's request in the batch.
    tail_slots : Tensor
        ``[B, n]`` int32, slots of all nodes of a request's tree; that of the root where a node is
        not verified.
    retrieve_index : Tensor
        ``[B, n]`` int64, the row of every node; that of the root for a node that is not verified.
    """

    qo_indptr: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    requests: Tensor
    tail_slots: Tensor
    retrieve_index: Tensor
