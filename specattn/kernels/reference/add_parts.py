"""Twin of `specattn.kernels.add_parts`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """See `specattn.kernels.add_parts.add_parts`."""
    return parts.float().sum(0).to(dtype)
