"""Bitmasks of grammars, as xgrammar packs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def leave(row: Tensor, allowed: Iterable[int]) -> None:
    """Leave these tokens alone to a node."""
    bits = np.zeros(32 * len(row), dtype=np.uint8)
    bits[list(allowed)] = 1
    row.copy_(torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32)))
