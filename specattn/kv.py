"""Paged KV storage. Slot 0 belongs to padding: padded rows read and write only there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.buffers import expect
from specattn.config import MAX_SLOTS, UNSCALED
from specattn.kernels import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.batch import AcceptResult
    from specattn.config import AttnConfig, KVScales
    from specattn.kernels.rotation import Rotation


class KVPool:
    """Keys and values of all layers of one model.

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
    k, v : Tensor
        ``[layers, num_slots, num_kv_heads, head_dim]`` and the same with ``v_head_dim``; of
        ``latent`` layers, ``v`` is a view of the first columns of ``k``.

    Raises
    ------
    ValueError
        If layers differ in KV geometry, there are too many slots, or scales are too many, too few
        or not of a float8 pool.
    """

    def __init__(
        self, layers: Sequence[AttnConfig], num_slots: int, device: torch.device | str, *,
        kv_dtype: torch.dtype | None = None, scales: Sequence[KVScales] | None = None,
    ) -> None:
        if kv_dtype is not None:
            layers = [replace(config, kv_dtype=kv_dtype) for config in layers]
        shapes = {(c.num_kv_heads, c.head_dim, c.v_head_dim, c.dtype, c.latent, c.kv_dtype)
                  for c in layers}
        if len(shapes) != 1:
            found = sorted(shapes, key=str)
            raise ValueError(f"layers of one pool must share one KV geometry, got {found}")
        if not 1 <= num_slots < MAX_SLOTS:
            raise ValueError(f"num_slots must be 1..{MAX_SLOTS - 1}, got {num_slots}")
        ((heads, k_dim, v_dim, dtype, latent, kv_dtype),) = shapes
        self.layers = tuple(layers)
        self.scales = _per_layer(scales, len(layers), kv_dtype)
        self._dtype, stored = dtype, kv_dtype or dtype
        size = (len(layers), num_slots, heads)
        self.k = torch.zeros(*size, k_dim, dtype=stored, device=device)
        if latent:
            self.v = self.k[..., :v_dim]
        else:
            self.v = torch.zeros(*size, v_dim, dtype=stored, device=device)
        # columns of k that are not values, too: with v they cover every number once
        self._shared = v_dim if latent else 0
        self._own_k = self.k[..., self._shared :]

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
        if slots.dtype != torch.int32 or slots.device != self.k.device:
            raise ValueError(
                f"slots must be int32 on {self.k.device}, got {slots.dtype} on {slots.device}"
            )
        for name, new, cache in (("k", k, self.k), ("v", v, self.v)):
            shape = (slots.numel(), *cache.shape[2:])
            expect(name, new, shape, self._dtype, cache.device)
            if new.stride(-1) != 1:
                raise ValueError(f"{name} must be dense in its last axis, got {new.stride()}")
        store = ops("kv_store", self.k.device)
        scales = self.scales[layer]
        store.store_kv(
            k[..., self._shared :], v, self._own_k[layer], self.v[layer], slots,
            k_scale=scales.k, v_scale=scales.v,
        )

    def store_packed(
        self, layer: int, slots: Tensor, parts: Tensor, positions: Tensor, rotation: Rotation,
        num_qo_heads: int, *, following: bool = False,
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
        heads, dim = self.k.shape[2:]
        shape = (len(parts), slots.numel(), (num_qo_heads + 2 * heads) * dim)
        expect("parts", parts, shape, parts.dtype, self.k.device)
        if self._shared or self.v.shape[3] != dim:
            raise ValueError("packed heads are of one size: v_head_dim must be head_dim")
        q = parts.new_empty(shape[1], num_qo_heads, dim, dtype=self._dtype)
        scales = self.scales[layer]
        ops("glue", self.k.device).rotate_store(
            parts, positions, rotation.table, rotation.norms, rotation.eps, q, self.k[layer],
            self.v[layer], slots, k_scale=scales.k, v_scale=scales.v,
            following=following,
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
        path, device = accepted.accept_index, self.k.device
        expect("tail_slots", tail_slots, (len(path), tail_slots.shape[-1]), torch.int32, device)
        expect("accept_index", path, (len(path), path.shape[-1]), torch.int32, device)
        move = ops("kv_move", self.k.device)
        move.commit_kv(self._own_k, self.v, tail_slots, accepted.accept_index)


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
