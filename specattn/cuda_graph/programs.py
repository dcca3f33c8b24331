"""What `GraphRunner` runs: programs over static buffers, bound to a bucket."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from specattn.buffers import Fingerprint


class GraphKey(Hashable, Protocol):
    """What graphs are kept under: a `ForwardMode`, or a part of a step."""

    @property
    def value(self) -> str:
        """Its name in messages."""


Key = TypeVar("Key", bound=GraphKey)


class BoundProgram(Protocol):
    """A program over one bucket: views of the program's buffers, and what runs on them."""

    @property
    def graphs(self) -> bool:
        """Whether ``run`` may be recorded in a CUDA graph."""
        ...

    @property
    def takes(self) -> frozenset[str]:
        """The names of the values `copy_in` needs, no more and no less."""
        ...

    def copy_in(self, count: int, **values: Tensor) -> None:
        """Copy ``count`` requests' values into the static buffers and pad the rest.

        Without values, every buffer becomes padding.
        """

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan on the host, where a library needs it."""

    def fill(self) -> None:
        """Derive everything else on the device: no sync, no argument, capturable."""

    def run(self) -> Any:
        """Run the forward; returns a frozen dataclass of tensors, batch axis first."""

    def fingerprint(self) -> Fingerprint:
        """Describe every tensor and scalar a recording of ``run`` bakes in."""

    def watched(self) -> Iterable[object]:
        """Return what a `Watch` takes: the objects whose attributes `fingerprint` reads.

        Tensors that others can reach, and so resize, come themselves, too, unless they are
        attributes of an object that is no frozen dataclass.
        """


class Program(Protocol):
    """A forward of one mode with its static buffers, sized for the largest bucket."""

    def bind(self, bucket: int) -> BoundProgram:
        """Return the program over the first ``bucket`` rows of its buffers."""
