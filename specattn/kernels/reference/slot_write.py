"""Twin of `specattn.kernels.slot_write`."""

from __future__ import annotations

import torch
from torch import Tensor


def write_slots(
    packed: Tensor,
    req_to_token: Tensor,
    reserved: Tensor,
    *,
    pieces: int,
    longest: int,
    page_size: int,
) -> None:
    """See `specattn.kernels.slot_write.write_slots`; reads the pieces on the host."""
    for row, column, count, first, room in packed[: 5 * pieces].view(5, pieces).T.tolist():
        pages = packed[first : first - (-count // page_size), None]  # [pages, 1]
        within = torch.arange(page_size, dtype=torch.int32, device=packed.device)
        slots = (pages * page_size + within).view(-1)[:count]
        req_to_token[row, column : column + count] = slots
        reserved[row] = room
