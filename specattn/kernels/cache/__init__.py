"""Store and move keys and values, and give rows slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import cdiv, launch_options, power_of_2

if TYPE_CHECKING:
    from collections.abc import Sequence

launch = TritonModule("specattn.kernels.cache.triton")

_FLOAT8_MAX = 448.0
# sized integers stand in for every dtype: a move is a copy of bits
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# slots of a piece that a program writes
_BLOCK = 1024


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write new keys and values to their slots, in one launch.

    Parameters
    ----------
    k, v : Tensor
        ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``; dense last axes.
    k_cache, v_cache : Tensor
        ``[slots, Hkv, D]`` and ``[slots, Hkv, Dv]``, written at ``slots``.
    slots : Tensor
        ``[B, q]`` int32 or int64 with B q = T; may have a row stride. Slots below 0 are skipped.
    k_scale, v_scale : float
        Into float8 (e4m3) caches go ``k / k_scale`` and ``v / v_scale``, rounded to nearest and
        cut at +-448. Other caches ignore the scales.
    """
    if not len(k):
        return
    if on_triton(k):
        (tokens, heads, k_dim), v_dim = k.shape, v.shape[-1]
        q_len, stride_slot = rows_of_slots(slots)
        launch.store_kernel[(tokens,)](
            (k, *k.stride()[:2]),
            (v, *v.stride()[:2]),
            (k_cache, *k_cache.stride()[:2]),
            (v_cache, *v_cache.stride()[:2]),
            slots,
            1 / k_scale,
            1 / v_scale,
            stride_slot,
            Q_LEN=q_len,
            K_DIM=k_dim,
            V_DIM=v_dim,
            K_SIZE=heads * k_dim,
            V_SIZE=heads * v_dim,
            K_BLOCK=power_of_2(heads * k_dim),
            V_BLOCK=power_of_2(heads * v_dim),
        )
        return
    index = slots.reshape(-1).long()
    kept = index >= 0
    for new, scale, cache in ((k, k_scale, k_cache), (v, v_scale, v_cache)):
        # float8 has no index_copy_
        cache[index[kept]] = _as_stored(new[kept], scale, cache.dtype)


def rows_of_slots(slots: Tensor) -> tuple[int, int]:
    """Return how long rows of slots ``[B, q]`` are, and their stride.

    The length is a constant of kernels. Slots that lie one after another are rows of one: prompts
    come in any number of tokens, and a kernel would be compiled for each.
    """
    q_len, strides = slots.shape[1], slots.stride()
    return (1, 1) if strides == (q_len, 1) else (q_len, strides[0])


