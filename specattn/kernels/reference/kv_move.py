"""Twin of `specattn.kernels.kv_move`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def commit_kv(
    k_pool: Tensor | Sequence[Tensor],
    v_pool: Tensor | Sequence[Tensor],
    tail_slots: Tensor,
    accept_index: Tensor,
    *,
    offsets: Tensor | None = None,
    unit: int = 1,
) -> None:
    """See `specattn.kernels.kv_move.commit_kv`; the layers say where they are."""
    n = tail_slots.shape[1]
    width = min(accept_index.shape[1], n)
    node = accept_index[:, :width].long()
    known = (node >= 0) & (node < n)
    source = tail_slots.long().gather(1, node.clamp(0, n - 1))
    # what is skipped copies slot 0, which belongs to padding, onto itself
    source = torch.where(known, source, 0).flatten()
    target = torch.where(known, tail_slots[:, :width].long(), 0).flatten()
    for pool in (k_pool, v_pool):
        for layer in pool:
            layer[target] = layer[source]
