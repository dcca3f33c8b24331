"""KV pools: keys and values of all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import gcd
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specattn.buffers import Fingerprint, ReadOnly, fingerprint
from specattn.checks import as_heads, expect, instance, listed, require_rows, whole_number
from specattn.config import FLOAT8, MAX_SLOTS, UNSCALED, AttnConfig
from specattn.kernels.cache import commit_kv, store_kv
from specattn.kernels.fused import qk_norm_rope_store_kv

if TYPE_CHECKING:
    from specattn.batch import AcceptResult
    from specattn.config import KVScales
    from specattn.kernels.fused import Rotation
    from specattn.kernels.gated_delta import Nodes

#: The keys, or the values, of all layers: one tensor, layers first, or one per layer.
Caches = Tensor | tuple[Tensor, ...]
_SLOTS = (torch.int32, torch.int64)


class KVPool(ReadOnly):
    """Keys and values of all layers of one model.

    The pool allocates them, or takes an engine's own caches (`from_external`). Slot 0 belongs to
    padding: padding rows read and write only there.

    Parameters
    ----------
    layers : sequence of AttnConfig
        One per attention layer, all of one KV geometry and dtype.
    num_slots : int
        Tokens that the pool can hold, slot 0 included; below 2^31.
    device : torch.device
        Where the pool lives.
    kv_dtype : torch.dtype, optional
        float8 (e4m3), to store keys and values so. By default ``layers`` say how.
    scales : sequence of KVScales, optional
        One per layer of a float8 pool; 1 by default.

    Attributes
    ----------
    layers : tuple of AttnConfig
        The layers, with ``kv_dtype``.
    scales : tuple of KVScales
        One per layer. They are part of what is stored and of recorded graphs: do not change them.
    num_slots, device
        As above.
    k, v : Tensor or tuple of Tensor
        ``[layers, num_slots, num_kv_heads, head_dim]`` and the same with ``v_head_dim``, or one
        tensor per layer. ``v`` of ``latent`` layers is a view of the first columns of ``k``.

    Raises
    ------
    ValueError
        If there is no layer, layers differ in KV geometry, ``num_slots`` is out of range, or
        ``scales`` are of another number or of a pool that stores no float8.
    """

    def __init__(
        self,
        layers: Sequence[AttnConfig],
        num_slots: int,
        device: torch.device | str,
        *,
        kv_dtype: torch.dtype | None = None,
        scales: Sequence[KVScales] | None = None,
    ) -> None:
        layers = _as_layers(layers)
        if kv_dtype is not None:
            layers = [replace(config, kv_dtype=kv_dtype) for config in layers]
        first = _one_geometry(layers)
        num_slots = whole_number("num_slots", num_slots, 1, MAX_SLOTS - 1)
        size, stored = (len(layers), num_slots, first.num_kv_heads), first.kv_dtype or first.dtype
        k = torch.zeros(*size, first.head_dim, dtype=stored, device=device)
        if first.latent:
            v = k[..., : first.v_head_dim]
        else:
            v = torch.zeros(*size, first.v_head_dim, dtype=stored, device=device)
        self._hold(layers, k, v, scales)

    @classmethod
    def from_external(
        cls,
        layers: Sequence[AttnConfig],
        k: Tensor | Sequence[Tensor],
        v: Tensor | Sequence[Tensor] | None = None,
        *,
        scales: Sequence[KVScales] | None = None,
    ) -> Self:
        """Return a pool over caches that an engine has allocated.

        Nothing is copied or cleared. Slot 0 belongs to padding here, too, and so does all of page 0
        where slots come in pages: the engine may keep nothing there.

        Parameters
        ----------
        layers : sequence of AttnConfig
            As above; with caches of float8 (e4m3) they become layers of that ``kv_dtype``.
        k : Tensor or sequence of Tensor
            ``[num_slots, num_kv_heads, head_dim]`` per layer, or one tensor of all layers, layers
            first. Layers may lie anywhere on the device. All have the same strides, of which the
            last is 1. `as_slots` gives such a view of pages.
        v : Tensor or sequence of Tensor, optional
            The same with ``v_head_dim`` and other strides; none with ``latent`` layers.
        scales : sequence of KVScales, optional
            As above.

        Raises
        ------
        ValueError
            For what the constructor refuses. If a tensor is not as described, or there are not as
            many as layers. If layers, or the heads of one, share memory. If two layers do not begin
            a whole number of elements apart.
        """
        layers = _as_layers(layers)
        first, keys = _one_geometry(layers), _as_caches("k", k, len(layers))
        if keys[0].dtype == FLOAT8:
            layers = [replace(config, kv_dtype=FLOAT8) for config in layers]
            first = layers[0]
        if (v is None) != first.latent:
            raise ValueError(f"v must be given unless layers are latent, got latent={first.latent}")
        num_slots = whole_number("num_slots", keys[0].shape[:1].numel(), 1, MAX_SLOTS - 1)
        slot, device = (num_slots, first.num_kv_heads), keys[0].device
        kind = first.kv_dtype or first.dtype, device
        _check_caches("k", keys, (*slot, first.head_dim), *kind)
        if v is None:
            values, own = _columns(keys, slice(first.v_head_dim)), [*keys]
        else:
            values = _as_caches("v", v, len(layers))
            _check_caches("v", values, (*slot, first.v_head_dim), *kind)
            own = [*keys, *values]
        starts = sorted((c.data_ptr(), c.shape[2] * c.element_size()) for c in own)
        if any(start + size > after for (start, size), (after, _) in pairwise(starts)):
            raise ValueError("k and v of all layers must have memory of their own, two share it")
        pool = cls.__new__(cls)
        pool._hold(layers, keys, values, scales)
        return pool

    def _hold(
        self,
        layers: Sequence[AttnConfig],
        k: Caches,
        v: Caches,
        scales: Sequence[KVScales] | None,
    ) -> None:
        first = layers[0]
        self.layers = tuple(layers)
        self.scales = _per_layer(scales, len(layers), first.kv_dtype)
        self.k, self.v, self._dtype = k, v, first.dtype
        self.num_slots, self.device = len(k[0]), k[0].device
        # the columns of k that are not those of v: with v they have every number once
        self._own_k = _columns(k, slice(first.v_head_dim, None)) if first.latent else k
        self._offsets, self._unit = _offsets(k, v)

    def store(
        self,
        layer: int,
        slots: Tensor,
        k: Tensor | tuple[Tensor, Tensor] | None,
        v: Tensor | None = None,
    ) -> None:
        """Write a layer's new keys and values to their slots.

        Heads may be an axis of their own or lie side by side, as ``[T, heads * size]``.

        Parameters
        ----------
        layer : int
            Layer index.
        slots : Tensor
            ``[B, q]`` int32 or int64 with B q = T; may be a view with a row stride. Those below 0
            are skipped.
        k : Tensor or tuple of Tensor
            ``[T, num_kv_heads, head_dim]`` of the layers' ``dtype``, dense in its last axis. Of
            ``latent`` layers also the latent and the rotated part.
        v : Tensor, optional
            ``[T, num_kv_heads, v_head_dim]`` alike; not read of ``latent`` layers, where it is
            ``k[..., :v_head_dim]``.

        Raises
        ------
        ValueError
            Before anything is written: if k or v is missing, or a shape, dtype, device or last
            stride is another.
        """
        config, count, device = self.layers[layer], slots.numel(), self.device
        if slots.dtype not in _SLOTS or slots.device != device:
            raise ValueError(
                f"slots must be int32 or int64 on {device}, got {slots.dtype} on {slots.device}"
            )
        k_size, v_size = config.head_dim, config.v_head_dim
        if config.latent:
            # with its values a latent key has every number once
            if isinstance(k, Tensor):
                k = as_heads("k", k, (count, 1, k_size), self._dtype, device)
                k = k[..., :v_size], k[..., v_size:]
            if k is not None:
                v, k = k
            k_size -= v_size
        if not isinstance(k, Tensor) or v is None:
            raise ValueError("k and v must be a tensor each, unless the layer is latent")
        k = as_heads("k", k, (count, config.num_kv_heads, k_size), self._dtype, device)
        v = as_heads("v", v, (count, config.num_kv_heads, v_size), self._dtype, device)
        require_rows(k=k, v=v)
        scales = self.scales[layer]
        store_kv(k, v, self._own_k[layer], self.v[layer], slots, k_scale=scales.k, v_scale=scales.v)

    def store_packed(  # noqa: PLR0913 - as its docstring says
        self,
        layer: int,
        slots: Tensor,
        parts: Tensor,
        positions: Tensor,
        rotation: Rotation,
        num_qo_heads: int,
        *,
        prefetch: bool = False,
    ) -> Tensor:
        """Rotate a layer's heads, write its KV, and return its queries.

        Parameters
        ----------
        layer, slots
            As in `store`.
        parts : Tensor
            ``[S, T, (Hq + 2 Hkv) D]``: S partial sums of queries, keys and values side by side.
        positions : Tensor
            ``[T]`` int64.
        rotation : Rotation
            The position embedding, and the bias and norms before it.
        num_qo_heads : int
            Hq.
        prefetch : bool
            Whether the kernel may read ``positions`` and ``slots`` before the kernel before it has
            ended: another layer has attended since they were written.

        Returns
        -------
        Tensor
            ``[T, Hq, D]``, contiguous, of the layers' ``dtype``.

        Raises
        ------
        ValueError
            Before anything is written: if ``parts`` and ``slots`` do not fit, or values have
            another size than keys.
        """
        config = self.layers[layer]
        dim = config.head_dim
        shape = (len(parts), slots.numel(), (num_qo_heads + 2 * config.num_kv_heads) * dim)
        expect("parts", parts, shape, parts.dtype, self.device)
        if config.v_head_dim != dim:
            raise ValueError(f"v_head_dim must be head_dim, {dim}, got {config.v_head_dim}")
        q = parts.new_empty(shape[1], num_qo_heads, dim, dtype=self._dtype)
        scales = self.scales[layer]
        qk_norm_rope_store_kv(
            parts,
            positions,
            rotation,
            q,
            self.k[layer],
            self.v[layer],
            slots,
            k_scale=scales.k,
            v_scale=scales.v,
            prefetch=prefetch,
        )
        return q

    def tensors(self) -> dict[str, Caches]:
        """Return the keys and the values by name; see `Memory.tensors`."""
        return {"k_cache": self.k, "v_cache": self.v}

    def by_row(self) -> dict[str, Tensor]:
        """Return nothing: all lies by slot; see `Memory.by_row`."""
        return {}

    def fingerprint(self) -> Fingerprint:
        """Describe caches and scales; see `Memory.fingerprint`."""
        return fingerprint(**self.tensors(), kv_scales=self.scales)

    def nodes(self, batch: int, count: int) -> None:
        """Return nothing: what nodes leave is in their slots; see `Memory.nodes`."""

    def commit(
        self,
        tail_slots: Tensor,
        accepted: AcceptResult,
        rows: Tensor | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """Move the accepted path's KV to the front of each request's tail.

        Sources and targets may overlap. A path of one node is in place, and nothing is launched.

        Parameters
        ----------
        tail_slots : Tensor
            ``[B, n]`` int32, the slots that verification wrote.
        accepted : AcceptResult
            The nodes to keep.
        rows, nodes : optional
            As in `Memory.commit`; not read.

        Raises
        ------
        ValueError
            Before anything moves: if a tensor is not int32 or not on the pool's device, or the two
            differ in requests.
        """
        path, device = accepted.accept_index, self.device
        expect("tail_slots", tail_slots, (len(path), tail_slots.shape[-1]), torch.int32, device)
        expect("accept_index", path, (len(path), path.shape[-1]), torch.int32, device)
        commit_kv(self._own_k, self.v, tail_slots, path, offsets=self._offsets, unit=self._unit)


def _as_layers(layers: Sequence[AttnConfig]) -> list[AttnConfig]:
    """Return layers as a list; a model is none."""
    instance("layers", layers, Sequence, "a sequence of AttnConfig, as a model's layers")
    for layer in layers:
        instance("every layer", layer, AttnConfig, "an AttnConfig")
    return list(layers)


def _one_geometry(layers: Sequence[AttnConfig]) -> AttnConfig:
    """Return the first layer; a ValueError unless all layers store the same."""
    if not layers:
        raise ValueError("layers must be at least one, got none")
    shapes = {
        (c.num_kv_heads, c.head_dim, c.v_head_dim, c.dtype, c.latent, c.kv_dtype) for c in layers
    }
    if len(shapes) != 1:
        found = sorted(shapes, key=str)
        raise ValueError(f"layers of one pool must share one KV geometry, got {found}")
    return layers[0]


def _as_caches(name: str, given: Tensor | Sequence[Tensor], count: int) -> Caches:
    caches = given if isinstance(given, Tensor) else tuple(listed(name, given, "tensors"))
    for at, cache in enumerate(caches):
        instance(f"{name}[{at}]", cache, Tensor, "a tensor")
    if len(caches) != count:
        raise ValueError(f"{name} must have {count} layers, got {len(caches)}")
    return caches


def _check_caches(
    name: str, caches: Caches, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    strides = caches[0].stride()
    for at, cache in enumerate(caches):
        expect(f"{name}[{at}]", cache, shape, dtype, device)
        # the stride of an axis of length 1 means nothing
        apart = [by for by, size in zip(strides[:2], shape[:2], strict=True) if size > 1]
        if cache.stride() != strides or strides[2] != 1 or min(apart, default=shape[2]) < shape[2]:
            raise ValueError(
                f"{name}[{at}] must be dense in its last axis, its slots and heads apart, with the "
                f"strides of all layers, {strides}, got {cache.stride()}"
            )


def _columns(caches: Caches, which: slice) -> Caches:
    if isinstance(caches, Tensor):
        return caches[..., which]
    return tuple(cache[..., which] for cache in caches)


def _offsets(k: Caches, v: Caches) -> tuple[Tensor | None, int]:
    """Return where layers begin, ``[2, layers]`` int64, in units of elements.

    Offsets count from the beginning of the first layer's keys, and of its values. Evenly spaced
    layers need none.
    """
    size = k[0].element_size()
    found = [[cache.data_ptr() - caches[0].data_ptr() for cache in caches] for caches in (k, v)]
    if any(offset % size for offset in chain(*found)):
        raise ValueError(f"layers must begin whole elements of {size} bytes apart, got {found}")
    steps = [offsets[1] if len(offsets) > 1 else 0 for offsets in found]
    if found == [[step * at for at in range(len(k))] for step in steps]:
        return None, 1
    # a kernel that knows a divisor of all offsets can copy several elements at once
    unit = gcd(16, *(offset // size for offset in chain(*found)))
    units = [[offset // size // unit for offset in offsets] for offsets in found]
    return torch.tensor(units, dtype=torch.int64, device=k[0].device), unit


def _per_layer(
    scales: Sequence[KVScales] | None, count: int, kv_dtype: torch.dtype | None
) -> tuple[KVScales, ...]:
    if scales is None:
        return (UNSCALED,) * count
    if kv_dtype is None:
        raise ValueError("scales are those of float8 pools (kv_dtype); this one stores dtype")
    if len(scales) != count:
        raise ValueError(f"scales must be one per layer, {count}, got {len(scales)}")
    return tuple(scales)
