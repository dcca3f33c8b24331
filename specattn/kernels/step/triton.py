"""Launches of the kernels that begin and end a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton

from specattn.kernels.checks import as_columns
from specattn.kernels.launch import launch_options
from specattn.kernels.step.triton_step import (
    begin_step_kernel,
    end_step_kernel,
    gather_path_kernel,
    write_output_kernel,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# columns of a table that the request's first program copies beside its metadata
NARROW = 32

# bytes of a wide row that any other program copies
BYTES = 8192

# features that a program gathers
BLOCK = 2048

# numbers that the one program of `write_output` has under way at a time
OUTPUT_BLOCK = 1024


def _split(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[list[Any], int, int, int]:
    """Return the kernels' tables in two groups by width.

    That is ten tuples, the numbers of narrow and of wide tables, and the number of wide blocks.
    """
    pairs = [(as_columns(s), as_columns(t)) for s, t in zip(sources, targets, strict=True)]
    # tables may be wider than what is read or written of them
    sized = [(s, t, min(s.shape[1], t.shape[1])) for s, t in pairs]
    narrow = [part for part in sized if 0 < part[2] <= NARROW]
    wide = [part for part in sized if part[2] > NARROW]
    arguments: list[Any] = []
    for parts in (narrow, wide):
        arguments += [
            tuple(s for s, _, _ in parts),
            tuple(t for _, t, _ in parts),
            tuple(s.stride(0) for s, _, _ in parts),
            tuple(t.stride(0) for _, t, _ in parts),
            tuple(width for _, _, width in parts),
        ]
    blocks = sum(triton.cdiv(width * s.element_size(), BYTES) for s, _, width in wide)
    return arguments, len(narrow), len(wide), blocks


def begin_step(
    rows: Tensor,
    turn: Tensor,
    seq_lens: Tensor,
    reserved: Tensor,
    req_to_token: Tensor,
    reserve_len: int,
    rows_out: Tensor,
    seq_lens_out: Tensor,
    window_out: Tensor,
    positions_out: Tensor,
    draft_positions_out: Tensor,
    tables: Sequence[Tensor],
    outs: Sequence[Tensor],
) -> None:
    batch, steps, topk = draft_positions_out.shape
    copies, narrows, wides, blocks = _split(tables, outs)
    depth = positions_out.shape[1]
    begin_step_kernel[(batch, 1 + blocks)](
        rows,
        turn,
        seq_lens,
        reserved,
        req_to_token,
        rows_out,
        seq_lens_out,
        window_out,
        positions_out,
        draft_positions_out,
        *copies,
        req_to_token.shape[1],
        reserve_len,
        depth,
        steps * topk,
        max(topk, 1),
        rows.stride(0),
        req_to_token.stride(0),
        window_out.stride(0),
        positions_out.stride(0),
        draft_positions_out.stride(0),
        draft_positions_out.stride(1),
        NARROWS=narrows,
        WIDES=wides,
        NARROW=NARROW,
        BYTES=BYTES,
        BLOCK_W=triton.next_power_of_2(max(reserve_len, 1)),
        BLOCK_D=triton.next_power_of_2(max(depth, 1)),
        BLOCK_S=triton.next_power_of_2(max(steps * topk, 1)),
    )


def end_step(
    rows: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    accept_tokens: Tensor,
    bonus_tokens: Tensor,
    seq_lens_table: Tensor,
    bonus_table: Tensor,
    sources: Sequence[Tensor],
    tables: Sequence[Tensor],
    packed_out: Tensor,
) -> None:
    batch, depth = accept_tokens.shape
    copies, narrows, wides, blocks = _split(sources, tables)
    end_step_kernel[(batch, 1 + blocks)](
        rows,
        seq_lens,
        accept_lens,
        accept_tokens,
        bonus_tokens,
        seq_lens_table,
        bonus_table,
        packed_out,
        *copies,
        depth,
        accept_tokens.stride(0),
        packed_out.stride(0),
        NARROWS=narrows,
        WIDES=wides,
        NARROW=NARROW,
        BYTES=BYTES,
        BLOCK_D=triton.next_power_of_2(max(depth, 1)),
        **launch_options(rows.device),
    )


def gather_path(
    features: Tensor,
    accept_index: Tensor,
    accept_lens: Tensor,
    seq_lens: Tensor,
    features_out: Tensor,
    last_rows_out: Tensor,
    after_out: Tensor,
) -> None:
    batch, depth = accept_index.shape
    width = features.shape[2]
    gather_path_kernel[(batch * depth, max(triton.cdiv(width, BLOCK), 1))](
        features,
        accept_index,
        accept_lens,
        seq_lens,
        features_out,
        last_rows_out,
        after_out,
        depth,
        width,
        features.stride(0),
        features.stride(1),
        accept_index.stride(0),
        features_out.stride(0),
        features_out.stride(1),
        BLOCK=BLOCK,
        **launch_options(features.device),
    )


def write_output(packed: Tensor, buffer: Tensor, turn: Tensor) -> None:
    batch, width = packed.shape
    write_output_kernel[(1,)](
        packed,
        buffer,
        turn,
        batch * width,
        width,
        len(buffer),
        packed.stride(0),
        buffer.stride(0),
        BLOCK=OUTPUT_BLOCK,
        **launch_options(packed.device),
    )
