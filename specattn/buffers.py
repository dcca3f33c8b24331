"""Static buffers, declared with their shape, dtype and padding.

A graph records addresses. Every tensor that a captured forward reads is therefore allocated once,
for the largest bucket, and smaller buckets are views of its first rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from specattn.checks import expect, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt


def buf(
    shape: Callable[[Any], tuple[int, ...]],
    dtype: torch.dtype | Callable[[Any], torch.dtype],
    pad: Callable[[Any], Tensor] | None = None,
) -> Any:
    """Declare a buffer as a field of a `BufferSet`.

    Parameters
    ----------
    shape : callable
        Maps the set's dimensions to the shape of one request's row. `BufferSet.alloc` puts the
        batch axis before it.
    dtype : torch.dtype or callable
        Element type, or a function of the dimensions.
    pad : callable, optional
        Maps the dimensions to one row of padding; zeros if omitted.
    """
    typed = dtype if callable(dtype) else lambda _: dtype
    return field(metadata={"shape": shape, "dtype": typed, "pad": pad})


@dataclass(frozen=True)
class BufferSet:
    """Base of frozen dataclasses with fields declared by `buf`; others have defaults."""

    @classmethod
    def alloc(cls, batch: int, dims: Any, device: torch.device) -> Self:
        """Allocate every buffer for ``batch`` rows of padding.

        Parameters
        ----------
        batch : int
            Rows: those of the largest bucket.
        dims : object
            The set's dimensions, as the functions given to `buf` take them.
        device : torch.device
            Where the buffers live.
        """
        made = {}
        for item in fields(cls):
            if spec := item.metadata:
                row = torch.zeros(spec["shape"](dims), dtype=spec["dtype"](dims), device=device)
                if spec["pad"] is not None:
                    row.copy_(spec["pad"](dims))
                made[item.name] = row.expand(batch, *row.shape).contiguous()
        return cls(**made)

    def bind(self, batch: int) -> Self:
        """Return views of the first ``batch`` rows.

        Raises
        ------
        ValueError
            If the set has fewer rows, or ``batch`` is negative or no whole number.
        """
        size = len(next(iter(self.tensors().values())))
        batch = whole_number("batch", batch, 0, size)
        return type(self)(**{name: tensor[:batch] for name, tensor in self.tensors().items()})

    def sharing(self, others: dict[str, Tensor]) -> Self:
        """Return the set with tensors of ``others`` in place of its own.

        Tensors are matched by field name; ``others`` may hold more.

        Raises
        ------
        ValueError
            If one is not of its field's shape, dtype and device.
        """
        taken = {name: others[name] for name in self.tensors().keys() & others.keys()}
        for name, value in taken.items():
            own = getattr(self, name)
            expect(name, value, tuple(own.shape), own.dtype, own.device)
        return type(self)(**self.tensors() | taken)

    def tensors(self) -> dict[str, Tensor]:
        """Return the declared buffers by name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.metadata}


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, without waiting.

    A copy from pageable memory would wait for what the device is doing.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def send_parts(
    parts: Sequence[Sequence[int] | npt.NDArray[np.int64]], device: torch.device
) -> list[Tensor]:
    """Copy lists of numbers to a device at once, without waiting.

    Parameters
    ----------
    parts : sequence of sequence of int
        Any number of lists, of any length.
    device : torch.device
        Where they go.

    Returns
    -------
    list of Tensor
        ``[len(part)]`` int64 each, views of one memory. Each is aligned to 16 bytes: kernels are
        compiled for how a tensor is aligned.
    """
    arrays = [np.asarray(part, dtype=np.int64) for part in parts]
    begins = np.cumsum([0, *(-(-len(one) // 2) * 2 for one in arrays)])
    host = np.zeros(begins[-1], dtype=np.int64)
    for begin, one in zip(begins, arrays, strict=False):
        host[begin : begin + len(one)] = one
    sent = send(torch.from_numpy(host), device)
    return [sent[begin:][: len(one)] for begin, one in zip(begins, arrays, strict=False)]


class ReadOnly:
    """Base of what graphs bake in: only constructors set public attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        if name[0] != "_" and name in vars(self):
            raise AttributeError(f"{type(self).__name__}.{name} is read-only: graphs bake it in")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only: graphs bake it in")


Fingerprint = tuple[tuple[str, object], ...]


def fingerprint(**parts: object) -> Fingerprint:
    """Describe what a graph bakes in, in parts with names.

    Of a tensor that is its address, shape, strides and dtype.

    Parameters
    ----------
    **parts : object
        Tensors, a `BufferSet` (described field by field), tuples of tensors (one by one), or values
        to compare.

    Returns
    -------
    tuple
        Pairs of a name and what it describes, to compare by ``==``.
    """
    found: list[tuple[str, object]] = []
    for name, part in parts.items():
        if isinstance(part, BufferSet):
            found += [(f"{name}.{key}", _describe(each)) for key, each in part.tensors().items()]
        elif isinstance(part, tuple) and any(isinstance(each, Tensor) for each in part):
            found += [(f"{name}[{at}]", _describe(each)) for at, each in enumerate(part)]
        else:
            found.append((name, _describe(part)))
    return tuple(found)


def _describe(part: object) -> object:
    if isinstance(part, Tensor):
        return part.data_ptr(), part.size(), part.stride(), part.dtype
    return part
