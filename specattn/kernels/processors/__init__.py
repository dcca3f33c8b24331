"""Logits processors: each node of a tree with its own history."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels import implementation
from specattn.kernels.checks import require_dense, require_rows
from specattn.kernels.processors import naive
from specattn.kernels.processors.kinds import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    BITMASK,
    ENDS,
    PENALTIES,
)

__all__ = [
    "ALLOWED",
    "BAD_WORDS",
    "BIAS",
    "BITMASK",
    "ENDS",
    "PENALTIES",
    "bitmask_words",
    "note_tokens",
    "process_logits",
]


def bitmask_words(vocab: int) -> int:
    """Return the int32 words of a bitmask over a vocabulary."""
    return -(-vocab // 32)


def process_logits(
    logits: Tensor,
    tokens: Tensor,
    words: Tensor,
    positions: Tensor,
    rows: Tensor,
    bitmask: Tensor | None = None,
    *,
    kinds: Tensor,
    history: Tensor,
    penalties: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    bad_words: Tensor,
    recent: Tensor,
    allowed: Tensor,
    end_ids: Tensor,
    ends_from: Tensor,
) -> Tensor:
    """Return the logits that requests with processors draw from.

    Every node has a history of its own: what its request has emitted, and the tokens on the path to
    the node. Node 0 is the newest token that was emitted. First the bias is added. Then come the
    repetition penalty, as in transformers and vLLM (a token of the prompt or of the output: its
    logit is divided if above 0, else multiplied), the frequency penalty and the presence penalty,
    as in vLLM (the output alone counts). Last, impossible tokens become -inf, which nothing before
    would change: tokens that complete a bad word, those outside the allowed ones or the bitmask,
    and ends before their position. Two launches: one over the vocabulary, one over the lists.

    Parameters
    ----------
    logits : Tensor
        ``[B, n, V]``, any float dtype; dense last axis.
    tokens, positions : Tensor
        ``[B, n]`` int64: the nodes of each request's tree, and the place of each in the text.
    words : Tensor
        ``[B, n, W]`` int64: bit j says that node j is an ancestor, or the node itself. Parents come
        before their children.
    rows : Tensor
        ``[B]`` int64: each request's row of the tensors that follow.
    bitmask : Tensor, optional
        ``[B, n, ceil(V / 32)]`` int32, dense: bit v % 32 of word v // 32 says that token v may
        follow the node (the layout of xgrammar and llguidance); read for rows of kind ``BITMASK``.
    kinds : Tensor
        ``[R]`` int32, what a row asks for: a sum of ``PENALTIES``, ``BIAS``, ``BAD_WORDS``,
        ``ALLOWED``, ``BITMASK``, ``ENDS``. The rest of the row is not read.
    history : Tensor
        ``[R, V]`` int32: twice the number of times that a token was emitted, plus 1 if the prompt
        has it.
    penalties : Tensor
        ``[R, 3]`` float32: repetition, frequency, presence; off at 1, 0 and 0.
    bias_ids, bias_values : Tensor
        ``[R, C]`` int32 and float32: different tokens, -1 for none, and what is added.
    bad_words : Tensor
        ``[R, S, M]`` int32: the last column ends the sequence, -1 for none; the columns before hold
        the tokens before it, -1 for any.
    recent : Tensor
        ``[R, M - 1]`` int32: the last tokens of the text, the newest first; -2 for none.
    allowed : Tensor
        ``[R, ceil(V / 32)]`` int32, bits as in ``bitmask``.
    end_ids : Tensor
        ``[R, E]`` int32, different tokens, -1 for none.
    ends_from : Tensor
        ``[R]`` int32: the first position at which they are possible.

    Returns
    -------
    Tensor
        ``[B, n, V]`` float32; of a row of kind 0 the logits themselves.

    Raises
    ------
    ValueError
        If a shape or a layout is another.
    """
    batch, nodes, vocab = logits.shape
    if tokens.shape != (batch, nodes) or positions.shape != (batch, nodes):
        raise ValueError(
            f"tokens and positions must be [{batch}, {nodes}], got {list(tokens.shape)} "
            f"and {list(positions.shape)}"
        )
    if history.shape[1] != vocab:
        raise ValueError(f"history must have {vocab} columns, got {history.shape[1]}")
    check_bitmask(bitmask, batch, nodes, vocab)
    require_rows(logits=logits)
    require_dense(
        tokens=tokens,
        words=words,
        positions=positions,
        rows=rows,
        bitmask=bitmask,
        kinds=kinds,
        history=history,
        penalties=penalties,
        bias_ids=bias_ids,
        bias_values=bias_values,
        bad_words=bad_words,
        recent=recent,
        allowed=allowed,
        end_ids=end_ids,
        ends_from=ends_from,
    )
    return implementation(naive.process_logits, logits.device)(
        logits,
        tokens,
        words,
        positions,
        rows,
        bitmask,
        kinds,
        history,
        penalties,
        bias_ids,
        bias_values,
        bad_words,
        recent,
        allowed,
        end_ids,
        ends_from,
    )


def check_bitmask(bitmask: Tensor | None, batch: int, nodes: int, vocab: int) -> None:
    """Raise a ValueError unless a bitmask fits nodes and vocabulary."""
    wanted = (batch, nodes, bitmask_words(vocab))
    if bitmask is not None and (bitmask.shape != wanted or bitmask.dtype != torch.int32):
        raise ValueError(
            f"bitmask must be {list(wanted)} torch.int32, a bit per token of {vocab}, "
            f"got {list(bitmask.shape)} {bitmask.dtype}"
        )


def note_tokens(
    rows: Tensor,
    tokens: Tensor,
    lens: Tensor,
    *,
    kinds: Tensor,
    history: Tensor,
    recent: Tensor,
) -> None:
    """Add emitted tokens to their requests' history; one launch.

    Parameters
    ----------
    rows : Tensor
        ``[B]`` int64, all different but for 0, which is padding and is not written.
    tokens : Tensor
        ``[B, D]`` int64; may have a row stride. A negative one is none.
    lens : Tensor
        ``[B]`` int32, how many of each row's tokens were emitted.
    kinds, history, recent : Tensor
        As in `process_logits`; rows of kind 0 are not written.

    Raises
    ------
    ValueError
        If a layout is another.
    """
    require_rows(tokens=tokens)
    require_dense(rows=rows, lens=lens, kinds=kinds, history=history, recent=recent)
    implementation(naive.note_tokens, rows.device)(rows, tokens, lens, kinds, history, recent)
