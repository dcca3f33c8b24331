"""Finds reads on the host, which no graph can record."""

from __future__ import annotations

import sys
from traceback import walk_stack
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from specattn.testing.oracle import require

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
        name, frames = func.overloadpacket.__name__, walk_stack(sys._getframe())
        modules = (frame.f_globals.get("__name__", "") for frame, _ in frames)
        inside = name not in _READS or any(module.startswith(_ROOMS) for module in modules)
        require(inside, f"{name} reads a value, which no graph can record", "host reads")
        return func(*args, **(kwargs or {}))
