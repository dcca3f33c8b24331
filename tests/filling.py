"""Values for static buffers, as the first kernels of a step write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from specattn.buffers import BufferSet


def put(buffers: BufferSet, dims: Any, **values: Tensor) -> None:
    """Write values into the first rows, and padding into the rows after them."""
    tensors = buffers.tensors()
    (first, *_) = tensors.values()
    padding = type(buffers).alloc(len(first), dims, first.device)
    for name, value in values.items():
        tensors[name].copy_(getattr(padding, name))
        tensors[name][: len(value)] = value.to(tensors[name].device)
