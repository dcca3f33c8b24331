"""A model's layers over one plan: what models call, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specattn.backends import BoundAttention, choose_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from specattn.config import AttnConfig
    from specattn.kv import KVPool
    from specattn.plan import Plan


class LayeredBackend:
    """One backend per distinct layer configuration of a model, all writing to one pool.

    Parameters
    ----------
    name : str
        Backend name, or ``"auto"``.
    layers : sequence of AttnConfig
        One per layer; layers may differ in window, cap and scale.
    pool : KVPool
        Where the layers keep their KV.
    device : torch.device
        Where the pool lives.

    Raises
    ------
    UnsupportedError
        If the backend cannot serve one of the layers.
    """

    def __init__(
        self, name: str, layers: Sequence[AttnConfig], pool: KVPool, device: torch.device
    ) -> None:
        distinct = list(dict.fromkeys(layers))
        chosen = choose_backend(name, distinct, device)
        self.name = chosen.name
        self.graphs = chosen.capabilities.graphs
        self.pool = pool
        self.backends = tuple(chosen(config, device) for config in distinct)
        self._kind = tuple(distinct.index(config) for config in layers)

    def bind(self, plan: Plan) -> BoundLayers:
        """Bind every distinct configuration to ``plan``; an idle plan needs no kernel."""
        bounds: list[BoundAttention] = [
            IdleAttention() if plan.idle else backend.bind(plan) for backend in self.backends
        ]
        widths = [backend.config.v_head_dim for backend in self.backends]
        layers = tuple((bounds[kind], widths[kind]) for kind in self._kind)
        return BoundLayers(tuple(bounds), layers, self.pool, plan, self.graphs)


class IdleAttention:
    """Attention over no request: every tensor is empty, so there is nothing to do."""

    def fill(self) -> None:
        """Do nothing."""

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Do nothing."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Do nothing: ``out`` has no rows."""


@dataclass(frozen=True)
class BoundLayers:
    """The `Attend` a model is given: stores a layer's new KV, then attends."""

    bounds: tuple[BoundAttention, ...]
    layers: tuple[tuple[BoundAttention, int], ...]
    pool: KVPool
    plan: Plan
    graphs: bool

    def fill(self) -> None:
        """Fill every bound configuration."""
        for bound in self.bounds:
            bound.fill()

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule every bound configuration."""
        for bound in self.bounds:
            bound.schedule(seq_lens_cpu)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in ``layer``: q ``[T, Hq, D]``, k ``[T, Hkv, D]``, v ``[T, Hkv, Dv]``."""
        bound, width = self.layers[layer]
        self.pool.store(layer, self.plan.out_slots, k, v)
        out = q.new_empty(q.shape[0], q.shape[1], width)
        bound.run(q, self.pool.k[layer], self.pool.v[layer], out)
        return out
