"""Log-probabilities of the tokens that a step emits, and of their alternatives."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels import implementation
from specattn.kernels.checks import require_dense, require_rows
from specattn.kernels.logprobs import naive
from specattn.kernels.logprobs.kinds import DRAWN, MAX_LOGPROBS, PROCESSED, RAW

__all__ = ["DRAWN", "MAX_LOGPROBS", "PROCESSED", "RAW", "path_logprobs"]


def path_logprobs(
    logits: Tensor,
    accept_index: Tensor,
    accept_tokens: Tensor,
    accept_lens: Tensor,
    rows: Tensor,
    turn: Tensor,
    *,
    counts: Tensor,
    kinds: Tensor,
    values_out: Tensor,
    ids_out: Tensor,
    processed: Tensor | None = None,
    probs: Tensor | None = None,
) -> None:
    """Write log-probabilities along accepted paths to their turn of a buffer.

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
    accept_index : Tensor
        ``[B, D]`` int32, the nodes of each path; not read past its end.
    accept_tokens : Tensor
        ``[B, D]`` int64, the token after each node.
    accept_lens : Tensor
        ``[B]`` int32, tokens of each path, 0 to D.
    rows : Tensor
        ``[B]`` int64, each request's row of ``counts`` and ``kinds``.
    turn : Tensor
        ``[1]`` int64, which entry of the buffers is written.
    counts : Tensor
        ``[R]`` int32, alternatives that a request wants, at most K; -1 if it wants nothing.
    kinds : Tensor
        ``[R]`` int32: ``RAW`` takes the logits, ``PROCESSED`` the processed logits, ``DRAWN`` the
        probabilities.
    values_out : Tensor
        ``[S, B', D, 1 + K]`` float32 with B' at least B; dense but for its first two axes; pinned,
        or on the device.
    ids_out : Tensor
        ``[S, B', D, 1 + K]`` int64, as ``values_out``: the tokens that the values belong to.
    processed, probs : Tensor, optional
        ``[B, n, V]``, contiguous, any float dtype: what requests of the other kinds want.

    Raises
    ------
    ValueError
        Before anything is written: if a shape or a layout is another, or K is above 20.
    """
    _check_outs(accept_tokens, values_out, ids_out)
    require_rows(logits=logits)
    require_dense(
        accept_index=accept_index,
        accept_tokens=accept_tokens,
        accept_lens=accept_lens,
        rows=rows,
        turn=turn,
        counts=counts,
        kinds=kinds,
        processed=processed,
        probs=probs,
    )
    for name, law in (("processed", processed), ("probs", probs)):
        if law is not None and law.shape != logits.shape:
            raise ValueError(f"{name} must be {list(logits.shape)}, got {list(law.shape)}")
    if not accept_tokens.numel():
        return
    implementation(naive.path_logprobs, logits.device)(
        logits,
        accept_index,
        accept_tokens,
        accept_lens,
        rows,
        turn,
        counts,
        kinds,
        values_out,
        ids_out,
        processed,
        probs,
    )


def _check_outs(tokens: Tensor, values_out: Tensor, ids_out: Tensor) -> None:
    """Raise a ValueError unless the buffers hold a step's paths."""
    batch, depth = tokens.shape
    for name, out, dtype in (
        ("values_out", values_out, torch.float32),
        ("ids_out", ids_out, torch.int64),
    ):
        width = out.shape[-1]
        fits = out.dim() == 4 and out.shape[1] >= batch and out.shape[2] == depth
        dense = out.stride()[2:] == (width, 1)
        if not fits or not 1 <= width <= 1 + MAX_LOGPROBS or not dense or out.dtype != dtype:
            raise ValueError(
                f"{name} must be [S, at least {batch}, {depth}, 1..{1 + MAX_LOGPROBS}] {dtype}, "
                f"dense but for its first two axes, got {list(out.shape)} {out.dtype} with strides "
                f"{out.stride()}"
            )
    if values_out.shape != ids_out.shape:
        raise ValueError(
            f"ids_out must be {list(values_out.shape)} as values_out, got {list(ids_out.shape)}"
        )
