"""The position embedding of a model as data, for kernels that apply it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """What becomes of query and key heads before they attend.

    Parameters
    ----------
    table : Tensor
        ``[L, D]`` float32, contiguous: row p holds the cosines of position p's D / 2 angles, then
        their sines. Dimension i is rotated with dimension i + D / 2.
    norms : tuple of Tensor, optional
        ``[D]`` each: weights of the RMSNorm of every query head and of every key head.
    eps : float
        Added to the mean of squares by these norms.
    """

    table: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0
