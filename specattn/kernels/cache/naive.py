"""Keys and values in their slots, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_FLOAT8_MAX = 448.0


def _as_stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Convert to ``dtype``, as the pool stores it.

    For float8, values are divided by ``scale`` and clamped to its largest number.
    """
    if dtype == torch.float8_e4m3fn:
        values = (values.float() * (1 / scale)).clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
    return values.to(dtype)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    index = slots.reshape(-1).long()
    kept = index >= 0
    for new, scale, cache in ((k, k_scale, k_cache), (v, v_scale, v_cache)):
        # float8 has no index_copy_
        cache[index[kept]] = _as_stored(new[kept], scale, cache.dtype)


def commit_kv(
    k_pool: Tensor | Sequence[Tensor],
    v_pool: Tensor | Sequence[Tensor],
    tail_slots: Tensor,
    accept_index: Tensor,
    offsets: Tensor | None,
    unit: int,
) -> None:
    n = tail_slots.shape[1]
    width = min(accept_index.shape[1], n)
    node = accept_index[:, :width].long()
    known = (node >= 0) & (node < n)
    source = tail_slots.long().gather(1, node.clamp(0, n - 1))
    target = tail_slots[:, :width].long()
    known &= (source >= 0) & (target >= 0)
    # what is skipped copies slot 0, which belongs to padding, onto itself
    source, target = (torch.where(known, slot, 0).flatten() for slot in (source, target))
    for pool in (k_pool, v_pool):
        for layer in pool:
            layer[target] = layer[source]


def write_slots(
    packed: Tensor,
    req_to_token: Tensor,
    reserved: Tensor,
    pieces: int,
    longest: int,
    page_size: int,
) -> None:
    for row, column, count, first, room in packed[: 5 * pieces].view(5, pieces).T.tolist():
        pages = packed[first : first - (-count // page_size), None]  # [pages, 1]
        within = torch.arange(page_size, dtype=torch.int32, device=packed.device)
        slots = (pages * page_size + within).view(-1)[:count]
        req_to_token[row, column : column + count] = slots
        reserved[row] = room
