"""Layers with a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specattn.cache.state_pool import StatePool
    from specattn.config import StateConfig


@dataclass(frozen=True, eq=False)
class StateLayer:
    """A layer with a recurrent state, which mixes tokens along their text.

    Parameters
    ----------
    config : StateConfig
        Its geometry.
    pool : StatePool
        Where its states are.
    index : int
        Its place in the pool.
    """

    config: StateConfig
    pool: StatePool
    index: int
