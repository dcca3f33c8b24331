"""Launches of the kernels of index lists, tables and masks."""

from __future__ import annotations

import triton
from torch import Tensor

from specattn.kernels.indices.triton_list import (
    fill_draft_kv_kernel,
    fill_draft_tails_kernel,
    fill_lists_kernel,
    pack_masks_kernel,
)
from specattn.kernels.indices.triton_table import (
    fill_ancestor_table_kernel,
    fill_block_table_kernel,
    fill_page_table_kernel,
    fill_slots_kernel,
    fill_window_kernel,
)
from specattn.kernels.launch import launch_options, programs_per_row


def fill_window(
    *,
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    slots_out: Tensor,
    positions_out: Tensor | None,
) -> None:
    batch, width = slots_out.shape
    steps, topk, strides = 0, 1, (0, 0)
    if positions_out is not None:
        steps, topk = positions_out.shape[1:]
        strides = positions_out.stride(0), positions_out.stride(1)
    fill_window_kernel[(batch,)](
        req_to_token,
        rows,
        seq_lens,
        slots_out,
        positions_out,
        req_to_token.shape[1],
        width,
        steps * topk,
        topk,
        req_to_token.stride(0),
        slots_out.stride(0),
        *strides,
        POSITIONS=positions_out is not None,
        BLOCK_W=triton.next_power_of_2(max(width, 1)),
        BLOCK_N=triton.next_power_of_2(max(steps * topk, 1)),
        num_warps=1,
        **launch_options(rows.device),
    )


def fill_lists(
    *,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    tail_slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    window_left: int,
) -> None:
    batch, tail = tail_slots.shape
    block = 512
    blocks = triton.cdiv(req_to_token.shape[1] + tail, block)
    grid = (batch, programs_per_row(batch, blocks))
    fill_lists_kernel[grid](
        req_to_token,
        req_pool_indices,
        seq_lens,
        positions,
        tail_slots,
        kv_indptr,
        kv_indices,
        positions.shape[1],
        tail,
        window_left,
        req_to_token.stride(0),
        positions.stride(0),
        tail_slots.stride(0),
        WINDOW=window_left >= 0,
        BLOCK=block,
        BLOCK_Q=triton.next_power_of_2(max(positions.shape[1], 1)),
        num_warps=4,
    )


def pack_masks(
    *,
    kv_indptr: Tensor,
    mask_indptr: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    tail_positions: Tensor,
    tail_words: Tensor,
    mask: Tensor,
    window_left: int,
) -> None:
    batch, q_len, _ = tail_words.shape
    block = 256
    grid = (batch, programs_per_row(batch, triton.cdiv(len(mask), block * batch)))
    pack_masks_kernel[grid](
        kv_indptr,
        mask_indptr,
        seq_lens,
        positions,
        tail_positions,
        tail_words,
        mask,
        q_len,
        tail_positions.shape[1],
        window_left,
        positions.stride(0),
        tail_positions.stride(0),
        tail_words.stride(0),
        tail_words.stride(1),
        WINDOW=window_left >= 0,
        BLOCK=block,
        num_warps=4,
    )


def fill_block_table(
    *,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    page_size: int,
    lists: int,
) -> None:
    width = table.shape[1]
    block = min(256, triton.next_power_of_2(width))
    grid = (len(table), programs_per_row(len(table), triton.cdiv(width, block)))
    fill_block_table_kernel[grid](
        req_to_token,
        req_pool_indices,
        seq_lens,
        tail_slots,
        table,
        lens,
        req_to_token.shape[1],
        tail_slots.shape[1],
        lists,
        width,
        req_to_token.stride(0),
        tail_slots.stride(0),
        table.stride(0),
        PAGE=page_size,
        BLOCK=block,
    )


def fill_slots(
    *,
    rows: Tensor,
    block_table: Tensor,
    lens: Tensor,
    req_to_token: Tensor,
    reserved: Tensor,
    page_size: int,
    block_stride: int,
) -> None:
    room = min(req_to_token.shape[1], block_table.shape[1] * page_size)
    block = min(1024, triton.next_power_of_2(max(room, 1)))
    grid = (len(rows), programs_per_row(len(rows), triton.cdiv(max(room, 1), block)))
    fill_slots_kernel[grid](
        rows,
        block_table,
        lens,
        req_to_token,
        reserved,
        room,
        block_table.stride(0),
        req_to_token.stride(0),
        PAGE=page_size,
        BLOCK_STRIDE=block_stride,
        BLOCK=block,
    )


def fill_page_table(
    *,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tail_slots: Tensor,
    table: Tensor,
    lens: Tensor,
    q_len: int,
    window_left: int,
) -> None:
    width = table.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    grid = (len(table), programs_per_row(len(table), triton.cdiv(width, block)))
    fill_page_table_kernel[grid](
        req_to_token,
        req_pool_indices,
        seq_lens,
        tail_slots,
        table,
        lens,
        req_to_token.shape[1],
        tail_slots.shape[1],
        q_len,
        window_left,
        width,
        req_to_token.stride(0),
        tail_slots.stride(0),
        table.stride(0),
        WINDOW=window_left >= 0,
        BLOCK=block,
    )


def fill_ancestor_table(
    *, tail_slots: Tensor, tail_words: Tensor, table: Tensor, lens: Tensor
) -> None:
    tail = tail_slots.shape[1]
    block = triton.next_power_of_2(tail)
    rows = max(1, 512 // block)
    fill_ancestor_table_kernel[(triton.cdiv(len(table), rows),)](
        tail_slots,
        tail_words,
        table,
        lens,
        len(table),
        tail,
        tail_words.shape[1],
        tail_slots.stride(0),
        tail_words.stride(0),
        tail_words.stride(1),
        BLOCK=block,
        ROWS=rows,
        num_warps=4,
    )


def fill_draft_kv(
    *,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    branch_slots: Tensor,
    words: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    batch, steps, topk, num_words = words.shape
    max_len = req_to_token.shape[1]
    block = min(1024, triton.next_power_of_2(max_len))
    programs = programs_per_row(batch * topk * steps, triton.cdiv(max_len, block))
    fill_draft_kv_kernel[(batch * topk, programs, steps)](
        req_to_token,
        req_pool_indices,
        seq_lens,
        branch_slots,
        words,
        kv_indptr,
        kv_indices,
        steps,
        max_len,
        kv_indices.shape[1],
        req_to_token.stride(0),
        branch_slots.stride(0),
        kv_indptr.stride(0),
        kv_indices.stride(0),
        TOPK=topk,
        W=num_words,
        BLOCK=block,
        BLOCK_B=128,
        BLOCK_J=triton.next_power_of_2(steps * topk),
        BLOCK_S=triton.next_power_of_2(steps),
    )


def fill_draft_tails(
    *,
    step: int,
    seq_lens: Tensor,
    branch_slots: Tensor,
    words: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    batch, _, topk, num_words = words.shape
    fill_draft_tails_kernel[(batch * topk,)](
        seq_lens,
        branch_slots,
        words[:, step],
        kv_indptr[step],
        kv_indices[step],
        step,
        kv_indices.shape[1],
        branch_slots.stride(0),
        words.stride(0),
        TOPK=topk,
        W=num_words,
        BLOCK_J=triton.next_power_of_2((step + 1) * topk),
        BLOCK_S=triton.next_power_of_2(step + 1),
        num_warps=1,
    )
