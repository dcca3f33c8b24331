"""Twin of `specattn.kernels.kv_move`."""

from __future__ import annotations

import torch
from torch import Tensor


def commit_kv(k_pool: Tensor, v_pool: Tensor, tail_slots: Tensor, accept_index: Tensor) -> None:
    """See `specattn.kernels.kv_move.commit_kv`."""
    n = tail_slots.shape[1]
    width = min(accept_index.shape[1], n)
    node = accept_index[:, :width].long()
    known = (node >= 0) & (node < n)
    source = tail_slots.long().gather(1, node.clamp(0, n - 1))
    # what is skipped copies slot 0, which belongs to padding, onto itself
    source = torch.where(known, source, 0).flatten()
    target = torch.where(known, tail_slots[:, :width].long(), 0).flatten()
    for pool in (k_pool, v_pool):
        pool[:, target] = pool[:, source]
