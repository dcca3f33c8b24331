"""Log-probabilities of the tokens that a step emits, and of their alternatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_dense, require_rows, require_shape, whole_number
from specattn.kernels import TritonModule, on_triton

if TYPE_CHECKING:
    from specattn.batch import AcceptResult
    from specattn.kernels.logprobs import triton as launch
else:
    launch = TritonModule("specattn.kernels.logprobs.triton")

#: Of the target's logits; of processed logits; of the probabilities that tokens were drawn from.
RAW, PROCESSED, DRAWN = 0, 1, 2

#: Alternatives of a token at the most.
MAX_LOGPROBS = 20


def path_logprobs(
    logits: Tensor,
    accepted: AcceptResult,
    rows: Tensor,
    entry: Tensor,
    *,
    counts: Tensor,
    sources: Tensor,
    values_out: Tensor,
    ids_out: Tensor,
    processed: Tensor | None = None,
) -> None:
    """Write log-probabilities along accepted paths to their entry of a buffer.

    Entry i of a path belongs to the token after its node i. What is written of an entry are the
    token's own value, then as many alternatives as its request wants: the most probable tokens, the
    most probable first, the lower token at a tie, whether or not the token is one of them. Where
    the vocabulary has no more tokens the id is -1, the value -inf. Everything else of the buffers
    stays as it is. The values are log-softmax in float32; if the logits of a node hold NaN or +inf,
    or nothing but -inf, its values are NaN. Two launches, which split each row of the vocabulary.

    Parameters
    ----------
    logits : Tensor
        ``[B, n, V]``, any float dtype: the target's after every node; dense last axis.
    accepted : AcceptResult
        The paths, of 0 to D tokens each, and in ``probs`` what requests of the kind ``DRAWN`` want.
    rows : Tensor
        ``[B]`` int64, each request's row of ``counts`` and ``sources``.
    entry : Tensor
        ``[1]`` int64, which entry of the buffers is written.
    counts : Tensor
        ``[R]`` int32, alternatives that a request wants, at most K; -1 if it wants nothing.
    sources : Tensor
        ``[R]`` int32: ``RAW`` takes the logits, ``PROCESSED`` the processed logits, ``DRAWN`` the
        probabilities.
    values_out : Tensor
        ``[S, B', D, 1 + K]`` float32 with B' at least B; dense but for its first two axes; pinned,
        or on the device.
    ids_out : Tensor
        ``[S, B', D, 1 + K]`` int64, as ``values_out``: the tokens that the values belong to.
    processed : Tensor, optional
        ``[B, n, V]``, contiguous, any float dtype: what requests of the kind ``PROCESSED`` want.

    Raises
    ------
    ValueError
        Before anything is written: if a shape or a layout is another, or K is above 20.
    """
    _check_outs(accepted.accept_tokens, values_out, ids_out)
    require_rows(logits=logits)
    require_dense(
        accept_index=accepted.accept_index,
        accept_tokens=accepted.accept_tokens,
        accept_lens=accepted.accept_lens,
        rows=rows,
        entry=entry,
        counts=counts,
        sources=sources,
        processed=processed,
        probs=accepted.probs,
    )
    require_shape(tuple(logits.shape), processed=processed, probs=accepted.probs)
    if not accepted.accept_tokens.numel():
        return
    if on_triton(logits):
        return launch.path_logprobs(
            logits=logits,
            accepted=accepted,
            rows=rows,
            entry=entry,
            counts=counts,
            sources=sources,
            values_out=values_out,
            ids_out=ids_out,
            processed=processed,
        )
    batch, depth = accepted.accept_tokens.shape
    path = accepted.accept_index.clamp(min=0).long()[:, :, None]  # [B, D, 1]
    scores = _along(logits, path)
    kind = sources[rows][:, None, None]
    if processed is not None:
        scores = torch.where(kind == PROCESSED, _along(processed, path), scores)
    if accepted.probs is not None:
        scores = torch.where(kind == DRAWN, _along(accepted.probs, path).log(), scores)
    scores = scores.masked_fill(scores.isnan(), torch.inf)  # no row that holds it has a softmax
    logprobs = scores.log_softmax(2)  # [B, D, V]
    width = values_out.shape[3]
    ids = torch.full((batch, depth, width), -1, device=logits.device)
    few = min(width - 1, logits.shape[2])
    ids[:, :, 0] = accepted.accept_tokens
    # stable: the lower token at a tie
    order = scores.sort(dim=2, descending=True, stable=True).indices
    ids[:, :, 1 : 1 + few] = order[:, :, :few]
    # token 0 stands for none
    values = logprobs.gather(2, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    wanted = counts[rows][:, None, None]
    step = torch.arange(depth, device=logits.device)[:, None]
    live = (step < accepted.accept_lens[:, None, None]) & (wanted >= 0)
    live = live & (torch.arange(width, device=logits.device) <= wanted)  # [B, D, 1 + K]
    at = int(entry)
    for out, new in ((values_out, values), (ids_out, ids)):
        entry = out[at, :batch]
        entry.copy_(torch.where(live.to(out.device), new.to(out.device), entry))


def _check_outs(tokens: Tensor, values_out: Tensor, ids_out: Tensor) -> None:
    """Raise a ValueError unless the buffers hold a step's paths."""
    (batch, depth), (slots, rows, _, width) = tokens.shape, values_out.shape
    whole_number("alternatives", width - 1, 0, MAX_LOGPROBS)
    shape = slots, max(rows, batch), depth, width
    require_shape(shape, torch.float32, values_out=values_out)
    require_shape(shape, torch.int64, ids_out=ids_out)
    require_dense(2, values_out=values_out, ids_out=ids_out)


def _along(nodes: Tensor, path: Tensor) -> Tensor:
    """Return the rows ``[B, D, V]`` of the path's nodes in float32."""
    return nodes.float().gather(1, path.expand(-1, -1, nodes.shape[2]))
