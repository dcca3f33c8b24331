"""Twin of `specattn.kernels.kv_store`."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOAT8_MAX = 448.0


def _as_stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Convert to ``dtype``; to float8 divided by ``scale``, cut at its largest number."""
    if dtype == torch.float8_e4m3fn:
        values = (values.float() * (1 / scale)).clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
    return values.to(dtype)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See `specattn.kernels.kv_store.store_kv`."""
    index = slots.reshape(-1).long()
    for new, scale, cache in ((k, k_scale, k_cache), (v, v_scale, v_cache)):
        # float8 has no index_copy_
        cache[index] = _as_stored(new, scale, cache.dtype)
