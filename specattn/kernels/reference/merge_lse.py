"""Twin of `specattn.kernels.merge_lse`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_lse(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    prefix_keys: Tensor,
    tail_out: Tensor,
    tail_lse: Tensor,
    tail_keys: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    base2: bool = False,
) -> None:
    """See `specattn.kernels.merge_lse.merge_lse`."""
    nothing, unit = float("-inf"), math.log(2) if base2 else 1.0
    has_prefix = (prefix_keys > 0)[:, None, None]  # [B, 1, 1]
    has_tail = (tail_keys > 0)[:, :, None]  # [B, T, 1]
    logs = (
        torch.stack(
            [  # [2, B, T, H]
                prefix_lse.masked_fill(~has_prefix, nothing),
                tail_lse.masked_fill(~has_tail, nothing),
            ]
        )
        * unit
    )
    total = torch.logsumexp(logs, 0)
    weights = torch.exp(logs - total.masked_fill(total == nothing, 0))[..., None]
    parts = (
        prefix_out.float().masked_fill(~has_prefix[..., None], 0),
        tail_out.float().masked_fill(~has_tail[..., None], 0),
    )
    out.copy_(weights[0] * parts[0] + weights[1] * parts[1])
    if lse is not None:
        lse.copy_(total)
