"""Log-probabilities along accepted paths in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels.logprobs.kinds import DRAWN, PROCESSED


def path_logprobs(
    logits: Tensor,
    accept_index: Tensor,
    accept_tokens: Tensor,
    accept_lens: Tensor,
    rows: Tensor,
    turn: Tensor,
    counts: Tensor,
    kinds: Tensor,
    values_out: Tensor,
    ids_out: Tensor,
    processed: Tensor | None,
    probs: Tensor | None,
) -> None:
    batch, depth = accept_tokens.shape
    path = accept_index.clamp(min=0).long()[:, :, None]  # [B, D, 1]
    scores = _along(logits, path)
    kind = kinds[rows][:, None, None]
    if processed is not None:
        scores = torch.where(kind == PROCESSED, _along(processed, path), scores)
    if probs is not None:
        scores = torch.where(kind == DRAWN, _along(probs, path).log(), scores)
    scores = scores.masked_fill(scores.isnan(), torch.inf)  # no row that holds it has a softmax
    logprobs = scores.log_softmax(2)  # [B, D, V]
    width = values_out.shape[3]
    ids = torch.full((batch, depth, width), -1, device=logits.device)
    few = min(width - 1, logits.shape[2])
    ids[:, :, 0] = accept_tokens
    # stable: the lower token at a tie
    order = scores.sort(dim=2, descending=True, stable=True).indices
    ids[:, :, 1 : 1 + few] = order[:, :, :few]
    # token 0 stands for none
    values = logprobs.gather(2, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    wanted = counts[rows][:, None, None]
    step = torch.arange(depth, device=logits.device)[:, None]
    live = (step < accept_lens[:, None, None]) & (wanted >= 0)
    live = live & (torch.arange(width, device=logits.device) <= wanted)  # [B, D, 1 + K]
    at = int(turn)
    for out, new in ((values_out, values), (ids_out, ids)):
        entry = out[at, :batch]
        entry.copy_(torch.where(live.to(out.device), new.to(out.device), entry))


def _along(law: Tensor, path: Tensor) -> Tensor:
    """Return the rows ``[B, D, V]`` of the path's nodes in float32."""
    return law.float().gather(1, path.expand(-1, -1, law.shape[2]))
