"""Move the KV of the accepted path to the front of the slots verification wrote."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.early_launch import enter, launch_options

# Sized integers stand in for every dtype: a move is a copy of bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _move_block(
    pool, stride_slot, stride_head, source, target, moving, block,
    DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):
    column = block * BLOCK + tl.arange(0, BLOCK)                             # [BLOCK]
    offset = column // DIM * stride_head + column % DIM
    mask = moving[:, None] & (column < SIZE)[None, :]                        # [NODES, BLOCK]
    rows = tl.load(pool + source[:, None] * stride_slot + offset[None, :], mask=mask, other=0)
    # A slot may be the source of one row and the target of another.
    tl.debug_barrier()
    tl.store(pool + target[:, None] * stride_slot + offset[None, :], rows, mask=mask)


@triton.jit
def _commit_kv_kernel(
    k_pool,        # [layers, slots, heads, K_DIM], in place
    v_pool,        # [layers, slots, heads, V_DIM], in place
    tail_slots,    # [B, n] int32
    accept_index,  # [B, width] int32
    n, width, stride_tail, stride_accept,
    stride_kl, stride_ks, stride_kh, stride_vl, stride_vs, stride_vh,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    NODES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    enter(PDL)
    req, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    rank = tl.arange(0, NODES)                                               # [NODES]
    node = tl.load(accept_index + req * stride_accept + rank, mask=rank < width, other=-1)
    known = (node >= 0) & (node < n) & (rank < n)
    tail = tail_slots + req * stride_tail
    source = tl.load(tail + node, mask=known, other=0).to(tl.int64)
    target = tl.load(tail + rank, mask=known, other=0).to(tl.int64)
    moving = known & (source != target)
    k_blocks = tl.cdiv(K_SIZE, BLOCK)
    if block < k_blocks:
        _move_block(k_pool + layer * stride_kl, stride_ks, stride_kh, source, target, moving,
                    block, K_DIM, K_SIZE, BLOCK)
    else:
        _move_block(v_pool + layer * stride_vl, stride_vs, stride_vh, source, target, moving,
                    block - k_blocks, V_DIM, V_SIZE, BLOCK)


def commit_kv(k_pool: Tensor, v_pool: Tensor, tail_slots: Tensor, accept_index: Tensor) -> None:
    """Copy the KV of node ``accept_index[b, i]`` to slot ``tail_slots[b, i]``, in every layer.

    Sources and targets may overlap (the path 0, 2, 5 reads slot 2 for rank 1 and writes it for
    rank 2): a program reads all rows of its columns before it writes one. Entries of -1, and
    nodes that are in place already, are skipped, so padding touches nothing.

    Parameters
    ----------
    k_pool, v_pool : Tensor
        ``[layers, slots, heads, head_dim]`` and the same with another width, any dtype, any strides
        with a dense last axis; of any size, addresses are 64-bit.
    tail_slots : Tensor
        ``[B, n]`` int32, the slot of every node; may have a row stride.
    accept_index : Tensor
        ``[B, num_steps + 1]`` int32, nodes of the accepted path, -1 past its end.
    """
    layers, _, heads, k_dim = k_pool.shape
    v_dim = v_pool.shape[3]
    batch, width = accept_index.shape
    if not batch or width == 1:
        return
    nodes = triton.next_power_of_2(width)
    block = min(max(4096 // nodes, 16), triton.next_power_of_2(heads * max(k_dim, v_dim)))
    blocks = triton.cdiv(heads * k_dim, block) + triton.cdiv(heads * v_dim, block)
    k_pool, v_pool = (pool.view(_BITS[pool.element_size()]) for pool in (k_pool, v_pool))
    _commit_kv_kernel[(batch, layers, blocks)](
        k_pool, v_pool, tail_slots, accept_index,
        tail_slots.shape[1], width, tail_slots.stride(0), accept_index.stride(0),
        k_pool.stride(0), k_pool.stride(1), k_pool.stride(2),
        v_pool.stride(0), v_pool.stride(1), v_pool.stride(2),
        K_DIM=k_dim, V_DIM=v_dim, K_SIZE=heads * k_dim, V_SIZE=heads * v_dim,
        NODES=nodes, BLOCK=block, **launch_options(k_pool.device),
    )
