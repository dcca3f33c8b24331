"""An engine's layers, and the groups that share a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from specattn.backends.base import IdleAttention
from specattn.checks import expect
from specattn.config import KVScales
from specattn.cuda_graph.recorder import is_recording
from specattn.errors import UnsupportedError
from specattn.kernels.cache import store_kv
from specattn.plan import ExtendPlan

if TYPE_CHECKING:
    import torch

    from specattn.backends.base import AttentionBackend, BackendFactory, BoundAttention
    from specattn.plan import AttnPlan


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers of one geometry over one pool: they share a backend.

    Parameters
    ----------
    backend : AttentionBackend
        That of the geometry, ``backend.config``.
    made_by : BackendFactory
        What made it.
    windowed : bool
        Whether the pool is the window pool.
    """

    backend: AttentionBackend
    made_by: BackendFactory
    windowed: bool

    def bind(self, plan: AttnPlan | ExtendPlan) -> BoundAttention:
        """Return attention over a plan's tensors.

        Raises
        ------
        ValueError
            In a capture, where it would allocate.
        UnsupportedError
            If the backend refuses the plan, by its pages or its tree.
        """
        if is_recording(plan.req_to_token.device):
            raise ValueError(
                "a forward must meet a geometry before a capture: make the layer, then the "
                f"forward, or run it once: {self.backend.config}"
            )
        have = plan.page_size if isinstance(plan, ExtendPlan) else plan.layout.page_size
        need = self.made_by.capabilities.page_size
        if have % need:
            reason = f"page_size must be a multiple of {need}, got {have}"
            raise UnsupportedError(f"backend {self.made_by.name!r}", [reason])
        return IdleAttention() if plan.idle else self.backend.bind(plan)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's geometry and caches; `Attention.layer` makes it.

    Parameters
    ----------
    group : LayerGroup
        The layers with which it shares a backend.
    k_cache, v_cache : Tensor
        ``[num_slots, num_kv_heads, head_dim]`` and the same with ``v_head_dim``; of ``latent``
        layers ``v_cache`` is a view of ``k_cache``.
    scales : KVScales or None
        Of float8 caches.
    sinks : Tensor or None
        ``[num_qo_heads]`` floats, if the layer has sinks.
    """

    group: LayerGroup
    k_cache: Tensor
    v_cache: Tensor
    scales: KVScales | None
    sinks: Tensor | None

    @property
    def backend(self) -> AttentionBackend:
        """That of its geometry, ``backend.config``."""
        return self.group.backend

    def store(self, slots: Tensor, k: Tensor | tuple[Tensor, Tensor], v: Tensor | None) -> None:
        """Write keys and values, as `Forward.attend` takes them.

        Parameters
        ----------
        slots : Tensor
            ``[B, q]`` int32 or int64; those below 0 are skipped.
        k : Tensor or tuple of Tensor
            ``[T, Hkv, D]``, T being ``B * q``; of latent layers also the latent and the rotated
            part, ``[T, 1, Dv]`` and ``[T, 1, D - Dv]``.
        v : Tensor or None
            ``[T, Hkv, Dv]``; None if ``latent``.

        Raises
        ------
        ValueError
            Before anything is written: if ``v`` is missing, or a tensor has another shape or dtype.
        """
        config, k_cache, count = self.backend.config, self.k_cache, slots.numel()
        if config.latent:
            size = config.v_head_dim
            if isinstance(k, Tensor):
                k = as_heads("k", k, count, 1, config.head_dim, config.dtype)
                k = k[..., :size], k[..., size:]
            # with its values a latent key has every number once
            v, k = k
            k_cache = k_cache[..., size:]
        if not isinstance(k, Tensor) or v is None:
            raise ValueError("k and v must be a tensor each, unless the layer is latent")
        heads = config.num_kv_heads
        k = as_heads("k", k, count, heads, k_cache.shape[2], config.dtype)
        v = as_heads("v", v, count, heads, config.v_head_dim, config.dtype)
        scales = self.scales or KVScales()
        store_kv(k, v, k_cache, self.v_cache, slots, k_scale=scales.k, v_scale=scales.v)


def as_heads(
    name: str, tensor: Tensor, count: int, heads: int, size: int, dtype: torch.dtype
) -> Tensor:
    """View a tensor as ``[T, heads, size]``.

    Raises
    ------
    ValueError
        If its shape is neither ``[count, heads, size]`` nor ``[count, heads * size]``, or its dtype
        another.
    """
    flat = tensor.dim() == 2
    expect(
        name,
        tensor,
        (count, heads * size) if flat else (count, heads, size),
        dtype,
        tensor.device,
    )
    return tensor.unflatten(1, (heads, size)) if flat else tensor
