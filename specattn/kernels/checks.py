"""Checks that operations share."""

from __future__ import annotations

import torch
from torch import Tensor


def require_shape(
    shape: tuple[int, ...], dtype: torch.dtype | None = None, /, **tensors: Tensor | None
) -> None:
    """Raise ValueError, naming the tensor, unless all have a shape and dtype."""
    for name, tensor in tensors.items():
        if tensor is None or (tensor.shape == shape and (dtype or tensor.dtype) == tensor.dtype):
            continue
        kinds = ("", "") if dtype is None else (f" {dtype}", f" {tensor.dtype}")
        raise ValueError(
            f"{name} must be {list(shape)}{kinds[0]}, got {list(tensor.shape)}{kinds[1]}"
        )


def require_integers(shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Raise ValueError, naming the tensor, unless all are such integers."""
    for name, tensor in tensors.items():
        if tensor is not None and (
            tensor.shape != shape or tensor.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"{name} must be {list(shape)} int32 or int64, "
                f"got {list(tensor.shape)} {tensor.dtype}"
            )


def require_dense(strided: int = 0, /, **tensors: Tensor | None) -> None:
    """Raise ValueError, naming the tensor, unless kernels may index all as contiguous.

    The first ``strided`` axes may have any strides.
    """
    for name, tensor in tensors.items():
        if tensor is None or tensor.is_contiguous():
            continue
        if not strided or not tensor[(slice(1),) * strided].is_contiguous():
            raise ValueError(
                f"{name} must be contiguous{' but for its first axes' if strided else ''}, "
                f"got shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            )


def require_rows(**tensors: Tensor | None) -> None:
    """Raise ValueError, naming the tensor, unless each row's entries are adjacent."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be dense in its last axis, got {tensor.stride()}")


def as_columns(tensor: Tensor) -> Tensor:
    """Return a per-request number as a column; other tensors as they are."""
    return tensor[:, None] if tensor.dim() == 1 else tensor
