"""Twins of `specattn.kernels.stream_linear`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import linear, silu

if TYPE_CHECKING:
    from torch import Tensor


def stream_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `specattn.kernels.stream_linear.stream_linear`; one part."""
    return linear(x, weight)[None]


def stream_gated(x: Tensor, weight: Tensor) -> Tensor:
    """See `specattn.kernels.stream_linear.stream_gated`."""
    gate, up = linear(x.float(), weight.float()).chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)
