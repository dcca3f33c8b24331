"""Twin of `specattn.kernels.step`, and the shape checks of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def as_columns(tensor: Tensor) -> Tensor:
    """Return a per-request number as a column of width 1, anything else as it is."""
    return tensor[:, None] if tensor.dim() == 1 else tensor


def check_copies(batch: int, tables: Sequence[Tensor], parts: Sequence[Tensor], name: str) -> None:
    """Raise ValueError unless each of ``parts``, called ``name``, fits the table of its index."""
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


def check_begin(
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
    check_copies(batch, tables, copies, "outs")


def check_end(
    accept_tokens: Tensor, packed_out: Tensor, tables: Sequence[Tensor], sources: Sequence[Tensor]
) -> None:
    """Raise ValueError, before anything is written, unless sources and output fit."""
    batch, depth = accept_tokens.shape
    if packed_out.shape != (batch, 1 + depth):
        raise ValueError(f"packed_out must be [{batch}, {1 + depth}], got {list(packed_out.shape)}")
    check_copies(batch, tables, sources, "sources")


def check_path(features: Tensor, accept_index: Tensor, features_out: Tensor) -> None:
    """Raise ValueError, before anything is written, unless the output fits."""
    wanted = (*accept_index.shape, features.shape[2])
    if features_out.shape != wanted or len(features) != len(accept_index):
        raise ValueError(
            f"features_out must be {list(wanted)} for features of {len(accept_index)} requests, "
            f"got {list(features_out.shape)} and {len(features)}"
        )


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
    """See `specattn.kernels.step.begin_step`."""
    named = {
        "rows_out": rows_out,
        "seq_lens_out": seq_lens_out,
        "window_out": window_out,
        "positions_out": positions_out,
        "draft_positions_out": draft_positions_out,
    }
    check_begin(rows, reserve_len, named, tables, outs)
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
    draft_positions_out.copy_((length[:, None] + count(draft_positions_out.shape[1]))[:, :, None])
    for table, out in zip(map(as_columns, tables), map(as_columns, outs), strict=True):
        out.copy_(table[row, : out.shape[1]])


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
    """See `specattn.kernels.step.end_step`."""
    check_end(accept_tokens, packed_out, tables, sources)
    live = (rows != 0)[:, None]  # [B, 1]
    packed = torch.cat([accept_lens[:, None].long(), accept_tokens], 1)
    packed_out.copy_(torch.where(live, packed, 0))
    for source, table in zip(
        (seq_lens + accept_lens, *sources), (seq_lens_table, *tables), strict=True
    ):
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
    """See `specattn.kernels.step.gather_path`."""
    check_path(features, accept_index, features_out)
    batch, depth = accept_index.shape
    path = accept_index.clamp(min=0).long()[:, :, None]  # [B, D, 1]
    features_out.copy_(features.gather(1, path.expand(-1, -1, features.shape[2])))
    first = torch.arange(batch, device=features.device) * depth
    last_rows_out.copy_(first + accept_lens.clamp(min=1) - 1)
    after_out.copy_(seq_lens + accept_lens)
