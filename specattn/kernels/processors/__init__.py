"""Logits processors: each node of a tree with its own history."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_dense, require_rows, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import power_of_2
from specattn.kernels.words import unpack_words

if TYPE_CHECKING:
    from specattn.batch import DraftTree
    from specattn.kernels.processors import triton as launch
else:
    launch = TritonModule("specattn.kernels.processors.triton")

# what a request asks of its logits, as bits: repetition, presence and frequency penalties
PENALTIES = 1
# numbers added to the logits of some tokens
BIAS = 2
# sequences that must not be completed
BAD_WORDS = 4
# the only tokens that are possible
ALLOWED = 8
# as ALLOWED, of every node, from a bitmask of the batch
BITMASK = 16
# tokens that are impossible before a position
ENDS = 32


@dataclass(frozen=True)
class ProcessorColumns:
    """The settings of logits processors, a row per request.

    Parameters
    ----------
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
        ``[R, ceil(V / 32)]`` int32: bit v % 32 of word v // 32 says that token v is possible.
    end_ids : Tensor
        ``[R, E]`` int32, different tokens, -1 for none.
    ends_from : Tensor
        ``[R]`` int32: the first position at which they are possible.
    """

    kinds: Tensor
    history: Tensor
    penalties: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    bad_words: Tensor
    recent: Tensor
    allowed: Tensor
    end_ids: Tensor
    ends_from: Tensor


def bitmask_words(vocab: int) -> int:
    """Return the int32 words of a bitmask over a vocabulary."""
    return -(-vocab // 32)


def process_logits(
    logits: Tensor,
    tree: DraftTree,
    rows: Tensor,
    bitmask: Tensor | None = None,
    *,
    columns: ProcessorColumns,
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
    tree : DraftTree
        The nodes; ``tokens``, ``positions`` and ``words`` are read. Parents come before their
        children.
    rows : Tensor
        ``[B]`` int64: each request's row of ``columns``.
    bitmask : Tensor, optional
        ``[B, n, ceil(V / 32)]`` int32, dense: the tokens that may follow each node, in bits as
        ``allowed`` (the layout of xgrammar and llguidance); read for rows of kind ``BITMASK``.
    columns : ProcessorColumns
        What requests ask for, and their history; dense.

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
    tokens, positions = tree.tokens, tree.positions
    require_shape((batch, nodes), tokens=tokens, positions=positions)
    require_shape((len(columns.history), vocab), history=columns.history)
    check_bitmask(bitmask, batch, nodes, vocab)
    require_rows(logits=logits)
    require_dense(tokens=tokens, words=tree.words, positions=positions, rows=rows, bitmask=bitmask)
    require_dense(**{one.name: getattr(columns, one.name) for one in fields(ProcessorColumns)})
    if on_triton(logits):
        return launch.process_logits(
            logits=logits, tree=tree, rows=rows, bitmask=bitmask, columns=columns
        )
    scores, kind = logits.float(), columns.kinds[rows][:, None, None]  # [B, 1, 1]
    path = _path(tree.words, nodes)  # [B, n, n]

    def where(bit: int, processed: Tensor) -> Tensor:
        return torch.where((kind & bit) != 0, processed, scores)

    biased = _scatter(scores, columns.bias_ids[rows][:, None], columns.bias_values[rows][:, None])
    scores = where(BIAS, biased)
    penalised = _penalised(scores, tokens, path, columns.history[rows], columns.penalties[rows])
    scores = where(PENALTIES, penalised)
    banned = _completing(tokens, path, columns.bad_words[rows], columns.recent[rows])
    scores = where(BAD_WORDS, _scatter(scores, banned, None))
    possible = _bits(columns.allowed[rows], vocab)[:, None]
    scores = where(ALLOWED, scores.masked_fill(~possible, -torch.inf))
    if bitmask is not None:
        scores = where(BITMASK, scores.masked_fill(~_bits(bitmask, vocab), -torch.inf))
    early = (positions + 1 < columns.ends_from[rows][:, None])[..., None]  # [B, n, 1]
    ends = torch.where(early, columns.end_ids[rows][:, None], -1)  # [B, n, E]
    return where(ENDS, _scatter(scores, ends, None))


def check_bitmask(bitmask: Tensor | None, batch: int, nodes: int, vocab: int) -> None:
    """Raise a ValueError unless a bitmask fits nodes and vocabulary."""
    wanted = (batch, nodes, bitmask_words(vocab))
    if bitmask is not None and (bitmask.shape != wanted or bitmask.dtype != torch.int32):
        raise ValueError(
            f"bitmask must be {list(wanted)} torch.int32, a bit per token of {vocab}, "
            f"got {list(bitmask.shape)} {bitmask.dtype}"
        )


def note_tokens(rows: Tensor, tokens: Tensor, lens: Tensor, *, columns: ProcessorColumns) -> None:
    """Add emitted tokens to their requests' history; one launch.

    Parameters
    ----------
    rows : Tensor
        ``[B]`` int64, all different but for 0, which is padding and is not written.
    tokens : Tensor
        ``[B, D]`` int64; may have a row stride. A negative one is none.
    lens : Tensor
        ``[B]`` int32, how many of each row's tokens were emitted.
    columns : ProcessorColumns
        ``history`` and ``recent`` are written, but for rows of kind 0.

    Raises
    ------
    ValueError
        If a layout is another.
    """
    kinds, history, recent = columns.kinds, columns.history, columns.recent
    require_rows(tokens=tokens)
    require_dense(rows=rows, lens=lens, kinds=kinds, history=history, recent=recent)
    if not len(rows):
        return
    if on_triton(rows):
        launch.note_kernel[(len(rows),)](
            rows,
            tokens,
            lens,
            kinds,
            history,
            recent,
            history.shape[1],
            recent.shape[1],
            tokens.stride(0),
            BLOCK=power_of_2(recent.shape[1]),
            num_warps=1,
        )
        return
    live = (rows != 0) & (kinds[rows] != 0)  # [B]
    for at in range(tokens.shape[1]):
        token = tokens[:, at]
        new = live & (at < lens) & (token >= 0)
        # rows that get nothing add 0; index_put adds up what padding writes to row 0
        where = (rows, torch.where(new, token, 0))
        history.index_put_(where, 2 * new.to(history.dtype), accumulate=True)
        old = recent[rows]
        moved = torch.cat([token[:, None].to(old.dtype), old[:, :-1]], 1)
        recent[rows] = torch.where(new[:, None], moved, old)


def _path(words: Tensor, nodes: int) -> Tensor:
    """Return which nodes lie on each node's path, but for node 0."""
    path = unpack_words(words, nodes)
    path[..., 0] = False
    return path


