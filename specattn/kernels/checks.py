"""Checks that operations share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def require_dense(**tensors: Tensor | None) -> None:
    """Raise ValueError, naming the tensor, unless all are contiguous.

    Kernels index these tensors as contiguous ones.
    """
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, got shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}"
            )


def require_rows(**tensors: Tensor | None) -> None:
    """Raise ValueError, naming the tensor, unless each row is dense.

    The entries of a dense row lie side by side.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be dense in its last axis, got {tensor.stride()}")


def as_columns(tensor: Tensor) -> Tensor:
    """Return a per-request number as a column of width 1.

    Anything else is returned as it is.
    """
    return tensor[:, None] if tensor.dim() == 1 else tensor
