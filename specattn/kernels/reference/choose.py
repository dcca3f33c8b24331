"""Twin of `specattn.kernels.choose`."""

from __future__ import annotations

import torch
from torch import Tensor


def top_tokens(
    logits: Tensor,
    topk: int,
    *,
    probs_out: Tensor,
    ids_out: Tensor,
    target_ids: Tensor | None = None,
) -> None:
    """See `specattn.kernels.choose.top_tokens`."""
    check_topk(logits, topk, target_ids)
    scores = _numbers(logits)
    # distinct keys: no tie is left to the library
    falling = torch.arange(logits.shape[1], 0, -1, device=logits.device)
    bits = scores.view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long() * 2**32 + falling
    ids_out.copy_(keys.topk(topk).indices)
    empty = scores.amax(1, keepdim=True) == -torch.inf
    probs_out.copy_(scores.softmax(1).masked_fill(empty, 0).gather(1, ids_out))
    if target_ids is not None:
        ids_out.copy_(target_ids[ids_out])


def argmax_tokens(logits: Tensor) -> Tensor:
    """See `specattn.kernels.choose.argmax_tokens`."""
    return _numbers(logits).argmax(1)


def check_topk(logits: Tensor, topk: int, target_ids: Tensor | None) -> None:
    """Raise ValueError if a row has not ``topk`` tokens, or not every token a target id."""
    vocab = logits.shape[1]
    if not 1 <= topk <= vocab:
        raise ValueError(f"topk must be in 1..{vocab}, the vocabulary, got {topk}")
    if target_ids is None:
        return
    named = target_ids.dtype == torch.int64 and target_ids.shape == (vocab,)
    if not named or not target_ids.is_contiguous():
        raise ValueError(
            f"target_ids must be contiguous int64 [{vocab}], "
            f"got {target_ids.dtype} {list(target_ids.shape)}"
        )


def _numbers(logits: Tensor) -> Tensor:
    """Return float32 logits with -inf for NaN, and one zero."""
    return logits.float().nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0
