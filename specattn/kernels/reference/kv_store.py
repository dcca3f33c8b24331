"""Twin of `specattn.kernels.kv_store`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write ``k [T, Hkv, D]`` and ``v [T, Hkv, Dv]`` to the ``[B, q]`` int32 slots (B q = T)."""
    index = slots.reshape(-1).long()
    k_cache.index_copy_(0, index, k.to(k_cache.dtype))
    v_cache.index_copy_(0, index, v.to(v_cache.dtype))
