"""Static buffers: one declaration gives the shape, the dtype, the allocation and the padding rule.

A graph records addresses, so every tensor a captured forward reads is allocated once, for the
largest bucket, and smaller buckets are prefix views of the same storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Spec:
    """How one buffer looks: shape without the batch axis, dtype, and what padding rows hold."""

    shape: Callable[[Any], tuple[int, ...]]
    dtype: Callable[[Any], torch.dtype]
    pad: Callable[[Any], Tensor] | None


def buf(
    shape: Callable[[Any], tuple[int, ...]],
    dtype: torch.dtype | Callable[[Any], torch.dtype],
    pad: Callable[[Any], Tensor] | None = None,
) -> Any:
    """Declare a buffer of a `BufferSet`.

    Parameters
    ----------
    shape : callable
        Maps the set's dimensions to the shape of one request's row; the batch axis comes first
        and is added by `BufferSet.alloc`.
    dtype : torch.dtype or callable
        Element type, or a function of the dimensions.
    pad : callable, optional
        Maps the dimensions to one row of padding; zeros if omitted.
    """
    typed = dtype if callable(dtype) else lambda _: dtype
    return field(metadata={"spec": Spec(shape, typed, pad)})


@dataclass(frozen=True)
class BufferSet:
    """Base of frozen dataclasses whose fields are `buf` declarations, batch axis first."""

    @classmethod
    def alloc(cls, batch: int, dims: Any, device: torch.device) -> Self:
        """Allocate every buffer for ``batch`` requests, all of them padding."""
        tensors = {}
        for item in fields(cls):
            spec: Spec = item.metadata["spec"]
            row = torch.zeros(spec.shape(dims), dtype=spec.dtype(dims), device=device)
            if spec.pad is not None:
                row.copy_(spec.pad(dims))
            tensors[item.name] = row.expand(batch, *row.shape).contiguous()
        return cls(**tensors)

    def bind(self, batch: int) -> Self:
        """Return the first ``batch`` rows: views at the same addresses."""
        return type(self)(**{name: tensor[:batch] for name, tensor in self.tensors().items()})

    def reset(self, dims: Any) -> None:
        """Turn every row into padding."""
        for item in fields(self):
            _pad(getattr(self, item.name), item.metadata["spec"], dims)

    def copy_in(self, dims: Any, **values: Tensor) -> None:
        """Copy values into the first rows and put padding into all rows after them.

        Parameters
        ----------
        dims : object
            The dimensions the set was allocated with.
        **values : Tensor
            By field name, ``[count, ...]``; all of one count, on any device. Fields that are not
            named keep what they hold.

        Raises
        ------
        ValueError
            Before anything is written: if a value's shape or dtype is not the declared one.
        """
        count = min((len(value) for value in values.values()), default=0)
        for name, value in values.items():
            _check(name, value, getattr(self, name), count)
        for item in fields(self):
            if item.name not in values:
                continue
            target, value = getattr(self, item.name), values[item.name]
            target[:count].copy_(value, non_blocking=True)
            if count < len(target):
                _pad(target[count:], item.metadata["spec"], dims)

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def _check(name: str, value: Tensor, target: Tensor, count: int) -> None:
    shape = (min(count, len(target)), *target.shape[1:])
    if value.shape != shape or value.dtype != target.dtype:
        raise ValueError(
            f"{name} must be {list(shape)} {target.dtype}, got {list(value.shape)} {value.dtype}"
        )


def _pad(target: Tensor, spec: Spec, dims: Any) -> None:
    if spec.pad is None:
        target.zero_()
    else:
        target.copy_(_pad_row(spec.pad, dims, target.device))


@cache
def _pad_row(pad: Callable[[Any], Tensor], dims: Any, device: torch.device) -> Tensor:
    """Keep a padding row on the device: padding must not cost a host-to-device copy per step."""
    return pad(dims).to(device)


Fingerprint = tuple[tuple[str, object], ...]


def fingerprint(**parts: object) -> Fingerprint:
    """Describe everything a graph bakes in: for tensors address, shape, strides and dtype.

    Parameters
    ----------
    **parts : object
        Tensors, `BufferSet` s (described field by field), or hashable scalars.
    """
    found: list[tuple[str, object]] = []
    for name, part in parts.items():
        if isinstance(part, Tensor):
            found.append((name, _describe(part)))
        elif isinstance(part, BufferSet):
            found += [(f"{name}.{key}", _describe(t)) for key, t in part.tensors().items()]
        else:
            found.append((name, part))
    return tuple(found)


def _describe(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
