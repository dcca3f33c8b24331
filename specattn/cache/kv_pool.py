"""Paged KV storage. Slot 0 belongs to padding: padded rows read and write only there."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from math import gcd
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specattn.checks import expect, whole_number
from specattn.config import FLOAT8, MAX_SLOTS, UNSCALED
from specattn.cuda_graph.capture_guard import Settable
from specattn.kernels.cache import commit_kv, store_kv
from specattn.kernels.fused import qk_norm_rope_store_kv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.batch import AcceptResult
    from specattn.config import AttnConfig, KVScales
    from specattn.kernels.fused import Rotation

#: Of all layers: in one tensor, layers first, or a tensor per layer.
Caches = Tensor | tuple[Tensor, ...]


class KVPool(Settable):
    """Keys and values of all layers of one model.

    The pool allocates them, or takes an engine's own caches (`from_external`).

    Parameters
    ----------
    layers : sequence of AttnConfig
        One per attention layer, all of one KV geometry and dtype.
    num_slots : int
        Tokens the pool can hold, slot 0 (padding) included; below 2^31.
    device : torch.device
        Where the pool lives.
    kv_dtype : torch.dtype, optional
        What to store keys and values in, float8 (e4m3), instead of what ``layers`` say.
    scales : sequence of KVScales, optional
        Of a float8 pool, one per layer; 1 by default.

    Attributes
    ----------
    layers : tuple of AttnConfig
        Of ``kv_dtype``.
    scales : tuple of KVScales
        One per layer. Fixed: they are part of what is stored, and of recorded graphs.
    num_slots, device
        As above.
    k, v : Tensor or tuple of Tensor
        ``[layers, num_slots, num_kv_heads, head_dim]`` and the same with ``v_head_dim``, or a
        tensor per layer, as they were given; of ``latent`` layers, ``v`` is a view of the
        first columns of ``k``.

    Raises
    ------
    ValueError
        If layers differ in KV geometry, there are too many slots, or scales are too many, too few
        or not of a float8 pool.
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
        if kv_dtype is not None:
            layers = [replace(config, kv_dtype=kv_dtype) for config in layers]
        one = _one_geometry(layers)
        num_slots = whole_number("num_slots", num_slots, 1, MAX_SLOTS - 1)
        size, stored = (len(layers), num_slots, one.num_kv_heads), one.kv_dtype or one.dtype
        k = torch.zeros(*size, one.head_dim, dtype=stored, device=device)
        if one.latent:
            v = k[..., : one.v_head_dim]
        else:
            v = torch.zeros(*size, one.v_head_dim, dtype=stored, device=device)
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
        """Return a pool over caches that are there already; nothing is copied or cleared.

        Slot 0, and all of page 0 where slots come in pages, belongs to padding here, too: nobody
        else may keep anything there.

        Parameters
        ----------
        layers : sequence of AttnConfig
            As above; caches of float8 (e4m3) make them layers of that ``kv_dtype``.
        k : Tensor or sequence of Tensor
            ``[num_slots, num_kv_heads, head_dim]`` per layer, or one tensor of all layers, layers
            first. Any strides with a dense last axis, the same in all layers, which may lie
            anywhere on the device. `as_slots` gives such a view of pages.
        v : Tensor or sequence of Tensor, optional
            The same with ``v_head_dim``, and strides of its own; none with ``latent`` layers.
        scales : sequence of KVScales, optional
            As above.

        Raises
        ------
        ValueError
            For what the constructor refuses; if a tensor is not as described, or there are not as
            many as layers; if heads of one share memory, or the first heads of two; if two begin
            no whole elements apart.
        """
        one, keys = _one_geometry(layers), _as_caches("k", k, len(layers))
        if keys[0].dtype == FLOAT8:
            layers = [replace(config, kv_dtype=FLOAT8) for config in layers]
            one = layers[0]
        if (v is None) != one.latent:
            raise ValueError(f"v must be given unless layers are latent, got latent={one.latent}")
        num_slots, device = keys[0].shape[:1].numel(), keys[0].device
        stored = one.kv_dtype or one.dtype
        whole_number("num_slots", num_slots, 1, MAX_SLOTS - 1)
        _check_caches("k", keys, (num_slots, one.num_kv_heads, one.head_dim), stored, device)
        if v is None:
            values, own = _columns(keys, slice(one.v_head_dim)), [*keys]
        else:
            values = _as_caches("v", v, len(layers))
            shape = num_slots, one.num_kv_heads, one.v_head_dim
            _check_caches("v", values, shape, stored, device)
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
        one = layers[0]
        self.layers = tuple(layers)
        self.scales = _per_layer(scales, len(layers), one.kv_dtype)
        self.k, self.v, self._dtype = k, v, one.dtype
        self.num_slots, self.device = len(k[0]), k[0].device
        # columns of k that are not values, too: with v they cover every number once
        self._shared = one.v_head_dim if one.latent else 0
        self._own_k = _columns(k, slice(self._shared, None)) if self._shared else k
        self._offsets, self._unit = _offsets(k, v)

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new keys and values, of the layers' ``dtype`` whatever is stored.

        Parameters
        ----------
        layer : int
            Layer index.
        slots : Tensor
            ``[B, q]`` int32 with B q = T; may be a view with a row stride.
        k, v : Tensor
            ``[T, num_kv_heads, head_dim]`` / ``v_head_dim``, any strides with a dense last axis.
            Of ``latent`` layers ``v`` is ``k[..., :v_head_dim]``.

        Raises
        ------
        ValueError
            Before anything is written: if shape, dtype, device or the last stride is another.
        """
        if slots.dtype != torch.int32 or slots.device != self.device:
            raise ValueError(
                f"slots must be int32 on {self.device}, got {slots.dtype} on {slots.device}"
            )
        for name, new, cache in (("k", k, self.k[layer]), ("v", v, self.v[layer])):
            shape = (slots.numel(), *cache.shape[1:])
            expect(name, new, shape, self._dtype, cache.device)
            if new.stride(-1) != 1:
                raise ValueError(f"{name} must be dense in its last axis, got {new.stride()}")
        scales = self.scales[layer]
        store_kv(
            k[..., self._shared :],
            v,
            self._own_k[layer],
            self.v[layer],
            slots,
            k_scale=scales.k,
            v_scale=scales.v,
        )

    def store_packed(
        self,
        layer: int,
        slots: Tensor,
        parts: Tensor,
        positions: Tensor,
        rotation: Rotation,
        num_qo_heads: int,
        *,
        following: bool = False,
    ) -> Tensor:
        """Rotate a layer's new heads, write its keys and values, and return its queries.

        Parameters
        ----------
        layer, slots
            As in `store`.
        parts : Tensor
            ``[S, T, (Hq + 2 Hkv) D]``, which add up to queries, keys and values side by side.
        positions : Tensor
            ``[T]`` int64.
        rotation : Rotation
            The position embedding, and the norms before it.
        num_qo_heads : int
            Hq.
        following : bool
            Whether another layer has attended since ``positions`` and ``slots`` were written.

        Returns
        -------
        Tensor
            ``[T, Hq, D]``, contiguous, of the layers' ``dtype``.

        Raises
        ------
        ValueError
            Before anything is written: if ``parts`` or ``slots`` have another width or count.
        """
        one = self.layers[layer]
        dim = one.head_dim
        shape = (len(parts), slots.numel(), (num_qo_heads + 2 * one.num_kv_heads) * dim)
        expect("parts", parts, shape, parts.dtype, self.device)
        if one.v_head_dim != dim:
            raise ValueError("packed heads are of one size: v_head_dim must be head_dim")
        q = parts.new_empty(shape[1], num_qo_heads, dim, dtype=self._dtype)
        scales = self.scales[layer]
        qk_norm_rope_store_kv(
            parts,
            positions,
            rotation.table,
            rotation.norms,
            rotation.eps,
            q,
            self.k[layer],
            self.v[layer],
            slots,
            k_scale=scales.k,
            v_scale=scales.v,
            prefetch=following,
        )
        return q

    def commit(self, tail_slots: Tensor, accepted: AcceptResult) -> None:
        """Move the KV of the accepted path to the front of each request's tail.

        Sources and targets may overlap; every row is read before any is written.

        Parameters
        ----------
        tail_slots : Tensor
            ``[B, n]`` int32, the slots verification wrote.
        accepted : AcceptResult
            Names the nodes to keep.

        Raises
        ------
        ValueError
            Before anything moves: if a tensor is not int32, or they differ in requests.
        """
        path, device = accepted.accept_index, self.device
        expect("tail_slots", tail_slots, (len(path), tail_slots.shape[-1]), torch.int32, device)
        expect("accept_index", path, (len(path), path.shape[-1]), torch.int32, device)
        commit_kv(self._own_k, self.v, tail_slots, path, offsets=self._offsets, unit=self._unit)


def _one_geometry(layers: Sequence[AttnConfig]) -> AttnConfig:
    """Return the first of layers that all store the same, or raise a ValueError."""
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
    caches = given if isinstance(given, Tensor) else tuple(given)
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
    """Return where the layers of ``k`` and ``v`` begin, ``[2, layers]``, and the unit.

    Counted from the first layer's beginning in units of so many elements; none for layers that
    are evenly spaced.
    """
    if isinstance(k, Tensor) and isinstance(v, Tensor):
        return None, 1
    size = k[0].element_size()
    found = [[cache.data_ptr() - caches[0].data_ptr() for cache in caches] for caches in (k, v)]
    if any(offset % size for offset in chain(*found)):
        raise ValueError(f"layers must begin whole elements of {size} bytes apart, got {found}")
    steps = [offsets[1] if len(offsets) > 1 else 0 for offsets in found]
    if found == [[step * at for at in range(len(k))] for step in steps]:
        return None, 1
    # whoever knows what offsets are multiples of can copy several elements at once
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
