"""Logits processors and what they remember: kernels and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels import processors as bits

if TYPE_CHECKING:
    from specattn.batch import DraftTree
    from specattn.kernels.processors import ProcessorColumns

# kernels read no globals but constants of their own kind
PENALTIES = tl.constexpr(bits.PENALTIES)
BIAS = tl.constexpr(bits.BIAS)
BAD_WORDS = tl.constexpr(bits.BAD_WORDS)
ALLOWED = tl.constexpr(bits.ALLOWED)
BITMASK = tl.constexpr(bits.BITMASK)
ENDS = tl.constexpr(bits.ENDS)

# tokens that a program processes
BLOCK = 2048

# tokens with a bias that a program processes at a time
LISTED = 128


@triton.jit
def _penalise(score, token, live, history, tokens, words, nodes, penalties):
    """Return logits after penalties, by history and path."""
    past = tl.load(history + token, mask=live, other=0)
    emitted = past >> 1
    for j in range(1, nodes):
        if ((tl.load(words + j // 64) >> (j % 64)) & 1) != 0:
            emitted += (token == tl.load(tokens + j)).to(tl.int32)
    repetition = tl.load(penalties)
    frequency = tl.load(penalties + 1)
    presence = tl.load(penalties + 2)
    repeated = tl.where(score > 0, score / repetition, score * repetition)
    score = tl.where((emitted > 0) | (past != 0), repeated, score)
    return score - frequency * emitted - tl.where(emitted > 0, presence, 0.0)


@triton.jit
def _mask(score, token, live, words):
    """Return logits with -inf for tokens whose bit is not set."""
    word = tl.load(words + token // 32, mask=live, other=0)
    return tl.where(((word >> (token % 32)) & 1) != 0, score, -float("inf"))


@triton.jit
def _process(score, token, live, kind, asked, row, flat, tokens, words, nodes, vocab):
    """Return biased logits after penalties and masks.

    What rows ask for are their history ``[R, V]`` int32, penalties ``[R, 3]`` float32 and allowed
    tokens ``[R, ceil(V / 32)]`` int32; and the bitmask ``[B, n, ceil(V / 32)]`` int32, or None.
    """
    history, penalties, allowed, bitmask = asked
    wide = tl.cdiv(vocab, 32)
    if (kind & PENALTIES) != 0:
        history += row * vocab
        score = _penalise(score, token, live, history, tokens, words, nodes, penalties + row * 3)
    if (kind & ALLOWED) != 0:
        score = _mask(score, token, live, allowed + row * wide)
    if bitmask is not None:  # noqa: SIM102  # known when the kernel is compiled; the next is not
        if (kind & BITMASK) != 0:
            score = _mask(score, token, live, bitmask + flat * wide)
    return score


@triton.jit
def process_kernel(
    logits,  # [B, n, V]
    out,  # [B, n, V] float32, out
    tokens,  # [B, n] int64
    words,  # [B, n, W] int64
    rows,  # [B] int64
    kinds,  # [R] int32
    asked,  # see `_process`
    nodes,
    vocab,
    num_words,
    stride_req,
    stride_node,
    BLOCK: tl.constexpr,
):
    """Process a block of a node's logits, but for what lists say."""
    # nodes of a request come one after another, so that its history is read once
    node, req = tl.program_id(0), tl.program_id(2).to(tl.int64)
    flat = req * nodes + node
    row = tl.load(rows + req)
    kind = tl.load(kinds + row)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = token < vocab
    score = tl.load(logits + req * stride_req + node * stride_node + token, mask=live, other=0)
    tokens += req * nodes
    words += flat * num_words
    score = score.to(tl.float32)
    score = _process(score, token, live, kind, asked, row, flat, tokens, words, nodes, vocab)
    tl.store(out + flat * vocab + token, score, mask=live)


