"""Checks of arguments.

Each raises a ValueError that reads ``name must be <expected>, got <value>``.
"""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import TYPE_CHECKING, SupportsIndex, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

T = TypeVar("T")

_INTS = frozenset([int])


def whole_number(
    name: str, value: SupportsIndex, low: int | None = None, high: int | None = None
) -> int:
    """Return a whole number, of Python, NumPy or torch, within limits.

    Fractions, bools and strings are none; ``high`` needs ``low``.
    """
    whole = value if type(value) is int else _index(name, value)
    if (low is not None and whole < low) or (high is not None and whole > high):
        wanted = f"at least {low}" if high is None else f"{low}..{high}"
        raise ValueError(f"{name} must be {wanted}, got {whole}")
    return whole


def whole_numbers(name: str, values: Collection[SupportsIndex]) -> None:
    """Check that all values are whole numbers; ``name`` stands for one."""
    try:
        # most are ints, and a step looks at its rows each time
        ints = _INTS.issuperset(map(type, values))
    except TypeError as problem:
        raise ValueError(
            f"{name} must be a whole number of a sequence, got {values!r}"
        ) from problem
    if not ints:
        for value in values:
            whole_number(name, value)


def _index(name: str, value: SupportsIndex) -> int:
    # Python and torch would count True as 1
    is_bool = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)
    try:
        if not is_bool:
            return index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} must be a whole number, got {value!r}")


def listed(name: str, values: Iterable[T], of: str) -> list[T]:
    """Return a sequence as a list; one thing by itself is none."""
    try:
        found = iter(values)
    except TypeError as problem:
        raise ValueError(f"{name} must be a sequence of {of}, got {values!r}") from problem
    return list(found)


def instance(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Check a value's type; ``wanted`` says what it must be."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {wanted}, got {kind_of(value)}")


def kind_of(value: object) -> str:
    """Describe a value in a message, without what it holds."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def function(name: str, value: object) -> None:
    """Check that a value can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be callable, got {kind_of(value)}")


def number(name: str, value: object) -> float:
    """Return a number as a float; bools and strings are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def flag(name: str, value: bool) -> bool:
    """Return a bool; numbers and strings are none."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def one_of(name: str, value: str, *words: str) -> None:
    """Check that a word is one of those allowed."""
    if value not in words:
        raise ValueError(f"{name} must be {' or '.join(map(repr, words))}, got {value!r}")


def expect(
    name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Check a tensor's shape, dtype and device; reads no element."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be {list(shape)} {dtype} on {device}, got {value!r}")
    if value.shape != shape or value.dtype != dtype or value.device != device:
        raise ValueError(
            f"{name} must be {list(shape)} {dtype} on {device}, "
            f"got {list(value.shape)} {value.dtype} on {value.device}"
        )


def as_heads(
    name: str,
    value: Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Check and return ``[T, heads, size]``; heads may lie side by side."""
    if isinstance(value, Tensor) and value.dim() == 2:
        count, heads, size = shape
        expect(name, value, (count, heads * size), dtype, device)
        return value.view(shape)
    expect(name, value, shape, dtype, device)
    return value


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
