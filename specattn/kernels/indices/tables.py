"""Windows of slots, and tables of slots and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_rows, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import cdiv, launch_options, power_of_2, programs_per_row
from specattn.kernels.words import seen_slots, unpack_words

if TYPE_CHECKING:
    from specattn.kernels.indices.lists import KeySlots

launch = TritonModule("specattn.kernels.indices.triton_tables")


def fill_window(keys: KeySlots, *, positions_out: Tensor | None = None) -> None:
    """Look up the slots and positions after each request's committed tokens.

    Parameters
    ----------
    keys : KeySlots
        Its tail is written: the slots of the table's columns after the prefix; 0 beyond the table.
    positions_out : Tensor, optional
        ``[B, S, K]`` int64 with a dense last axis: length + s.

    Raises
    ------
    ValueError
        Before anything is written: if a shape or a stride is another.
    """
    req_to_token, rows, seq_lens, tail_slots = keys
    batch, width = len(rows), tail_slots.shape[-1]
    require_shape((batch,), seq_lens=seq_lens)
    require_shape((batch, width), tail=tail_slots)
    if positions_out is not None:
        require_shape((batch, *positions_out.shape[-2:]), positions_out=positions_out)
    require_rows(req_to_token=req_to_token, tail=tail_slots, positions_out=positions_out)
    if not batch:
        return
    if on_triton(seq_lens):
        steps, topk = (0, 1) if positions_out is None else positions_out.shape[1:]
        launch.fill_window_kernel[(batch,)](
            keys.arguments(),
            positions_out,
            req_to_token.shape[1],
            width,
            steps * topk,
            topk,
            *((0, 0) if positions_out is None else positions_out.stride()[:2]),
            BLOCK_W=power_of_2(width),
            BLOCK_N=power_of_2(steps * topk),
            num_warps=1,
            **launch_options(rows.device),
        )
        return
    length = seq_lens.long()
    columns = length[:, None] + torch.arange(width, device=rows.device)  # [B, W]
    tail_slots.copy_(table_slots(req_to_token, rows, columns))
    if positions_out is not None:
        depth = torch.arange(positions_out.shape[1], device=rows.device)
        positions_out.copy_((length[:, None] + depth)[:, :, None])


def fill_block_table(
    keys: KeySlots, *, table: Tensor, lens: Tensor, page_size: int, lists: int = 1
) -> None:
    """List every request's pages: its prefix's, then its tail's.

    The slot of key ``p`` must be ``page * page_size + p % page_size``: whole, aligned pages, in
    the order of the keys. Only the first slot of a page is read.

    Parameters
    ----------
    keys : KeySlots
        The slots; a tail of at least ``lists``.
    table : Tensor
        ``[B * lists, width]`` int32, written whole: columns past a list's pages hold page 0.
        ``ceil((max_len + tail) / page_size)`` columns hold any list.
    lens : Tensor
        ``[B * lists]`` int32, written: the keys of every list.
    page_size : int
        Slots of a page.
    lists : int
        Lists per request. One has all its keys. With more, they are of its last query tokens:
        each ends at its token, for kernels that know neither masks nor several queries.
    """
    req_to_token, _, seq_lens, tail_slots = keys
    max_len, tail, width = req_to_token.shape[1], tail_slots.shape[1], table.shape[1]
    if on_triton(table):
        block = min(256, power_of_2(width))
        programs = programs_per_row(len(table), cdiv(width, block))
        launch.fill_block_table_kernel[len(table), programs](
            keys.arguments(),
            table,
            lens,
            max_len,
            tail,
            lists,
            width,
            table.stride(0),
            PAGE=page_size,
            BLOCK=block,
        )
        return
    prefix = seq_lens.clamp(0, max_len).long()[:, None, None]  # [B, 1, 1]
    order = torch.arange(lists, device=table.device)[:, None]
    length = prefix + tail - (lists - 1) + order  # [B, lists, 1]
    lens.copy_(length.flatten())
    place = torch.arange(width, device=table.device) * page_size  # [width]
    pages = keys.at(place) // page_size  # [B, width]
    table.copy_(torch.where(place < length, pages[:, None], 0).flatten(0, 1))


def fill_slots(
    rows: Tensor,
    block_table: Tensor,
    lens: Tensor,
    *,
    req_to_token: Tensor,
    reserved: Tensor,
    page_size: int,
    block_stride: int,
    num_blocks: int,
) -> None:
    """Write the slots of every line's blocks into its row.

    ``reserved`` gets the number of tokens that have slots. Allocates nothing and never waits for
    the device.

    Parameters
    ----------
    rows : Tensor
        ``[B]`` int64, rows of ``req_to_token``, all different; lines of row 0 are skipped.
    block_table : Tensor
        ``[B, blocks]`` int32; may have a row stride. Blocks past a line's length are not read.
    lens : Tensor
        ``[B]`` int32, tokens that get slots; cut to 0..the smaller of context and blocks.
    req_to_token : Tensor
        ``[R, context]`` int32, in place, up to each length; may have a row stride.
    reserved : Tensor
        ``[R]`` int32, in place: the lengths; 0 in row 0.
    page_size : int
        Slots of a block.
    block_stride : int
        Slots from the first of a block to the first of the next.
    num_blocks : int
        Blocks of the pools; one that is none of them becomes block 0, padding's.
    """
    if not len(rows):
        return
    room = min(req_to_token.shape[1], block_table.shape[1] * page_size)
    if on_triton(req_to_token):
        block = min(1024, power_of_2(room))
        programs = programs_per_row(len(rows), cdiv(room, block))
        launch.fill_slots_kernel[len(rows), programs](
            rows,
            block_table,
            lens,
            req_to_token,
            reserved,
            room,
            num_blocks,
            block_table.stride(0),
            req_to_token.stride(0),
            PAGE=page_size,
            BLOCK_STRIDE=block_stride,
            BLOCK=block,
        )
        return
    length = torch.where(rows != 0, lens.clamp(0, room), 0)
    reserved[rows] = length
    place = torch.arange(room, device=rows.device)
    blocks = block_table[:, place // page_size]  # [B, room]
    blocks = torch.where((blocks >= 0) & (blocks < num_blocks), blocks, 0)
    slots = blocks * block_stride + place % page_size
    kept = req_to_token[rows, :room]
    req_to_token[rows, :room] = torch.where(place < length[:, None], slots.to(kept), kept)


def fill_page_table(
    keys: KeySlots, *, table: Tensor, lens: Tensor, q_len: int, window_left: int = -1
) -> None:
    """List every request's slots: its prefix, then its tail.

    Under a window, keys that the first query token (and so any other) does not see are left out;
    the rest keep their distance to the end of the list, so a causal kernel that counts its window
    from there still sees the right ones, and never loads a key nobody sees.

    Parameters
    ----------
    keys : KeySlots
        The slots; a tail of at least 1.
    table : Tensor
        ``[B, width]`` int32, written up to each row's length. ``max_len + tail`` columns hold any
        list, under a window ``window_left + q_len`` do; longer lists are cut at the width.
    lens : Tensor
        ``[B]`` int32, written: the length of every list.
    q_len : int
        Query tokens per request, the last of the tail.
    window_left : int
        See `specattn.config.AttnConfig`.
    """
    req_to_token, _, seq_lens, tail_slots = keys
    max_len, tail, width = req_to_token.shape[1], tail_slots.shape[1], table.shape[1]
    if on_triton(table):
        block = min(1024, power_of_2(width))
        programs = programs_per_row(len(table), cdiv(width, block))
        launch.fill_page_table_kernel[len(table), programs](
            keys.arguments(),
            table,
            lens,
            max_len,
            tail,
            q_len,
            window_left,
            width,
            table.stride(0),
            WINDOW=window_left >= 0,
            BLOCK=block,
        )
        return
    prefix = seq_lens.clamp(0, max_len).long()[:, None]  # [B, 1]
    start = torch.zeros_like(prefix)
    if window_left >= 0:
        start = (prefix + tail - q_len - window_left).clamp(min=0)
    lens.copy_((prefix + tail - start).squeeze(1).clamp(max=width))
    place = start + torch.arange(width, device=table.device)  # [B, width]
    table.copy_(torch.where(place < prefix + tail, keys.at(place), table))


def fill_ancestor_table(
    tail_slots: Tensor, tail_words: Tensor, *, table: Tensor, lens: Tensor
) -> None:
    """List the slots of the tail keys each query token sees.

    The slots are in the order of the keys' bits.

    Parameters
    ----------
    tail_slots : Tensor
        ``[B, tail]`` int32; may have a row stride.
    tail_words : Tensor
        ``[B, q_len, ceil(tail / 64)]`` int64, bit j set iff tail key j is seen; bits past the tail
        are ignored. Dense last axis.
    table : Tensor
        ``[B * q_len, tail]`` int32, contiguous, written up to each row's length.
    lens : Tensor
        ``[B * q_len]`` int32, written: how many keys each query token sees.
    """
    (batch, tail), q_len = tail_slots.shape, tail_words.shape[1]
    if on_triton(table):
        block = power_of_2(tail)
        rows = max(1, 512 // block)
        launch.fill_ancestor_table_kernel[(cdiv(len(table), rows),)](
            tail_slots,
            tail_words,
            table,
            lens,
            len(table),
            tail,
            q_len,
            tail_slots.stride(0),
            *tail_words.stride()[:2],
            BLOCK=block,
            ROWS=rows,
            num_warps=4,
        )
        return
    lens.copy_(unpack_words(tail_words, tail).sum(2).flatten())
    listed = seen_slots(tail_words, tail_slots, table.view(batch, q_len, tail))
    table.copy_(listed.flatten(0, 1))


def table_slots(req_to_token: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``[B, n]`` slots of rows' columns; 0 beyond the table."""
    context = req_to_token.shape[1]
    found = req_to_token[rows[:, None], columns.clamp(max=context - 1)]
    return torch.where(columns < context, found, 0)