def commit_kv(
    k_pool: Tensor | Sequence[Tensor],
    v_pool: Tensor | Sequence[Tensor],
    tail_slots: Tensor,
    accept_index: Tensor,
    *,
    offsets: Tensor | None = None,
    unit: int = 1,
) -> None:
    """Move the KV of accepted nodes to the first tail slots.

    In every layer the KV of node ``accept_index[b, i]`` goes to slot ``tail_slots[b, i]``. Sources
    and targets may overlap (the path 0, 2, 5 reads slot 2 for rank 1 and writes it for rank 2): a
    program reads all rows of its columns before it writes one. Entries of -1, nodes that are in
    place already, and slots below 0 are skipped, so padding touches nothing.

    Parameters
    ----------
    k_pool, v_pool : Tensor or sequence of Tensor
        ``[layers, slots, heads, head_dim]`` and the same with another width, any dtype, any strides
        with a dense last axis; of any size, addresses are 64-bit. Or a tensor per layer, all with
        the strides of the first.
    tail_slots : Tensor
        ``[B, n]`` int32, the slot of every node; may have a row stride.
    accept_index : Tensor
        ``[B, num_steps + 1]`` int32, nodes of the accepted path, -1 past its end.
    offsets : Tensor, optional
        ``[2, layers]`` int64: how many units after the first layer each layer's keys begin, and
        its values; may be negative. Without, layers are evenly spaced.
    unit : int
        Elements of a unit, a power of two.
    """
    if not len(accept_index) or accept_index.shape[1] == 1:
        return
    if on_triton(tail_slots):
        (k_first, k_layer), (v_first, v_layer) = _first(k_pool), _first(v_pool)
        heads, k_dim, v_dim = *k_first.shape[1:], v_first.shape[2]
        batch, width = accept_index.shape
        nodes = power_of_2(width)
        block = min(max(4096 // nodes, 16), power_of_2(heads * max(k_dim, v_dim)))
        blocks = cdiv(heads * k_dim, block) + cdiv(heads * v_dim, block)
        launch.commit_kv_kernel[batch, len(k_pool), blocks](
            (k_first, k_layer, *k_first.stride()[:2]),
            (v_first, v_layer, *v_first.stride()[:2]),
            tail_slots,
            accept_index,
            tail_slots if offsets is None else offsets,
            tail_slots.shape[1],
            width,
            tail_slots.stride(0),
            accept_index.stride(0),
            K_DIM=k_dim,
            V_DIM=v_dim,
            K_SIZE=heads * k_dim,
            V_SIZE=heads * v_dim,
            NODES=nodes,
            BLOCK=block,
            UNIT=0 if offsets is None else unit,
            **launch_options(k_first.device),
        )
        return
    n = tail_slots.shape[1]
    width = min(accept_index.shape[1], n)
    node = accept_index[:, :width].long()
    known = (node >= 0) & (node < n)
    source = tail_slots.long().gather(1, node.clamp(0, n - 1))
    target = tail_slots[:, :width].long()
    known &= (source >= 0) & (target >= 0)
    # what is skipped copies slot 0, which belongs to padding, onto itself
    source, target = (torch.where(known, slot, 0).flatten() for slot in (source, target))
    for pool in (k_pool, v_pool):
        for layer in pool:
            layer[target] = layer[source]


def write_slots(
    packed: Tensor,
    req_to_token: Tensor,
    reserved: Tensor,
    *,
    pieces: int,
    longest: int,
    page_size: int,
) -> None:
    """Write the slots of pages into rows of ``req_to_token``.

    ``reserved`` gets the new number of slots of these rows. Allocates nothing and never waits for
    the device.

    Parameters
    ----------
    packed : Tensor
        Flat int32, on the device or pinned; may be longer. First five numbers per piece, all
        pieces' first numbers first: row, first column, how many slots to write, where in ``packed``
        the piece's pages begin, and what ``reserved`` becomes. Then the pages; a piece's last page
        may be written in part.
    req_to_token : Tensor
        ``[rows, columns]`` int32, in place; may have a row stride.
    reserved : Tensor
        ``[rows]`` int32, in place.
    pieces : int
        How many; no two of one row.
    longest : int
        Slots of the longest piece.
    page_size : int
        Slots per page.
    """
    if not pieces:
        return
    if on_triton(req_to_token):
        launch.write_slots_kernel[pieces, max(1, cdiv(longest, _BLOCK))](
            packed,
            req_to_token,
            reserved,
            pieces,
            req_to_token.stride(0),
            PAGE=page_size,
            BLOCK=_BLOCK,
        )
        return
    for row, column, count, first, room in packed[: 5 * pieces].view(5, pieces).T.tolist():
        pages = packed[first : first - (-count // page_size), None]  # [pages, 1]
        within = torch.arange(page_size, dtype=torch.int32, device=packed.device)
        slots = (pages * page_size + within).view(-1)[:count]
        req_to_token[row, column : column + count] = slots
        reserved[row] = room


def _as_stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Convert to ``dtype``, as the pool stores it.

    For float8, values are divided by ``scale`` and clamped to its largest number.
    """
    if dtype == torch.float8_e4m3fn:
        values = (values.float() * (1 / scale)).clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
    return values.to(dtype)


def _first(pool: Tensor | Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return the first layer as integers, and the stride between layers.

    The stride is the number of integers from the first layer to the second.
    """
    first = pool[0].view(_BITS[pool[0].element_size()])
    if isinstance(pool, Tensor):
        return first, pool.stride(0)
    offset = pool[1].data_ptr() - first.data_ptr() if len(pool) > 1 else 0
    return first, offset // first.element_size()