def _penalised(
    scores: Tensor, tokens: Tensor, path: Tensor, history: Tensor, penalties: Tensor
) -> Tensor:
    vocab = scores.shape[2]
    on_path = torch.zeros_like(scores).scatter_add_(
        2, tokens[:, None].expand_as(path).clamp(0, vocab - 1), path.to(scores.dtype)
    )
    emitted = (history >> 1)[:, None] + on_path  # [B, n, V]
    repetition, frequency, presence = penalties[:, None, None].unbind(-1)
    seen = (emitted > 0) | (history != 0)[:, None]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    return scores - frequency * emitted - presence * (emitted > 0)


def _completing(tokens: Tensor, path: Tensor, bad_words: Tensor, recent: Tensor) -> Tensor:
    """Return the tokens ``[B, n, S]`` that complete sequences, or -1."""
    batch, nodes, _ = path.shape
    # a path's tokens, the last first: where a key is larger, a node is further down
    place = torch.arange(nodes, device=tokens.device).expand_as(path)
    order = torch.where(path, place, -1).sort(dim=2, descending=True)
    own = tokens[:, None].expand_as(path).gather(2, order.indices)  # [B, n, n]
    depth = path.sum(2)[..., None]  # [B, n, 1]
    at = torch.arange(recent.shape[1], device=tokens.device).expand(batch, nodes, -1)
    before = recent[:, None].expand_as(at).gather(2, (at - depth).clamp(min=0))
    ahead = own.gather(2, at.clamp(max=nodes - 1))
    text = torch.where(at < depth, ahead, before)[:, :, None]  # [B, n, 1, M - 1]
    prefix = bad_words[:, None, :, :-1].flip(3)  # [B, 1, S, M - 1]
    complete = ((prefix == -1) | (prefix == text)).all(3)
    return torch.where(complete, bad_words[:, None, :, -1], -1)


def _scatter(scores: Tensor, ids: Tensor, values: Tensor | None) -> Tensor:
    """Add values, or -inf, to logits of tokens; -1 is none."""
    vocab, ids = scores.shape[2], ids.expand(*scores.shape[:2], -1).long()
    wide = torch.nn.functional.pad(scores, (0, 1))
    ids = torch.where(ids < 0, vocab, ids)
    if values is None:
        return wide.scatter(2, ids, -torch.inf)[..., :vocab]
    return wide.scatter_add(2, ids, values.expand(ids.shape))[..., :vocab]


def _bits(words: Tensor, vocab: int) -> Tensor:
    """Return a bitmask's bits, one per token."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return (words[..., None] >> shifts & 1).flatten(-2)[..., :vocab].bool()
