"""Begin and end a speculative step in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specattn.kernels.checks import as_columns


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
    draft_lens_out: Tensor | None = None,
    lead: int = 0,
) -> None:
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
    seq_lens_table: Tensor,
    bonus_table: Tensor,
    sources: Sequence[Tensor],
    tables: Sequence[Tensor],
    packed_out: Tensor,
) -> None:
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
    features_out: Tensor,
    last_rows_out: Tensor,
    after_out: Tensor,
) -> None:
    batch, depth = accept_index.shape
    path = accept_index.clamp(min=0).long()[:, :, None]  # [B, D, 1]
    features_out.copy_(features.gather(1, path.expand(-1, -1, features.shape[2])))
    first = torch.arange(batch, device=features.device) * depth
    last_rows_out.copy_(first + accept_lens.clamp(min=1) - 1)
    after_out.copy_(seq_lens + accept_lens)


def write_output(packed: Tensor, buffer: Tensor, turn: Tensor) -> None:
    at = int(turn)
    buffer[at, : len(packed)] = packed
    turn.fill_((at + 1) % len(buffer))
