"""Twin of `specattn.kernels.land`, and the shape checks of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def check_ring(packed: Tensor, ring: Tensor) -> None:
    """Raise ValueError unless the ring holds such tokens."""
    rows, width = packed.shape
    dense = ring.stride()[1:] == (width, 1)
    if ring.shape[2] != width or ring.shape[1] < rows or not dense:
        raise ValueError(
            f"ring must be [S, at least {rows}, {width}], dense but for its first axis, "
            f"got {list(ring.shape)} with strides {ring.stride()}"
        )


def write_output(packed: Tensor, ring: Tensor, turn: Tensor) -> None:
    """See `specattn.kernels.land.write_output`."""
    check_ring(packed, ring)
    at = int(turn)
    ring[at, : len(packed)] = packed
    turn.fill_((at + 1) % len(ring))
