"""What a model keeps whose layers attend or have states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from specattn.buffers import ReadOnly
from specattn.cache.kv_pool import KVPool
from specattn.cache.state_pool import StatePool
from specattn.config import AttnConfig, StateConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from specattn.batch import AcceptResult
    from specattn.buffers import Fingerprint
    from specattn.cache.kv_pool import Caches
    from specattn.config import KVScales, LayerConfig
    from specattn.kernels.gated_delta import Nodes


class HybridPool(ReadOnly):
    """Keys and values of some layers, states and windows of the others.

    Parameters
    ----------
    layers : sequence of AttnConfig or StateConfig
        A model's, in its order: at least one of each.
    num_slots : int
        As in `KVPool`.
    device : torch.device
        Where it lives.
    rows : int
        As in `StatePool`.
    kv_dtype, scales : optional
        As in `KVPool`, of the layers that attend.

    Attributes
    ----------
    layers : tuple of AttnConfig or StateConfig
        The model's, those of ``kv`` as they store.
    places : tuple of int
        Each layer's place in ``kv`` or in ``states``.
    kv, states : KVPool, StatePool
        What both kinds keep.
    num_slots, device
        As above.

    Raises
    ------
    ValueError
        From `KVPool` and `StatePool`.
    """

    def __init__(
        self,
        layers: Sequence[LayerConfig],
        num_slots: int,
        device: torch.device | str,
        *,
        rows: int,
        kv_dtype: torch.dtype | None = None,
        scales: Sequence[KVScales] | None = None,
    ) -> None:
        attending = [layer for layer in layers if isinstance(layer, AttnConfig)]
        kv = KVPool(attending, num_slots, device, kv_dtype=kv_dtype, scales=scales)
        with_states = [layer for layer in layers if not isinstance(layer, AttnConfig)]
        self._hold(layers, kv, StatePool(with_states, rows, device))

    @classmethod
    def of(cls, layers: Sequence[LayerConfig], kv: KVPool, states: StatePool) -> Self:
        """Return a pool of two that are there, over whichever memory.

        Parameters
        ----------
        layers : sequence of AttnConfig or StateConfig
            A model's, in its order.
        kv, states : KVPool, StatePool
            What layers that attend keep, and the others, each in that order.
        """
        pool = cls.__new__(cls)
        pool._hold(layers, kv, states)
        return pool

    def _hold(self, layers: Sequence[LayerConfig], kv: KVPool, states: StatePool) -> None:
        self.kv, self.states = kv, states
        self.num_slots, self.device = self.kv.num_slots, self.kv.device
        counts = {AttnConfig: 0, StateConfig: 0}
        places = []
        for layer in layers:
            places.append(counts[type(layer)])
            counts[type(layer)] += 1
        self.places = tuple(places)
        self.layers: tuple[LayerConfig, ...] = tuple(
            self.kv.layers[place] if isinstance(layer, AttnConfig) else layer
            for layer, place in zip(layers, places, strict=True)
        )

    def tensors(self) -> dict[str, Caches]:
        """Return keys, values, states and windows by name; see `Memory.tensors`."""
        return {**self.kv.tensors(), **self.states.tensors()}

    def by_row(self) -> dict[str, Tensor]:
        """Return states and windows; see `Memory.by_row`."""
        return self.states.tensors()

    def fingerprint(self) -> Fingerprint:
        """Describe both kinds; see `Memory.fingerprint`."""
        return self.kv.fingerprint() + self.states.fingerprint()

    def nodes(self, batch: int, count: int) -> Nodes:
        """Allocate what nodes leave for the commit; see `Memory.nodes`."""
        return self.states.nodes(batch, count)

    def commit(
        self,
        tail_slots: Tensor,
        accepted: AcceptResult,
        rows: Tensor,
        nodes: Nodes | None = None,
    ) -> None:
        """Move the accepted path's KV, and fold the path into states.

        Raises
        ------
        ValueError
            Before anything changes: if ``nodes`` is missing. From `KVPool.commit` and
            `commit_nodes`.
        """
        if nodes is None:
            raise ValueError("nodes must be those of verification: states go on by them")
        self.kv.commit(tail_slots, accepted)
        self.states.commit(nodes, accepted.accept_index, rows)
