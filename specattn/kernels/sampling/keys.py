"""Logits as keys: integers of the same order, which carry their token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_key(score):
    """Map float32 to int32 in the same order; NaN is lowest."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(score == score, key, -0x80000000)


@triton.jit
def load_scores(row, token, vocab):
    """Load logits as float32, -inf for NaN and past the vocabulary."""
    score = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(score == score, score, -float("inf"))


@triton.jit
def load_flagged(row, token, vocab):
    """Load logits as float32; NaN is +inf, which no sound row holds."""
    score = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(score == score, score, float("inf"))


@triton.jit
def ranked(score, token):
    """Pack scores and tokens into int64 keys; lower tokens win ties."""
    return (score_key(score).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(key):
    """Return the token of a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """Return the score of a key."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def is_sound(peak):
    """Whether a row may choose, by its largest logit from `load_flagged`."""
    return (peak > -float("inf")) & (peak < float("inf"))


@triton.jit
def finite(peak):
    """Return ``peak``, with a number below all other logits for -inf."""
    return tl.maximum(peak, -3.0e38)


@triton.jit
def best_keys(key, LEAST: tl.constexpr, count, BLOCK_K: tl.constexpr):
    """Return the ``count`` largest of distinct keys in order, then ``LEAST``."""
    rank = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    best = tl.full([BLOCK_K], LEAST, key.dtype)
    for nth in range(count):
        top = tl.max(key, 0)
        best = tl.where(rank == nth, top, best)
        key = tl.where(key == top, LEAST, key)
    return best
