"""Begin and end a speculative step on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.kernels import Launchers, on_triton
from specattn.kernels.checks import as_columns, require_dense

if TYPE_CHECKING:
    from specattn.kernels.step import triton as launch
else:
    launch = Launchers("specattn.kernels.step.triton")


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
    draft_lens_out: Tensor | None = None,
    lead: int = 0,
) -> None:
    """Gather the state that all phases of a step read.

    One launch gathers the state of the step's requests and derives the rest from it.
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
        ``[B, S, K]`` int64: length + lead + s, from 0 on for padding; S may be 0.
    tables : sequence of Tensor
        ``[R, w]`` or ``[R]`` each.
    outs : sequence of Tensor
        ``[B, w']`` or ``[B]``, w' at most w: the first columns of each request's row (padding: of
        row 0).
    draft_lens_out : Tensor, optional
        ``[B]`` int32, dense: length + lead, 0 for padding; for drafts that have read more of the
        text than the target.
    lead : int
        Tokens that a draft has read beyond the committed ones, below ``reserve_len``.

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
    if draft_lens_out is not None:
        named["draft_lens_out"] = draft_lens_out[:, None]
    _check_begin(rows, reserve_len, named, tables, outs)
    require_dense(
        rows=rows[:1],
        turn=turn,
        seq_lens=seq_lens,
        reserved=reserved,
        req_to_token=req_to_token[:1],
        rows_out=rows_out,
        seq_lens_out=seq_lens_out,
        draft_lens_out=draft_lens_out,
    )
    if not rows.shape[1]:
        return
    if on_triton(seq_lens):
        return launch.begin_step(
            rows=rows,
            turn=turn,
            seq_lens=seq_lens,
            reserved=reserved,
            req_to_token=req_to_token,
            reserve_len=reserve_len,
            rows_out=rows_out,
            seq_lens_out=seq_lens_out,
            window_out=window_out,
            positions_out=positions_out,
            draft_positions_out=draft_positions_out,
            tables=tables,
            outs=outs,
            draft_lens_out=draft_lens_out,
            lead=lead,
        )
    context = req_to_token.shape[1]
    rows = rows.to(seq_lens.device)[turn].flatten()
    length = seq_lens[rows].long()
    fits = (rows != 0) & (length + reserve_len <= reserved[rows].clamp(max=context))
    length = torch.where(fits, length, 0)
    row = torch.where(fits, rows, 0)
    rows_out.copy_(row)
    seq_lens_out.copy_(length)

    def count(size: int) -> Tensor:
        return torch.arange(size, device=rows.device)

    columns = length[:, None] + count(reserve_len)  # [B, W]
    window = req_to_token[row[:, None], columns.clamp(max=context - 1)]
    window_out.copy_(torch.where(fits[:, None], window, 0))
    positions_out.copy_(length[:, None] + count(positions_out.shape[1]))
    drafted = length + torch.where(fits, lead, 0)
    draft_positions_out.copy_((drafted[:, None] + count(draft_positions_out.shape[1]))[:, :, None])
    if draft_lens_out is not None:
        draft_lens_out.copy_(drafted)
    for table, out in zip(map(as_columns, tables), map(as_columns, outs), strict=True):
        out.copy_(table[row, : out.shape[1]])


