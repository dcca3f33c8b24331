"""Twin of `specattn.kernels.window`, and the shape checks of both."""

from __future__ import annotations

import torch
from torch import Tensor


def check_window(
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    slots_out: Tensor,
    positions_out: Tensor | None,
) -> None:
    """Raise ValueError, before anything is written, unless the tensors are as documented."""
    batch, dense = len(rows), {"req_to_token": req_to_token, "slots_out": slots_out}
    if len(seq_lens) != batch or slots_out.dim() != 2 or len(slots_out) != batch:
        raise ValueError(
            f"seq_lens and slots_out must be [{batch}] and [{batch}, W], "
            f"got {list(seq_lens.shape)} and {list(slots_out.shape)}"
        )
    if positions_out is not None:
        dense["positions_out"] = positions_out
        if positions_out.dim() != 3 or len(positions_out) != batch:
            raise ValueError(
                f"positions_out must be [{batch}, S, K], got {list(positions_out.shape)}"
            )
    for name, tensor in dense.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have a dense last axis, got strides {tensor.stride()}")


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
    """See `specattn.kernels.window.fill_window`."""
    check_window(req_to_token, rows, seq_lens, slots_out, positions_out)
    (batch, width), context = slots_out.shape, req_to_token.shape[1]
    length = seq_lens.long()
    columns = length[:, None] + torch.arange(width, device=rows.device)  # [B, W]
    found = req_to_token[rows[:, None], columns.clamp(max=context - 1)]
    slots_out.copy_(torch.where(columns < context, found, 0))
    if positions_out is not None:
        depth = torch.arange(positions_out.shape[1], device=rows.device)
        positions_out.copy_((length[:, None] + depth)[:, :, None])
    if accept_lens is not None:
        assert last_rows_out is not None
        assert after_out is not None
        first = torch.arange(batch, device=rows.device) * width
        last_rows_out.copy_(first + accept_lens.clamp(min=1) - 1)
        after_out.copy_(length + accept_lens)
