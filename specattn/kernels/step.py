"""Begin and end a speculative step on the device: state tables in, metadata, state tables out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from specattn.kernels.checks import require_dense
from specattn.kernels.launch import enter, launch_options
from specattn.kernels.reference.step import as_columns, check_begin, check_end, check_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# columns of a table that the request's first program copies beside its metadata
NARROW = 32
# bytes of a wide row that any other program copies
BYTES = 8192
# features that a program gathers
BLOCK = 2048


@triton.jit
def _copy_narrow(
    sources,
    targets,
    source_strides,
    target_strides,
    widths,
    source_row,
    target_row,
    live,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Copy one row of every narrow table; all loads are under way before the first store."""
    column = tl.arange(0, SIZE)  # [SIZE]
    values = ()
    for i in tl.static_range(COUNT):
        ptr = sources[i] + source_row * source_strides[i] + column
        value = tl.load(ptr, mask=live & (column < widths[i]))
        # Triton knows tuple addition, not unpacking; mypy knows empty tuples by length
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(COUNT):
        ptr = targets[i] + target_row * target_strides[i] + column
        tl.store(ptr, values[i], mask=live & (column < widths[i]))


@triton.jit
def _copy_part(source, target, block, width, live, BYTES: tl.constexpr):
    # blocks of equal bytes differ in length by dtype, so that no dtype is given another's layout
    SIZE: tl.constexpr = BYTES * 8 // source.dtype.element_ty.primitive_bitwidth
    column = block * SIZE + tl.arange(0, SIZE)  # [SIZE]
    ok = live & (column < width)
    tl.store(target + column, tl.load(source + column, mask=ok), mask=ok)


