"""Slots and positions of a forward's new tokens, from the lengths: one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.launch import enter, launch_options
from specattn.kernels.reference.window import check_window

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _fill_window_kernel(
    req_to_token,  # [rows, context] int32
    rows,  # [B] int64
    seq_lens,  # [B] int32
    slots_out,  # [B, width] int32, out
    positions_out,  # [B, steps, topk] int64, out
    accept_lens,  # [B] int32
    last_rows_out,  # [B] int64, out
    after_out,  # [B] int64, out
    context,
    width,
    nodes,
    topk,
    stride_table,
    stride_slots,
    stride_positions,
    stride_step,
    POSITIONS: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    req = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + req).to(tl.int64)
    at = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    column = length + at
    slots = req_to_token + tl.load(rows + req) * stride_table + column
    slot = tl.load(slots, mask=(at < width) & (column < context), other=0)
    tl.store(slots_out + req * stride_slots + at, slot, mask=at < width)
    if POSITIONS:
        node = tl.arange(0, BLOCK_N)  # [BLOCK_N]
        step = node // topk
        ptr = positions_out + req * stride_positions + step * stride_step + node % topk
        tl.store(ptr, length + step, mask=node < nodes)
    if PATH:
        count = tl.load(accept_lens + req)
        tl.store(last_rows_out + req, req * width + tl.maximum(count, 1) - 1)
        tl.store(after_out + req, length + count)


def fill_window(
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    *,
    slots_out: Tensor,
    positions_out: Tensor | None = None,
    accept_lens: Tensor | None = None,
    last_rows_out: Tensor | None = None,
    after_out: Tensor | None = None,
) -> None:
    """Look up the slots after each request's committed tokens, and say where they are.

    Parameters
    ----------
    req_to_token : Tensor
        ``[R, context]`` int32, slot of every token; dense last axis.
    rows, seq_lens : Tensor
        ``[B]`` int64 and int32: each request's row, and its committed tokens.
    slots_out : Tensor
        ``[B, W]`` int32, may have a row stride: of columns length + w; 0 beyond the table.
    positions_out : Tensor, optional
        ``[B, S, K]`` int64 with a dense last axis: length + s.
    accept_lens : Tensor, optional
        ``[B]`` int32, how many of the W tokens are accepted; then the two that follow are needed.
    last_rows_out : Tensor, optional
        ``[B]`` int64: which of all requests' W tokens is the last accepted one, or the first one
        where none is.
    after_out : Tensor, optional
        ``[B]`` int64: length plus accepted.

    Raises
    ------
    ValueError
        Before anything is written: if a shape or a stride is another.
    """
    check_window(req_to_token, rows, seq_lens, slots_out, positions_out)
    batch, width = slots_out.shape
    if not batch:
        return
    steps, topk, strides = 0, 1, (0, 0)
    if positions_out is not None:
        steps, topk = positions_out.shape[1:]
        strides = positions_out.stride(0), positions_out.stride(1)
    _fill_window_kernel[(batch,)](
        req_to_token,
        rows,
        seq_lens,
        slots_out,
        positions_out,
        accept_lens,
        last_rows_out,
        after_out,
        req_to_token.shape[1],
        width,
        steps * topk,
        topk,
        req_to_token.stride(0),
        slots_out.stride(0),
        *strides,
        POSITIONS=positions_out is not None,
        PATH=accept_lens is not None,
        BLOCK_W=triton.next_power_of_2(max(width, 1)),
        BLOCK_N=triton.next_power_of_2(max(steps * topk, 1)),
        num_warps=1,
        **launch_options(rows.device),
    )
