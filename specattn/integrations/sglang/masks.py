"""SGLang's verify masks as the one that graphs read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def copy_full(mask: Tensor, seq_lens: Tensor, n: int, *, out: Tensor) -> None:
    """Copy the part of a mask that concerns the tree.

    Nothing waits for the device. It takes a few launches, which only masks take that SGLang builds
    outside of the backend's buffer: those of n-gram trees.

    Parameters
    ----------
    mask : Tensor
        Flat bool or uint8, SGLang's ``FULL_MASK``: per request n rows of ``seq_lens[b] + n``
        cells. A mask of ``B * n * n`` cells is ``QLEN_ONLY`` already.
    seq_lens : Tensor
        ``[B]`` int32 or int64, prefix lengths.
    n : int
        Nodes of each tree.
    out : Tensor
        ``[at least B * n * n]`` bool.
    """
    batch = len(seq_lens)
    cells = out[: batch * n * n]
    if mask.numel() == cells.numel():
        cells.copy_(mask)
        return
    lens, node = seq_lens.long(), torch.arange(n, device=mask.device)
    before = n * (lens.cumsum(0) - lens) + n * n * torch.arange(batch, device=mask.device)
    first = before[:, None] + node * (lens[:, None] + n) + lens[:, None]  # [B, n]
    cells.copy_(mask[(first[:, :, None] + node).flatten()] != 0)