@triton.jit
def _copy_block(
    sources,
    targets,
    source_strides,
    target_strides,
    widths,
    source_row,
    target_row,
    live,
    block,
    COUNT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Copy block number ``block`` of one row of all wide tables, laid end to end."""
    for i in tl.static_range(COUNT):
        blocks = tl.cdiv(widths[i], BYTES * 8 // sources[i].dtype.element_ty.primitive_bitwidth)
        if (block >= 0) & (block < blocks):
            _copy_part(
                sources[i] + source_row * source_strides[i],
                targets[i] + target_row * target_strides[i],
                block,
                widths[i],
                live,
                BYTES,
            )
        block -= blocks


@triton.jit
def _begin_step_kernel(
    rows,  # [S, B] int64, in the host's memory
    turn,  # [1] int64
    seq_lens,  # [R] int32
    reserved,  # [R] int32
    req_to_token,  # [R, context] int32
    rows_out,  # [B] int64, out
    seq_lens_out,  # [B] int32, out
    window_out,  # [B, reserve_len] int32, out
    positions_out,  # [B, depth] int64, out
    draft_positions_out,  # [B, steps, topk] int64, out
    narrow_tables,
    narrow_outs,
    narrow_strides,
    narrow_out_strides,
    narrow_widths,
    wide_tables,
    wide_outs,
    wide_strides,
    wide_out_strides,
    wide_widths,
    context,
    reserve_len,
    depth,
    drafts,
    topk,
    stride_rows,
    stride_table,
    stride_window,
    stride_positions,
    stride_draft,
    stride_step,
    NARROWS: tl.constexpr,
    WIDES: tl.constexpr,
    NARROW: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    # no cache modifier: all warps of a multiprocessor share what comes over PCIe
    row = tl.load(rows + tl.load(turn) * stride_rows + req)
    length = tl.load(seq_lens + row).to(tl.int64)
    room = tl.minimum(tl.load(reserved + row), context)
    fits = (row != 0) & (length + reserve_len <= room)
    row = tl.where(fits, row, 0)
    length = tl.where(fits, length, 0)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_W)  # [BLOCK_W]
        inside = column < reserve_len
        slots = req_to_token + row * stride_table + length + column
        slot = tl.load(slots, mask=inside & fits, other=0)
        _copy_narrow(
            narrow_tables,
            narrow_outs,
            narrow_strides,
            narrow_out_strides,
            narrow_widths,
            row,
            req,
            True,
            NARROWS,
            NARROW,
        )
        tl.store(window_out + req * stride_window + column, slot, mask=inside)
        tl.store(rows_out + req, row)
        tl.store(seq_lens_out + req, length.to(tl.int32))
        ahead = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        tl.store(positions_out + req * stride_positions + ahead, length + ahead, mask=ahead < depth)
        draft = tl.arange(0, BLOCK_S)  # [BLOCK_S]
        step = draft // topk
        ptr = draft_positions_out + req * stride_draft + step * stride_step + draft % topk
        tl.store(ptr, length + step, mask=draft < drafts)
    else:
        _copy_block(
            wide_tables,
            wide_outs,
            wide_strides,
            wide_out_strides,
            wide_widths,
            row,
            req,
            True,
            tl.program_id(1) - 1,
            WIDES,
            BYTES,
        )


@triton.jit
def _end_step_kernel(
    rows,  # [B] int64
    seq_lens,  # [B] int32
    accept_lens,  # [B] int32
    accept_tokens,  # [B, depth] int64
    seq_lens_table,  # [R] int32, out
    packed_out,  # [B, 1 + depth] int64, out
    narrow_sources,
    narrow_tables,
    narrow_strides,
    narrow_table_strides,
    narrow_widths,
    wide_sources,
    wide_tables,
    wide_strides,
    wide_table_strides,
    wide_widths,
    depth,
    stride_tokens,
    stride_packed,
    NARROWS: tl.constexpr,
    WIDES: tl.constexpr,
    NARROW: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    req = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + req)
    live = row != 0
    if tl.program_id(1) == 0:
        count = tl.load(accept_lens + req)
        length = tl.load(seq_lens + req) + count
        rank = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        token = tl.load(accept_tokens + req * stride_tokens + rank, mask=rank < depth, other=0)
        _copy_narrow(
            narrow_sources,
            narrow_tables,
            narrow_strides,
            narrow_table_strides,
            narrow_widths,
            req,
            row,
            live,
            NARROWS,
            NARROW,
        )
        tl.store(seq_lens_table + row, length, mask=live)
        packed = packed_out + req * stride_packed
        tl.store(packed, tl.where(live, count, 0).to(tl.int64))
        tl.store(packed + 1 + rank, tl.where(live, token, 0), mask=rank < depth)
    else:
        _copy_block(
            wide_sources,
            wide_tables,
            wide_strides,
            wide_table_strides,
            wide_widths,
            req,
            row,
            live,
            tl.program_id(1) - 1,
            WIDES,
            BYTES,
        )


@triton.jit
def _gather_path_kernel(
    features,  # [B, n, width]
    accept_index,  # [B, depth] int32
    accept_lens,  # [B] int32
    seq_lens,  # [B] int32
    features_out,  # [B, depth, width], out
    last_rows_out,  # [B] int64, out
    after_out,  # [B] int64, out
    depth,
    width,
    stride_req,
    stride_node,
    stride_index,
    stride_out_req,
    stride_out,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    req = (tl.program_id(0) // depth).to(tl.int64)
    rank = tl.program_id(0) % depth
    node = tl.maximum(tl.load(accept_index + req * stride_index + rank), 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    ok = column < width
    value = tl.load(features + req * stride_req + node * stride_node + column, mask=ok)
    ptr = features_out + req * stride_out_req + rank.to(tl.int64) * stride_out + column
    tl.store(ptr, value.to(features_out.dtype.element_ty), mask=ok)
    if (rank == 0) & (tl.program_id(1) == 0):
        count = tl.load(accept_lens + req)
        after = tl.load(seq_lens + req).to(tl.int64) + count
        tl.store(last_rows_out + req, req * depth + tl.maximum(count, 1) - 1)
        tl.store(after_out + req, after)


def _split(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[list[Any], int, int, int]:
    """Return the kernels' ten tuples, how many tables are narrow and wide, and wide blocks."""
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
    *,
    reserve_len: int,
    rows_out: Tensor,
    seq_lens_out: Tensor,
    window_out: Tensor,
    positions_out: Tensor,
    draft_positions_out: Tensor,
    tables: Sequence[Tensor],
    outs: Sequence[Tensor],
) -> None:
    """Gather the state of a step's requests and derive what all its phases read, in one launch.

    A request whose row is 0, or whose row lacks slots for ``reserve_len`` more tokens, becomes
    padding: row 0 and length 0. All phases start from the same length, so that one window of
    slots serves them all. Outputs may have row strides; their last axis is dense.

    Parameters
    ----------
    rows : Tensor
        ``[S, B]`` int64, each request's row of the tables, of S steps in flight; may have a row
        stride. Pinned memory, which the host may write until a launch, or on the device.
    turn : Tensor
        ``[1]`` int64, at least 0 and below S: whose rows are read.
    seq_lens, reserved : Tensor
        ``[R]`` int32, committed tokens of every row, and tokens that have slots; 0 in row 0.
    req_to_token : Tensor
        ``[R, context]`` int32, slot of every token; dense last axis.
    reserve_len : int
        W, slots that a step may use.
    rows_out, seq_lens_out : Tensor
        ``[B]`` int64 and int32, dense: rows and lengths, 0 for padding; ``rows_out`` shares no
        memory with ``rows``, which other programs still read.
    window_out : Tensor
        ``[B, W]`` int32: the slots after the committed tokens, 0 for padding.
    positions_out : Tensor
        ``[B, D]`` int64: length + d.
    draft_positions_out : Tensor
        ``[B, S, K]`` int64: length + s; S may be 0.
    tables : sequence of Tensor
        ``[R, w]`` or ``[R]`` each.
    outs : sequence of Tensor
        ``[B, w']`` or ``[B]``, w' at most w: the first columns of each request's row (padding: of
        row 0).

    Raises
    ------
    ValueError
        Before anything is written: if a shape, a dtype of ``outs`` or a stride is another.
    """
    named = {
        "rows_out": rows_out,
        "seq_lens_out": seq_lens_out,
        "window_out": window_out,
        "positions_out": positions_out,
        "draft_positions_out": draft_positions_out,
    }
    check_begin(rows, reserve_len, named, tables, outs)
    require_dense(
        rows=rows[:1],
        turn=turn,
        seq_lens=seq_lens,
        reserved=reserved,
        req_to_token=req_to_token[:1],
        rows_out=rows_out,
        seq_lens_out=seq_lens_out,
    )
    batch, steps, topk = draft_positions_out.shape
    if not batch:
        return
    copies, narrows, wides, blocks = _split(tables, outs)
    depth = positions_out.shape[1]
    _begin_step_kernel[(batch, 1 + blocks)](
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
    *,
    seq_lens_table: Tensor,
    sources: Sequence[Tensor],
    tables: Sequence[Tensor],
    packed_out: Tensor,
) -> None:
    """Write the state after a step to its tables, and pack what the host reads, in one launch.

    Row 0 of a table is never written.

    Parameters
    ----------
    rows, seq_lens : Tensor
        ``[B]`` int64 and int32: rows and lengths that `begin_step` gave; rows other than 0 differ.
    accept_lens : Tensor
        ``[B]`` int32, by how many tokens each request grows.
    accept_tokens : Tensor
        ``[B, D]`` int64; may have a row stride.
    seq_lens_table : Tensor
        ``[R]`` int32, gets the new lengths.
    sources : sequence of Tensor
        ``[B, w']`` or ``[B]`` each, the new state; may have row strides.
    tables : sequence of Tensor
        ``[R, w]`` or ``[R]``, w at least w': the first columns of each request's row are written.
    packed_out : Tensor
        ``[B, 1 + D]`` int64: accepted tokens' count, then the tokens; 0 for padding.

    Raises
    ------
    ValueError
        Before anything is written: if a source does not fit its table, or ``packed_out``
        or a stride is another.
    """
    batch, depth = accept_tokens.shape
    check_end(accept_tokens, packed_out, tables, sources)
    require_dense(
        rows=rows,
        seq_lens=seq_lens,
        accept_lens=accept_lens,
        accept_tokens=accept_tokens[:1],
        seq_lens_table=seq_lens_table,
        packed_out=packed_out[:1],
    )
    if not batch:
        return
    copies, narrows, wides, blocks = _split(sources, tables)
    _end_step_kernel[(batch, 1 + blocks)](
        rows,
        seq_lens,
        accept_lens,
        accept_tokens,
        seq_lens_table,
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
    *,
    features_out: Tensor,
    last_rows_out: Tensor,
    after_out: Tensor,
) -> None:
    """Gather what the draft model reads of the accepted path, in one launch.

    Parameters
    ----------
    features : Tensor
        ``[B, n, F]``, the target's features at every node; any strides with a dense last axis.
    accept_index : Tensor
        ``[B, D]`` int32, nodes of the accepted path, -1 past its end, where node 0 is read; may
        have a row stride.
    accept_lens, seq_lens : Tensor
        ``[B]`` int32: accepted tokens, and lengths before the step.
    features_out : Tensor
        ``[B, D, F]``, in its own dtype; strides as ``features``.
    last_rows_out : Tensor
        ``[B]`` int64: where each path ends among the ``B * D`` rows, D * b for an empty one.
    after_out : Tensor
        ``[B]`` int64: lengths after the step.

    Raises
    ------
    ValueError
        Before anything is written: if the shape of ``features_out`` or a stride is another.
    """
    check_path(features, accept_index, features_out)
    batch, depth = accept_index.shape
    width = features.shape[2]
    require_dense(
        features=features[:1, :1],
        features_out=features_out[:1, :1],
        accept_index=accept_index[:1],
        accept_lens=accept_lens,
        seq_lens=seq_lens,
        last_rows_out=last_rows_out,
        after_out=after_out,
    )
    if not batch * depth:
        return
    _gather_path_kernel[(batch * depth, max(triton.cdiv(width, BLOCK), 1))](
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
