"""A model's layers over one plan: what models call, layer by layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specattn.backends import choose_backend
from specattn.backends.base import CompositeAttention, IdleAttention, lists_refused, recordable
from specattn.buffers import Fingerprint, fingerprint
from specattn.checks import expect, one_of
from specattn.errors import UnsupportedError
from specattn.kernels.attention import check_sinks
from specattn.plan import check_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.backends.base import (
        AttentionBackend,
        BackendFactory,
        BoundAttention,
    )
    from specattn.cache.kv_pool import KVPool
    from specattn.config import AttnConfig
    from specattn.kernels.fused import Rotation
    from specattn.plan import ExtendPlan, Plan


class LayeredBackend:
    """One backend per distinct layer configuration of a model, over one pool.

    Parameters
    ----------
    backend : str or BackendFactory
        What `choose_backend` takes: a name, or a backend or composite itself.
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
    ValueError
        If the layers and the pool differ in ``kv_dtype``.
    """

    def __init__(
        self,
        backend: str | BackendFactory,
        layers: Sequence[AttnConfig],
        pool: KVPool,
        device: torch.device,
    ) -> None:
        if {c.kv_dtype for c in layers} != {c.kv_dtype for c in pool.layers}:
            stored = f"the pool's kv_dtype ({pool.k[0].dtype})"
            raise ValueError(f"layers must have {stored}: pass its own (pool.layers)")
        distinct = list(dict.fromkeys(layers))
        chosen = choose_backend(backend, distinct, device)
        self.name = chosen.name
        self.host_plan = chosen.capabilities.host_plan
        self._page_size = chosen.capabilities.page_size
        self._lists = chosen.capabilities.lists
        self.pool = pool
        self._made_of = chosen, tuple(layers)
        self.backends = tuple(chosen(config, device) for config in distinct)
        self._kind = tuple(distinct.index(config) for config in layers)

    def with_own_workspace(self) -> LayeredBackend:
        """Return the same layers with own workspaces, to run beside it."""
        backend, layers = self._made_of
        return LayeredBackend(backend, layers, self.pool, self.pool.device)

    def check_pages(self, page_size: int) -> None:
        """Raise an UnsupportedError for pages that the backend does not read."""
        if page_size % self._page_size:
            raise UnsupportedError(
                f"backend {self.name!r}",
                [f"page_size must be a multiple of {self._page_size}, got {page_size}"],
            )

    def check_indices(self, indices: str) -> None:
        """Refuse an unknown word, and lists if the backend serves none."""
        one_of("indices", indices, "table", "csr")
        if indices == "csr" and not self._lists:
            raise lists_refused(self.name)

    def bind(self, plan: Plan) -> BoundLayers:
        """Check ``plan`` and bind every distinct configuration to it."""
        check_plan(plan, self.pool.device)
        bounds: list[BoundAttention] = [
            IdleAttention() if plan.idle else backend.bind(plan) for backend in self.backends
        ]
        layers = tuple(
            (self._of_layer(bounds[kind], layer), self.backends[kind].config)
            for layer, kind in enumerate(self._kind)
        )
        graphs = all(recordable(backend, plan) for backend in self.backends)
        return BoundLayers(self.backends, tuple(bounds), layers, self.pool, plan, graphs)

    def bind_prompts(self, plan: ExtendPlan, prefix_lens: Sequence[int]) -> BoundLayers:
        """Return attention over prompts with these cached prefixes, ready to run."""
        bound = self.bind(plan)
        bound.schedule(torch.tensor(prefix_lens, dtype=torch.int32))
        bound.fill()
        return bound

    def _of_layer(self, bound: BoundAttention, layer: int) -> BoundAttention:
        """Return ``bound`` as one layer runs it: its scales, its prefetch."""
        stored = self.pool.layers[layer].kv_dtype is not None
        return bound.for_layer(
            self.pool.scales[layer] if stored else None,
            prefetch=self._kind[layer] in self._kind[:layer],
        )


class PackedAttend(ABC):
    """An `Attend` that also takes heads as one matrix product leaves them."""

    @property
    @abstractmethod
    def slots(self) -> Tensor:
        """``[B, q]`` int32: where the forward's keys and values go."""

    @abstractmethod
    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend as `specattn.speculative.model.Attend` does."""

    @abstractmethod
    def packed(self, layer: int, parts: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
        """Norm and rotate heads, store keys and values, then attend.

        Parameters
        ----------
        layer : int
            Index into the model's ``layers``.
        parts : Tensor
            ``[S, T, (Hq + 2 Hkv) D]``, of any dtype: they add up to queries, keys and values.
        positions : Tensor
            ``[T]`` int64.
        rotation : Rotation
            The position embedding, and the bias and norms before it.

        Returns
        -------
        Tensor
            ``[T, Hq, D]``.
        """


@dataclass(frozen=True)
class BoundLayers(CompositeAttention, PackedAttend):
    """The `Attend` of a model: it stores new KV, then attends.

    ``graphs`` says whether all that is bound here may be recorded in a CUDA graph.
    """

    backends: tuple[AttentionBackend, ...]
    bounds: tuple[BoundAttention, ...]
    layers: tuple[tuple[BoundAttention, AttnConfig], ...]
    pool: KVPool
    plan: Plan
    graphs: bool

    def fingerprint(self) -> Fingerprint:
        """Describe the pool and the configs, which a graph bakes in."""
        # by value: what a graph has baked in stays as it was, whatever becomes of the config
        configs = {
            f"AttnConfig[{at}]": dict(vars(backend.config))
            for at, backend in enumerate(self.backends)
        }
        pool = self.pool
        return fingerprint(k_cache=pool.k, v_cache=pool.v, kv_scales=pool.scales, **configs)

    def parts(self) -> tuple[BoundAttention, ...]:
        """Return every bound configuration."""
        return self.bounds

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Schedule every bound configuration."""
        for bound in self.bounds:
            bound.schedule(seq_lens_cpu)

    @property
    def slots(self) -> Tensor:
        """``[B, q]`` int32: where the forward's keys and values go."""
        return self.plan.out_slots

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend in ``layer``.

        The shapes are q ``[T, Hq, D]``, k ``[T, Hkv, D]`` and v ``[T, Hkv, Dv]``, and ``[Hq]`` of
        sinks, which a layer has or has not. Layers come in their order, on one stream. Without k
        and v nothing is stored: `slots` of the pool hold them already.

        Raises
        ------
        ValueError
            Before anything is written: if one of them is of another shape, dtype or device, k or v
            is missing, or sinks are missing or too many.
        """
        bound, config = self._layer(layer, sinks)
        rows, device = self.plan.out_slots.numel(), self.pool.device
        expect("q", q, (rows, config.num_qo_heads, config.head_dim), config.dtype, device)
        if k is not None and v is not None:
            self.pool.store(layer, self.slots, k, v)
        elif k is not v:
            raise ValueError("k and v must be given both, or neither")
        out = q.new_empty(q.shape[0], q.shape[1], config.v_head_dim)
        bound.run(q, self.pool.k[layer], self.pool.v[layer], out)
        return out

    def _layer(self, layer: int, sinks: Tensor | None) -> tuple[BoundAttention, AttnConfig]:
        """Return a layer's attention with the sinks it must have, if any."""
        bound, config = self.layers[layer]
        if config.sinks != (sinks is not None):
            wanted = f"[{config.num_qo_heads}] floats" if config.sinks else "None"
            got = None if sinks is None else list(sinks.shape)
            raise ValueError(f"sinks must be {wanted} in layer {layer}, got {got}")
        if sinks is None:
            return bound, config
        check_sinks(sinks, config.num_qo_heads, self.pool.device)
        return bound.with_sinks(sinks), config

    def packed(self, layer: int, parts: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
        """Attend in ``layer`` with heads that are not rotated yet; see `PackedAttend.packed`."""
        attention, config = self._layer(layer, None)
        q = self.pool.store_packed(
            layer,
            self.slots,
            parts,
            positions,
            rotation,
            config.num_qo_heads,
            prefetch=layer > 0 and all(bound.prefetches for bound in self.bounds),
        )
        out = torch.empty_like(q)
        attention.run(q, self.pool.k[layer], self.pool.v[layer], out)
        return out
