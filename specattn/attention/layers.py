"""Layers over their caches, with a backend for each of their geometries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch

from specattn.attention.bound import BoundLayers
from specattn.attention.state_layer import StateLayer
from specattn.backends import choose_backend
from specattn.backends.base import FunctionAttention, attending, idle_attention, lists_refused
from specattn.cache.hybrid_pool import HybridPool
from specattn.cache.kv_pool import KVPool
from specattn.checks import kind_of, one_of
from specattn.config import AttnConfig
from specattn.cuda_graph.recorder import is_recording
from specattn.errors import UnsupportedError
from specattn.plan import AttnInputs, AttnPlan, ExtendPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.backends.base import AttentionBackend, BackendFactory, BoundAttention
    from specattn.batch import RowLayout
    from specattn.cache.memory import Memory
    from specattn.config import KVScales, LayerConfig
    from specattn.kernels.gated_delta import Nodes
    from specattn.plan import Plan


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers of one geometry over one plan, which share attention.

    Parameters
    ----------
    backend : AttentionBackend
        That of the geometry, ``backend.config``.
    made_by : BackendFactory
        What made it.
    view : int
        Which of a forward's plans they read: 1 for layers of a window pool.
    """

    backend: AttentionBackend
    made_by: BackendFactory
    view: int = 0

    def bind(self, plan: Plan) -> BoundAttention:
        """Return attention over a plan's tensors.

        Raises
        ------
        ValueError
            In a capture, where it would allocate.
        UnsupportedError
            If the backend refuses the plan, by its pages or its tree.
        """
        if is_recording(plan.out_slots.device):
            raise ValueError(
                "a forward must meet a geometry before a capture: make the layer, then the "
                f"forward, or run it once: {self.backend.config}"
            )
        have = plan.page_size if isinstance(plan, ExtendPlan) else plan.layout.page_size
        need = self.made_by.capabilities.page_size
        if have % need:
            reason = f"page_size must be a multiple of {need}, got {have}"
            raise UnsupportedError(f"backend {self.made_by.name!r}", [reason])
        if not plan.out_slots.numel():
            return FunctionAttention(plan, idle_attention, {})
        return self.backend.bind(plan)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's geometry and caches.

    Parameters
    ----------
    group : LayerGroup
        The layers with which it shares a backend.
    pool : KVPool
        Where its keys and values are.
    index : int
        Its place in the pool.
    sinks : Tensor or None
        ``[num_qo_heads]`` floats, if they are the layer's for good.

    Attributes
    ----------
    backend : AttentionBackend
        That of its geometry, ``backend.config``.
    k_cache, v_cache : Tensor
        ``[num_slots, num_kv_heads, head_dim]``, and the same with ``v_head_dim``; of ``latent``
        layers a view of ``k_cache``.
    scales : KVScales or None
        Those of float8 caches.
    """

    group: LayerGroup
    pool: KVPool
    index: int
    sinks: Tensor | None = None
    backend: AttentionBackend = field(init=False)
    k_cache: Tensor = field(init=False, repr=False)
    v_cache: Tensor = field(init=False, repr=False)
    scales: KVScales | None = field(init=False)

    def __post_init__(self) -> None:
        pool, at = self.pool, self.index
        stored = pool.layers[at].kv_dtype is not None
        found = {"backend": self.group.backend, "k_cache": pool.k[at], "v_cache": pool.v[at]}
        vars(self).update(found, scales=pool.scales[at] if stored else None)

    def store(
        self, slots: Tensor, k: Tensor | tuple[Tensor, Tensor] | None, v: Tensor | None
    ) -> None:
        """Write keys and values; see `KVPool.store`."""
        self.pool.store(self.index, slots, k, v)


class Layers(ABC):
    """Layers on one device, with a backend for each of their geometries.

    Attributes
    ----------
    layers : tuple of Layer or StateLayer
        A model's, in its order; none of an engine, whose layers come one by one.
    groups : dict
        The groups so far, by geometry and view.
    """

    layers: tuple[Layer | StateLayer, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.groups: dict[tuple[AttnConfig, int], LayerGroup] = {}

    @abstractmethod
    def made_by(self, config: AttnConfig) -> BackendFactory:
        """Choose what makes the backend of a geometry."""

    def group(self, config: AttnConfig, view: int = 0) -> LayerGroup:
        """Return the group of a geometry; its views share a backend."""
        if (config, view) not in self.groups:
            alike = [group for (other, _), group in self.groups.items() if other == config]
            if alike:
                self.groups[config, view] = replace(alike[0], view=view)
            else:
                made_by = self.made_by(config)
                self.groups[config, view] = LayerGroup(made_by(config, self.device), made_by, view)
        return self.groups[config, view]

    def check_indices(self, indices: str) -> None:
        """Refuse an unknown word, and lists if a backend serves none."""
        one_of("indices", indices, "table", "csr")
        for group in self.groups.values():
            if indices == "csr" and not group.made_by.capabilities.lists:
                raise lists_refused(group.made_by.name)

    def bind(
        self,
        *plans: Plan,
        slots: Tensor | None = None,
        views: Sequence[int] | None = None,
        nodes: Nodes | None = None,
    ) -> BoundLayers:
        """Bind the layers to a forward.

        Parameters
        ----------
        *plans : Plan
            One, or one per view: plans of the same query tokens and slots.
        slots : Tensor, optional
            ``[B, q_len]`` int32, where new keys and values go, if not to ``out_slots``. Those below
            0 are skipped.
        views : sequence of int, optional
            Which of the plans each layer reads, if not the first.
        nodes : Nodes, optional
            Where layers with states leave what the commit of a verification reads.

        Raises
        ------
        ValueError
            If a tensor of a plan has another shape, dtype, device or stride.
        UnsupportedError
            If a backend refuses a plan, by its pages or its tree.
        """
        layers = self.layers
        if views is not None:
            layers = tuple(map(self._viewing, layers, views))
        attending = (layer for layer in layers if isinstance(layer, Layer))
        groups = dict.fromkeys(layer.group for layer in attending) or self.groups.values()
        stored = tuple(plan.out_slots for plan in plans) if slots is None else (slots,)
        return BoundLayers(groups, layers, plans, stored, filled=slots is None, nodes=nodes)

    def _viewing(self, layer: Layer | StateLayer, view: int) -> Layer | StateLayer:
        if isinstance(layer, StateLayer):
            return layer
        return replace(layer, group=self.group(layer.backend.config, view))


class LayeredBackend(Layers):
    """A model's layers over one pool.

    Parameters
    ----------
    backend : str or BackendFactory
        What `choose_backend` takes: a name, or a backend or composite itself.
    layers : sequence of AttnConfig or StateConfig
        One per layer; layers that attend may differ in window, cap and scale.
    pool : KVPool or HybridPool
        What the layers keep.
    device : torch.device
        Where the pool lives.

    Raises
    ------
    UnsupportedError
        If the backend cannot serve one of the layers.
    ValueError
        If the layers and the pool differ in ``kv_dtype``.
    """

    def __init__(
        self,
        backend: str | BackendFactory,
        layers: Sequence[LayerConfig],
        pool: KVPool | HybridPool,
        device: torch.device,
    ) -> None:
        super().__init__(device)
        self.kv = pool.kv if isinstance(pool, HybridPool) else pool
        attending = [config for config in layers if isinstance(config, AttnConfig)]
        if {c.kv_dtype for c in attending} != {c.kv_dtype for c in self.kv.layers}:
            stored = f"the pool's kv_dtype ({self.kv.k[0].dtype})"
            raise ValueError(f"layers must have {stored}: pass its own (pool.layers)")
        chosen = choose_backend(backend, list(dict.fromkeys(attending)), device)
        self.name, self.host_plan = chosen.name, chosen.capabilities.host_plan
        self.pool, self._chosen, self._configs = pool, chosen, tuple(layers)
        places = pool.places if isinstance(pool, HybridPool) else range(len(layers))
        self.layers = tuple(map(self._layer, layers, places))

    def _layer(self, config: LayerConfig, place: int) -> Layer | StateLayer:
        """Give a layer its part of the pool."""
        if isinstance(config, AttnConfig):
            return Layer(self.group(config), self.kv, place)
        assert isinstance(self.pool, HybridPool)
        return StateLayer(config, self.pool.states, place)

    @property
    def attends(self) -> tuple[Layer, ...]:
        """The layers that attend."""
        return tuple(layer for layer in self.layers if isinstance(layer, Layer))

    @classmethod
    def of(
        cls,
        backend: str | BackendFactory,
        layers: Sequence[LayerConfig],
        pool: Memory,
        *,
        deterministic: bool = False,
    ) -> Self:
        """Choose the backend of a model's layers, as its pool has them.

        Parameters
        ----------
        backend : str or BackendFactory
            As above.
        layers : sequence of AttnConfig or StateConfig
            The model's.
        pool : Memory
            A `KVPool` or a `HybridPool`; it says what layers store, and where.
        deterministic : bool
            Ask for deterministic attention in every layer, whatever the layers say.

        Raises
        ------
        UnsupportedError
            If the backend cannot serve one of the layers, or deterministic ones have states.
        ValueError
            If ``pool`` is neither, or its layers are another model's.
        """
        if not isinstance(pool, KVPool | HybridPool):
            raise ValueError(f"pool must be a KVPool or a HybridPool, got {kind_of(pool)}")
        _check_layers(layers, pool.layers)
        if not deterministic:
            return cls(backend, pool.layers, pool, pool.device)
        if isinstance(pool, HybridPool):
            reason = "trees over their states are solved as a whole, in another order of sums"
            raise UnsupportedError("deterministic layers with states", [reason])
        made = [replace(layer, deterministic=True) for layer in pool.layers]
        return cls(backend, made, pool, pool.device)

    def made_by(self, config: AttnConfig) -> BackendFactory:
        """Return what serves all layers."""
        return self._chosen

    def attending(self, layout: RowLayout, batch: int, *, prompts: bool = False) -> str:
        """Name the backends that attend in a forward.

        Parameters
        ----------
        layout : RowLayout
            Of the forward; of prompts only its ``page_size`` counts.
        batch : int
            Requests.
        prompts : bool
            Whether the forward is one of prompts.
        """
        meta = torch.device("meta")
        inputs = AttnInputs.alloc(batch, replace(layout, tail=layout.q_len), meta)
        plan: Plan = AttnPlan.over(replace(layout, tail=layout.q_len), inputs.tail_slots, inputs)
        if prompts:
            rows, lens, slots = inputs.req_pool_indices, inputs.seq_lens, inputs.tail_slots
            plan = ExtendPlan(slots, rows, lens, lens, slots, 1, 1, layout.page_size)
        served = [attending(layer.backend, plan) for layer in self.attends]
        # a backend that a user made need not have a name
        names = [getattr(backend, "name", type(backend).__name__) for backend in served]
        return ", ".join(dict.fromkeys(names))

    def with_own_workspace(self) -> LayeredBackend:
        """Return the same layers with own workspaces, to run beside it."""
        return LayeredBackend(self._chosen, self._configs, self.pool, self.device)

    def bind_prompts(self, plan: ExtendPlan, prefix_lens: Sequence[int]) -> BoundLayers:
        """Return attention over prompts with these cached prefixes, ready to run."""
        bound = self.bind(plan)
        bound.schedule(torch.tensor(prefix_lens, dtype=torch.int32))
        bound.fill()
        return bound


def _check_layers(own: Sequence[LayerConfig], pools: Sequence[LayerConfig]) -> None:
    """Refuse a pool of another model; what it stores may differ."""
    if len(own) != len(pools):
        raise ValueError(f"pool must have the model's {len(own)} layers, got {len(pools)}")
    for at, (layer, found) in enumerate(zip(own, pools, strict=True)):
        wanted = layer
        if isinstance(layer, AttnConfig) and isinstance(found, AttnConfig):
            wanted = replace(layer, kv_dtype=found.kv_dtype, deterministic=found.deterministic)
        if found != wanted:
            raise ValueError(f"pool.layers[{at}] must be the model's, {wanted}, got {found}")