@triton.jit
def _completes(words, tokens, nodes, bad, used, recent, LENGTH: tl.constexpr):
    """Return which sequences the next token of a node may complete."""
    fits = used
    back = tl.full([], 0, tl.int32)
    for i in range(1, nodes):
        j = nodes - i
        inside = ((tl.load(words + j // 64) >> (j % 64)) & 1) != 0
        if inside & (back < LENGTH - 1):
            prefix = tl.load(bad + LENGTH - 2 - back)
            fits = fits & ((prefix == -1) | (prefix == tl.load(tokens + j)))
            back += 1
    for k in range(LENGTH - 1 - back):
        prefix = tl.load(bad + LENGTH - 2 - back - k)
        fits = fits & ((prefix == -1) | (prefix == tl.load(recent + k)))
    return fits


@triton.jit
def lists_kernel(
    logits,  # [B, n, V]
    out,  # [B, n, V] float32, in and out
    tokens,  # [B, n] int64
    words,  # [B, n, W] int64
    positions,  # [B, n] int64
    rows,  # [B] int64
    kinds,  # [R] int32
    asked,  # see `_process`
    biases,  # tokens [R, C] int32 and what is added to them [R, C] float32; C
    bad,  # sequences [R, S, LENGTH] int32 and the texts' last tokens [R, LENGTH - 1] int32; S
    ends,  # tokens [R, E] int32 and from where on they are possible [R] int32; E
    nodes,
    vocab,
    num_words,
    stride_req,
    stride_node,
    LENGTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Process a node's tokens that lists name."""
    node, req = tl.program_id(0), tl.program_id(1).to(tl.int64)
    flat = req * nodes + node
    row = tl.load(rows + req)
    kind = tl.load(kinds + row)
    tokens += req * nodes
    words += flat * num_words
    if (kind & BIAS) != 0:
        bias_ids, bias_values, num_biases = biases
        for start in range(0, num_biases, BLOCK_C):
            at = start + tl.arange(0, BLOCK_C)  # [BLOCK_C]
            token = tl.load(bias_ids + row * num_biases + at, mask=at < num_biases, other=-1)
            live = token >= 0
            score = tl.load(
                logits + req * stride_req + node * stride_node + token, mask=live, other=0
            ).to(tl.float32)
            score += tl.load(bias_values + row * num_biases + at, mask=live, other=0)
            score = _process(
                score, token, live, kind, asked, row, flat, tokens, words, nodes, vocab
            )
            tl.store(out + flat * vocab + token, score, mask=live)
        # another thread may make one of these tokens impossible
        tl.debug_barrier()
    if (kind & BAD_WORDS) != 0:
        bad_words, recent, num_bad = bad
        at = tl.arange(0, BLOCK_S)  # [BLOCK_S]
        sequence = bad_words + (row * num_bad + tl.minimum(at, num_bad - 1)) * LENGTH
        last = tl.load(sequence + LENGTH - 1)
        used = (at < num_bad) & (last >= 0)
        recent += row * (LENGTH - 1)
        fits = _completes(words, tokens, nodes, sequence, used, recent, LENGTH)
        tl.store(out + flat * vocab + last, -float("inf"), mask=fits)
    if (kind & ENDS) != 0:
        end_ids, ends_from, num_ends = ends
        early = tl.load(positions + flat) + 1 < tl.load(ends_from + row)
        at = tl.arange(0, BLOCK_E)  # [BLOCK_E]
        end = tl.load(end_ids + row * num_ends + at, mask=at < num_ends, other=-1)
        tl.store(out + flat * vocab + end, -float("inf"), mask=(end >= 0) & early)


def process_logits(
    *,
    logits: Tensor,
    tree: DraftTree,
    rows: Tensor,
    bitmask: Tensor | None,
    columns: ProcessorColumns,
) -> Tensor:
    batch, nodes, vocab = logits.shape
    out = torch.empty(batch, nodes, vocab, dtype=torch.float32, device=logits.device)
    if not batch:
        return out
    asked = columns.history, columns.penalties, columns.allowed, bitmask
    num_biases, num_ends = columns.bias_ids.shape[1], columns.end_ids.shape[1]
    _, num_bad, length = columns.bad_words.shape
    biases = columns.bias_ids, columns.bias_values, num_biases
    bad = columns.bad_words, columns.recent, num_bad
    ends = columns.end_ids, columns.ends_from, num_ends
    process_kernel[(nodes, triton.cdiv(vocab, BLOCK), batch)](
        logits,
        out,
        tree.tokens,
        tree.words,
        rows,
        columns.kinds,
        asked,
        nodes,
        vocab,
        tree.words.shape[2],
        *logits.stride()[:2],
        BLOCK=BLOCK,
    )
    lists_kernel[(nodes, batch)](
        logits,
        out,
        tree.tokens,
        tree.words,
        tree.positions,
        rows,
        columns.kinds,
        asked,
        biases,
        bad,
        ends,
        nodes,
        vocab,
        tree.words.shape[2],
        *logits.stride()[:2],
        LENGTH=length,
        BLOCK_C=LISTED,
        BLOCK_S=triton.next_power_of_2(num_bad),
        BLOCK_E=triton.next_power_of_2(num_ends),
    )
    return out


@triton.jit
def note_kernel(
    rows,  # [B] int64
    tokens,  # [B, D] int64
    lens,  # [B] int32
    kinds,  # [R] int32
    history,  # [R, V] int32, in and out
    recent,  # [R, M] int32, in and out
    vocab,
    kept,
    stride,
    BLOCK: tl.constexpr,
):
    """Add what one request emitted to its history."""
    req = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + req)
    count = tl.where((row != 0) & (tl.load(kinds + row) != 0), tl.load(lens + req), 0)
    tokens += req * stride
    history += row * vocab
    # only the last one may be none
    if count > 0:
        count -= (tl.load(tokens + count - 1) < 0).to(tl.int32)
    for i in range(count):
        token = tl.load(tokens + i)
        tl.store(history + token, tl.load(history + token) + 2)
        # the next token may be the same
        tl.debug_barrier()
    if count > 0:
        at = tl.arange(0, BLOCK)  # [BLOCK], the newest first
        new = tl.load(tokens + count - 1 - at, mask=at < count, other=0).to(tl.int32)
        old = tl.load(recent + row * kept + at - count, mask=(at >= count) & (at < kept), other=-2)
        # every old one is read before it is written
        tl.debug_barrier()
        tl.store(recent + row * kept + at, tl.where(at < count, new, old), mask=at < kept)