def end_step(
    rows: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    accept_tokens: Tensor,
    bonus_tokens: Tensor,
    *,
    seq_lens_table: Tensor,
    bonus_table: Tensor,
    sources: Sequence[Tensor],
    tables: Sequence[Tensor],
    packed_out: Tensor,
) -> None:
    """Write the state after a step, and pack its output.

    One launch writes the state to its tables and packs what the host reads.
    Row 0 of a table is never written.

    Parameters
    ----------
    rows, seq_lens : Tensor
        ``[B]`` int64 and int32: rows and lengths that `begin_step` gave; rows other than 0 differ.
    accept_lens : Tensor
        ``[B]`` int32, by how many tokens each request grows.
    accept_tokens : Tensor
        ``[B, D]`` int64; may have a row stride.
    bonus_tokens : Tensor
        ``[B]`` int64, the last accepted token, from which the next step starts; -1 if the target
        had none.
    seq_lens_table, bonus_table : Tensor
        ``[R]`` int32 and int64, get the new lengths and the bonus tokens, 0 for -1.
    sources : sequence of Tensor
        ``[B, w']`` or ``[B]`` each, the new state; may have row strides.
    tables : sequence of Tensor
        ``[R, w]`` or ``[R]``, w at least w': the first columns of each request's row are written.
    packed_out : Tensor
        ``[B, 1 + D]`` int64: accepted tokens' count, then the tokens, the last of them -1 if the
        target had none; 0 for padding.

    Raises
    ------
    ValueError
        Before anything is written: if a source does not fit its table, or ``packed_out``
        or a stride is another.
    """
    batch, depth = accept_tokens.shape
    if packed_out.shape != (batch, 1 + depth):
        raise ValueError(f"packed_out must be [{batch}, {1 + depth}], got {list(packed_out.shape)}")
    _check_copies(batch, tables, sources, "sources")
    require_dense(
        rows=rows,
        seq_lens=seq_lens,
        accept_lens=accept_lens,
        accept_tokens=accept_tokens[:1],
        bonus_tokens=bonus_tokens,
        seq_lens_table=seq_lens_table,
        bonus_table=bonus_table,
        packed_out=packed_out[:1],
    )
    if not len(rows):
        return
    if on_triton(rows):
        return launch.end_step(
            rows=rows,
            seq_lens=seq_lens,
            accept_lens=accept_lens,
            accept_tokens=accept_tokens,
            bonus_tokens=bonus_tokens,
            seq_lens_table=seq_lens_table,
            bonus_table=bonus_table,
            sources=sources,
            tables=tables,
            packed_out=packed_out,
        )
    live = (rows != 0)[:, None]  # [B, 1]
    last = torch.arange(accept_tokens.shape[1], device=rows.device) == accept_lens[:, None] - 1
    told = torch.where(last & (bonus_tokens < 0)[:, None], -1, accept_tokens)
    packed = torch.cat([accept_lens[:, None].long(), told], 1)
    packed_out.copy_(torch.where(live, packed, 0))
    sources = (seq_lens + accept_lens, bonus_tokens.clamp(min=0), *sources)
    for source, table in zip(sources, (seq_lens_table, bonus_table, *tables), strict=True):
        new, wide = as_columns(source), as_columns(table)
        width = new.shape[1]
        # padding copies row 0 onto itself
        wide[rows, :width] = torch.where(live, new, wide[rows, :width])


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
    """Gather what the draft model reads of the accepted path.

    One launch gathers it.

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
    wanted = (*accept_index.shape, features.shape[2])
    if features_out.shape != wanted or len(features) != len(accept_index):
        raise ValueError(
            f"features_out must be {list(wanted)} for features of {len(accept_index)} requests, "
            f"got {list(features_out.shape)} and {len(features)}"
        )
    require_dense(
        features=features[:1, :1],
        features_out=features_out[:1, :1],
        accept_index=accept_index[:1],
        accept_lens=accept_lens,
        seq_lens=seq_lens,
        last_rows_out=last_rows_out,
        after_out=after_out,
    )
    if not accept_index.numel():
        return
    if on_triton(features):
        return launch.gather_path(
            features=features,
            accept_index=accept_index,
            accept_lens=accept_lens,
            seq_lens=seq_lens,
            features_out=features_out,
            last_rows_out=last_rows_out,
            after_out=after_out,
        )
    batch, depth = accept_index.shape
    path = accept_index.clamp(min=0).long()[:, :, None]  # [B, D, 1]
    features_out.copy_(features.gather(1, path.expand(-1, -1, features.shape[2])))
    first = torch.arange(batch, device=features.device) * depth
    last_rows_out.copy_(first + accept_lens.clamp(min=1) - 1)
    after_out.copy_(seq_lens + accept_lens)


def write_output(packed: Tensor, buffer: Tensor, turn: Tensor) -> None:
    """Write a step's tokens to pinned host memory.

    The tokens go to their turn of the buffer, and the turn is counted.
    The host finds them there once an event that is recorded after this launch has come; nothing
    is copied besides. The buffer is written over PCIe, which does not hold the device up.

    Parameters
    ----------
    packed : Tensor
        ``[B, w]`` int64; may have a row stride.
    buffer : Tensor
        ``[S, B', w]`` int64 with B' at least B, dense but for its first axis; pinned, or on the
        device. The first B rows of ``buffer[turn]`` are written.
    turn : Tensor
        ``[1]`` int64, at least 0 and below S; becomes the next one, 0 after the last.

    Raises
    ------
    ValueError
        Before anything is written: if the buffer has another width, or fewer rows.
    """
    rows, width = packed.shape
    dense = buffer.stride()[1:] == (width, 1)
    if buffer.shape[2] != width or buffer.shape[1] < rows or not dense:
        raise ValueError(
            f"buffer must be [S, at least {rows}, {width}], dense but for its first axis, "
            f"got {list(buffer.shape)} with strides {buffer.stride()}"
        )
    if on_triton(packed):
        return launch.write_output(packed=packed, buffer=buffer, turn=turn)
    at = int(turn)
    buffer[at, : len(packed)] = packed
    turn.fill_((at + 1) % len(buffer))


def _check_copies(batch: int, tables: Sequence[Tensor], parts: Sequence[Tensor], name: str) -> None:
    """Raise ValueError unless each of ``parts``, called ``name``, fits its table."""
    if len(tables) != len(parts):
        raise ValueError(f"{name} must be one per table, {len(tables)}, got {len(parts)}")
    for at, (table, part) in enumerate(zip(tables, parts, strict=True)):
        wide, narrow = as_columns(table), as_columns(part)
        width = wide.shape[-1]
        fits = narrow.dim() == wide.dim() == 2 and narrow.shape[-1] <= width
        if not fits or len(part) != batch or part.dtype != table.dtype:
            raise ValueError(
                f"{name}[{at}] must be [{batch}, at most {width}] {table.dtype}, "
                f"got {list(part.shape)} {part.dtype}"
            )
        for tensor in (wide, narrow):
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(
                    f"{name}[{at}] and its table must be dense in their last axis, "
                    f"got strides {tensor.stride()}"
                )


def _check_begin(
    rows: Tensor,
    reserve_len: int,
    outs: dict[str, Tensor],
    tables: Sequence[Tensor],
    copies: Sequence[Tensor],
) -> None:
    """Raise ValueError, before anything is written, unless the outputs are as documented."""
    batch = rows.shape[1]
    for name, out in outs.items():
        if len(out) != batch or (out.shape[-1] > 1 and out.stride(-1) != 1):
            raise ValueError(
                f"{name} must have {batch} rows and a dense last axis, got {list(out.shape)} "
                f"and strides {out.stride()}"
            )
    if outs["window_out"].shape != (batch, reserve_len):
        raise ValueError(
            f"window_out must be [{batch}, {reserve_len}], got {list(outs['window_out'].shape)}"
        )
    _check_copies(batch, tables, copies, "outs")
