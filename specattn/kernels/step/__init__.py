"""Begin and end a speculative step on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specattn.checks import require_dense, require_rows, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.indices.tables import table_slots
from specattn.kernels.launch import cdiv, launch_options, power_of_2

if TYPE_CHECKING:
    from specattn.batch import AcceptResult

launch = TritonModule("specattn.kernels.step.triton")

# columns of a table that the request's first program copies beside its metadata
_NARROW = 32
# bytes of a wide row that any other program copies
_BYTES = 8192
# features that a program gathers
_BLOCK = 2048
# numbers that the one program of `write_output` has under way at a time
_OUTPUT_BLOCK = 1024

# what is read, and where it is written: the first columns of rows of a table, on either side
Copies = Sequence[tuple[Tensor, Tensor]]


class StepStart(NamedTuple):
    """The outputs of `begin_step`, for all phases of a step.

    All but the lengths may have row strides; last axes are dense.

    Parameters
    ----------
    rows, seq_lens : Tensor
        ``[B]`` int64 and int32, dense: rows and lengths, 0 for padding.
    window : Tensor
        ``[B, W]`` int32: the slots after the committed tokens, 0 for padding.
    positions : Tensor
        ``[B, D]`` int64: length + d.
    draft_positions : Tensor
        ``[B, S, K]`` int64: length + read_ahead + s, from 0 on for padding; S may be 0.
    draft_lens : Tensor, optional
        ``[B]`` int32, dense: length + read_ahead, 0 for padding; for drafts that have read more of
        the text than the target.
    """

    rows: Tensor
    seq_lens: Tensor
    window: Tensor
    positions: Tensor
    draft_positions: Tensor
    draft_lens: Tensor | None = None


def begin_step(
    rows: Tensor,
    entry: Tensor,
    seq_lens: Tensor,
    reserved: Tensor,
    req_to_token: Tensor,
    *,
    reserve_len: int,
    out: StepStart,
    copies: Copies,
    read_ahead: int = 0,
) -> None:
    """Gather the state that all phases of a step read.

    One launch gathers the state of the step's requests and derives the rest from it.
    A request whose row is 0, or whose row lacks slots for ``reserve_len`` more tokens, becomes
    padding: row 0 and length 0. All phases start from the same length, so that one window of
    slots serves them all.

    Parameters
    ----------
    rows : Tensor
        ``[S, B]`` int64, each request's row of the tables, of S steps in flight; may have a row
        stride. Pinned memory, which the host may write until a launch, or on the device.
    entry : Tensor
        ``[1]`` int64, at least 0 and below S: whose rows are read.
    seq_lens, reserved : Tensor
        ``[R]`` int32, committed tokens of every row, and tokens that have slots; 0 in row 0.
    req_to_token : Tensor
        ``[R, context]`` int32, slot of every token; dense last axis.
    reserve_len : int
        W, slots that a step may use.
    out : StepStart
        What is written; its rows share no memory with ``rows``, which other programs still read.
    copies : sequence of tuple of Tensor
        Pairs of a table, ``[R, w]`` or ``[R]``, and its output, ``[B, w']`` or ``[B]`` with w' at
        most w: the first columns of each request's row (padding: of row 0).
    read_ahead : int
        Tokens that a draft has read beyond the committed ones, below ``reserve_len``.

    Raises
    ------
    ValueError
        Before anything is written: if a shape, a dtype of ``copies`` or a stride is another.
    """
    _check_start(out, rows.shape[1], reserve_len)
    _check_copies(rows.shape[1], [(copy, table) for table, copy in copies], "output")
    require_dense(entry=entry, seq_lens=seq_lens, reserved=reserved)
    require_rows(rows=rows, req_to_token=req_to_token)
    if not rows.shape[1]:
        return
    context, depth = req_to_token.shape[1], out.positions.shape[1]
    batch, steps, topk = out.draft_positions.shape
    if on_triton(seq_lens):
        narrow, wide, blocks = _split(copies)
        launch.begin_step_kernel[batch, 1 + blocks](
            rows,
            entry,
            seq_lens,
            reserved,
            req_to_token,
            *out,
            narrow,
            wide,
            context,
            reserve_len,
            depth,
            steps * topk,
            max(topk, 1),
            rows.stride(0),
            req_to_token.stride(0),
            out.window.stride(0),
            out.positions.stride(0),
            *out.draft_positions.stride()[:2],
            READ_AHEAD=read_ahead,
            NARROW=_NARROW,
            BYTES=_BYTES,
            BLOCK_W=power_of_2(reserve_len),
            BLOCK_D=power_of_2(depth),
            BLOCK_S=power_of_2(steps * topk),
        )
        return
    rows = rows.to(seq_lens.device)[entry].flatten()
    length = seq_lens[rows].long()
    fits = (rows != 0) & (length + reserve_len <= reserved[rows].clamp(max=context))
    length = torch.where(fits, length, 0)
    row = torch.where(fits, rows, 0)
    out.rows.copy_(row)
    out.seq_lens.copy_(length)

    def count(size: int) -> Tensor:
        return torch.arange(size, device=rows.device)

    columns = length[:, None] + count(reserve_len)  # [B, W]
    out.window.copy_(torch.where(fits[:, None], table_slots(req_to_token, row, columns), 0))
    out.positions.copy_(length[:, None] + count(depth))
    drafted = length + torch.where(fits, read_ahead, 0)
    ahead = drafted[:, None] + count(steps)
    out.draft_positions.copy_(ahead[:, :, None])
    if out.draft_lens is not None:
        out.draft_lens.copy_(drafted)
    for table, copy in copies:
        copied = _as_columns(copy)
        copied.copy_(_as_columns(table)[row, : copied.shape[1]])


def end_step(
    rows: Tensor,
    seq_lens: Tensor,
    accepted: AcceptResult,
    *,
    seq_lens_table: Tensor,
    bonus_table: Tensor,
    copies: Copies,
    packed_out: Tensor,
) -> None:
    """Write the state after a step, and pack its output.

    One launch writes the state to its tables and packs what the host reads.
    Row 0 of a table is never written.

    Parameters
    ----------
    rows, seq_lens : Tensor
        ``[B]`` int64 and int32: rows and lengths that `begin_step` gave; rows other than 0 differ.
    accepted : AcceptResult
        By which tokens each request grows. The next step starts from ``bonus_tokens``.
    seq_lens_table, bonus_table : Tensor
        ``[R]`` int32 and int64, get the new lengths and the bonus tokens, 0 for -1.
    copies : sequence of tuple of Tensor
        Pairs of new state, ``[B, w']`` or ``[B]`` with any row strides, and its table, ``[R, w]``
        or ``[R]`` with w at least w': the first columns of each request's row are written.
    packed_out : Tensor
        ``[B, 1 + D]`` int64: accepted tokens' count, then the tokens, the last of them -1 if the
        target had none; 0 for padding.

    Raises
    ------
    ValueError
        Before anything is written: if a source does not fit its table, or ``packed_out``
        or a stride is another.
    """
    batch, depth = accepted.accept_tokens.shape
    require_shape((batch, 1 + depth), packed_out=packed_out)
    _check_copies(batch, copies, "source")
    require_dense(
        rows=rows,
        seq_lens=seq_lens,
        accept_lens=accepted.accept_lens,
        bonus_tokens=accepted.bonus_tokens,
        seq_lens_table=seq_lens_table,
        bonus_table=bonus_table,
    )
    require_rows(accept_tokens=accepted.accept_tokens, packed_out=packed_out)
    if not len(rows):
        return
    if on_triton(rows):
        narrow, wide, blocks = _split(copies)
        launch.end_step_kernel[batch, 1 + blocks](
            rows,
            seq_lens,
            accepted.accept_lens,
            accepted.accept_tokens,
            accepted.bonus_tokens,
            seq_lens_table,
            bonus_table,
            packed_out,
            narrow,
            wide,
            depth,
            accepted.accept_tokens.stride(0),
            packed_out.stride(0),
            NARROW=_NARROW,
            BYTES=_BYTES,
            BLOCK_D=power_of_2(depth),
            **launch_options(rows.device),
        )
        return
    lens, bonus = accepted.accept_lens, accepted.bonus_tokens
    live = (rows != 0)[:, None]  # [B, 1]
    last = torch.arange(depth, device=rows.device) == lens[:, None] - 1
    told = torch.where(last & (bonus < 0)[:, None], -1, accepted.accept_tokens)
    packed = torch.cat([lens[:, None].long(), told], 1)
    packed_out.copy_(torch.where(live, packed, 0))
    own = [(seq_lens + lens, seq_lens_table), (bonus.clamp(min=0), bonus_table)]
    for source, table in (*own, *copies):
        new, kept = _as_columns(source), _as_columns(table)
        width = new.shape[1]
        # padding copies row 0 onto itself
        kept[rows, :width] = torch.where(live, new, kept[rows, :width])


def gather_path(
    features: Tensor,
    accepted: AcceptResult,
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
    accepted : AcceptResult
        The paths; past a path's end node 0 is read. ``accept_index`` may have a row stride.
    seq_lens : Tensor
        ``[B]`` int32, lengths before the step.
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
    accept_index, accept_lens = accepted.accept_index, accepted.accept_lens
    (batch, depth), width = accept_index.shape, features.shape[2]
    require_shape((batch, *features.shape[1:]), features=features)
    require_shape((batch, depth, width), features_out=features_out)
    require_rows(features=features, features_out=features_out, accept_index=accept_index)
    require_dense(accept_lens=accept_lens, seq_lens=seq_lens)
    require_dense(last_rows_out=last_rows_out, after_out=after_out)
    if not accept_index.numel():
        return
    if on_triton(features):
        launch.gather_path_kernel[batch * depth, max(cdiv(width, _BLOCK), 1)](
            features,
            accept_index,
            accept_lens,
            seq_lens,
            features_out,
            last_rows_out,
            after_out,
            depth,
            width,
            *features.stride()[:2],
            accept_index.stride(0),
            *features_out.stride()[:2],
            BLOCK=_BLOCK,
            **launch_options(features.device),
        )
        return
    path = accept_index.clamp(min=0).long()[:, :, None]  # [B, D, 1]
    features_out.copy_(features.gather(1, path.expand(-1, -1, width)))
    first = torch.arange(batch, device=features.device) * depth
    last_rows_out.copy_(first + accept_lens.clamp(min=1) - 1)
    after_out.copy_(seq_lens + accept_lens)


def write_output(packed: Tensor, buffer: Tensor, entry: Tensor) -> None:
    """Write a step's tokens to pinned host memory.

    The tokens go to their entry of the buffer, and the entry is counted.
    The host finds them there once an event that is recorded after this launch has come; nothing
    is copied besides. The buffer is written over PCIe, which does not hold the device up.

    Parameters
    ----------
    packed : Tensor
        ``[B, w]`` int64; may have a row stride.
    buffer : Tensor
        ``[S, B', w]`` int64 with B' at least B, dense but for its first axis; pinned, or on the
        device. The first B rows of ``buffer[entry]`` are written.
    entry : Tensor
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
        launch.write_output_kernel[(1,)](
            packed,
            buffer,
            entry,
            rows * width,
            width,
            len(buffer),
            packed.stride(0),
            buffer.stride(0),
            BLOCK=_OUTPUT_BLOCK,
            **launch_options(packed.device),
        )
        return
    at = int(entry)
    buffer[at, :rows] = packed
    entry.fill_((at + 1) % len(buffer))


def _check_copies(batch: int, copies: Copies, name: str) -> None:
    """Raise ValueError unless each part, called ``name``, fits its table."""
    for at, (part, table) in enumerate(copies):
        wide, narrow = _as_columns(table), _as_columns(part)
        width = wide.shape[-1]
        fits = narrow.dim() == wide.dim() == 2 and narrow.shape[-1] <= width
        if not fits or len(part) != batch or part.dtype != table.dtype:
            raise ValueError(
                f"the {name} of copies[{at}] must be [{batch}, at most {width}] {table.dtype}, "
                f"got {list(part.shape)} {part.dtype}"
            )
        require_rows(**{f"the {name} of copies[{at}]": narrow, f"the table of copies[{at}]": wide})


def _check_start(out: StepStart, batch: int, reserve_len: int) -> None:
    """Raise ValueError, before anything is written, unless the outputs are as documented."""
    parts = {f"out.{name}": tensor for name, tensor in out._asdict().items()}
    for name, tensor in parts.items():
        if tensor is not None and len(tensor) != batch:
            raise ValueError(f"{name} must have {batch} rows, got {list(tensor.shape)}")
    require_shape((batch, reserve_len), **{"out.window": out.window})
    require_rows(**parts)


def _split(copies: Copies) -> tuple[tuple[Any, ...], tuple[Any, ...], int]:
    """Return narrow and wide tables, as kernels take them, and wide blocks."""
    tables = []
    for source, target in copies:
        read, written = _as_columns(source), _as_columns(target)
        # tables may be wider than what is read or written of them
        width = min(read.shape[1], written.shape[1])
        tables.append((read, written, read.stride(0), written.stride(0), width))
    narrow = tuple(table for table in tables if 0 < table[-1] <= _NARROW)
    wide = tuple(table for table in tables if table[-1] > _NARROW)
    return narrow, wide, sum(cdiv(width * s.element_size(), _BYTES) for s, *_, width in wide)


def _as_columns(tensor: Tensor) -> Tensor:
    """Return a per-request number as a column; other tensors as they are."""
    return tensor[:, None] if tensor.dim() == 1 else tensor
