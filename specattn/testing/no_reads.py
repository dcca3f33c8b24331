"""Finds reads on the host, which no graph can record."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from specattn.testing.oracle import ConformanceError

if TYPE_CHECKING:
    from types import FrameType

# what waits for the device, or has a shape that depends on values
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
# rooms whose torch versions may read what their kernels do not
_ROOMS = ("specattn.kernels", "specattn.backends")


class NoReads(TorchDispatchMode):
    """Refuses reads on the host, kernels and backends aside."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` unless it reads a value."""
        name = func.overloadpacket.__name__
        if name in _READS and not _in_rooms():
            raise ConformanceError("host reads", f"{name} reads a value, which no graph can record")
        return func(*args, **(kwargs or {}))


def _in_rooms() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_ROOMS):
            return True
        frame = frame.f_back
    return False
