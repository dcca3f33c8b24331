"""Move the KV of the accepted path to the front of the slots verification wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.launch import enter, launch_options

if TYPE_CHECKING:
    from collections.abc import Sequence

# Sized integers stand in for every dtype: a move is a copy of bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _move_block(
    pool,
    stride_slot,
    stride_head,
    source,
    target,
    moving,
    block,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    offset = column // DIM * stride_head + column % DIM
    mask = moving[:, None] & (column < SIZE)[None, :]  # [NODES, BLOCK]
    rows = tl.load(pool + source[:, None] * stride_slot + offset[None, :], mask=mask, other=0)
    # A slot may be the source of one row and the target of another.
    tl.debug_barrier()
    tl.store(pool + target[:, None] * stride_slot + offset[None, :], rows, mask=mask)


@triton.jit
def _commit_kv_kernel(
    k_pool,  # [layers, slots, heads, K_DIM], in place
    v_pool,  # [layers, slots, heads, V_DIM], in place
    tail_slots,  # [B, n] int32
    accept_index,  # [B, width] int32
    offsets,  # [2, layers] int64, if UNIT
    n,
    width,
    stride_tail,
    stride_accept,
    stride_kl,
    stride_ks,
    stride_kh,
    stride_vl,
    stride_vs,
    stride_vh,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    req, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    rank = tl.arange(0, NODES)  # [NODES]
    node = tl.load(accept_index + req * stride_accept + rank, mask=rank < width, other=-1)
    known = (node >= 0) & (node < n) & (rank < n)
    tail = tail_slots + req * stride_tail
    source = tl.load(tail + node, mask=known, other=0).to(tl.int64)
    target = tl.load(tail + rank, mask=known, other=0).to(tl.int64)
    moving = known & (source != target)
    k_blocks = tl.cdiv(K_SIZE, BLOCK)
    if block < k_blocks:
        apart = tl.load(offsets + layer) * UNIT if UNIT else layer * stride_kl
        _move_block(
            k_pool + apart,
            stride_ks,
            stride_kh,
            source,
            target,
            moving,
            block,
            K_DIM,
            K_SIZE,
            BLOCK,
        )
    else:
        offsets += tl.num_programs(1)
        apart = tl.load(offsets + layer) * UNIT if UNIT else layer * stride_vl
        _move_block(
            v_pool + apart,
            stride_vs,
            stride_vh,
            source,
            target,
            moving,
            block - k_blocks,
            V_DIM,
            V_SIZE,
            BLOCK,
        )


def _first(pool: Tensor | Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return the first layer as integers, and how many lie from there to the second."""
    first = pool[0].view(_BITS[pool[0].element_size()])
    if isinstance(pool, Tensor):
        return first, pool.stride(0)
    apart = pool[1].data_ptr() - first.data_ptr() if len(pool) > 1 else 0
    return first, apart // first.element_size()


def commit_kv(
    k_pool: Tensor | Sequence[Tensor],
    v_pool: Tensor | Sequence[Tensor],
    tail_slots: Tensor,
    accept_index: Tensor,
    *,
    offsets: Tensor | None = None,
    unit: int = 1,
) -> None:
    """Copy the KV of node ``accept_index[b, i]`` to slot ``tail_slots[b, i]``, in every layer.

    Sources and targets may overlap (the path 0, 2, 5 reads slot 2 for rank 1 and writes it for
    rank 2): a program reads all rows of its columns before it writes one. Entries of -1, and
    nodes that are in place already, are skipped, so padding touches nothing.

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
    (k_first, k_layer), (v_first, v_layer) = _first(k_pool), _first(v_pool)
    heads, k_dim, v_dim = *k_first.shape[1:], v_first.shape[2]
    batch, width = accept_index.shape
    if not batch or width == 1:
        return
    nodes = triton.next_power_of_2(width)
    block = min(max(4096 // nodes, 16), triton.next_power_of_2(heads * max(k_dim, v_dim)))
    blocks = triton.cdiv(heads * k_dim, block) + triton.cdiv(heads * v_dim, block)
    _commit_kv_kernel[(batch, len(k_pool), blocks)](
        k_first,
        v_first,
        tail_slots,
        accept_index,
        tail_slots if offsets is None else offsets,
        tail_slots.shape[1],
        width,
        tail_slots.stride(0),
        accept_index.stride(0),
        k_layer,
        k_first.stride(0),
        k_first.stride(1),
        v_layer,
        v_first.stride(0),
        v_first.stride(1),
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_SIZE=heads * k_dim,
        V_SIZE=heads * v_dim,
        NODES=nodes,
        BLOCK=block,
        UNIT=0 if offsets is None else unit,
        **launch_options(k_first.device),
    )
