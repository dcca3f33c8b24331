"""Logits as keys: integers of the same order, which carry their token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_key(score):
    """Map float32 scores to int32 keys of the same order.

    NaN comes below everything, and -0 equals 0.
    """
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(score == score, key, -0x80000000)


@triton.jit
def load_scores(row, token, vocab):
    """Load logits as float32, with -inf for invalid ones.

    NaN and tokens past the vocabulary are invalid.
    """
    score = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(score == score, score, -float("inf"))


@triton.jit
def load_flagged(row, token, vocab):
    """Load logits as float32; NaN is +inf, which no sound row holds."""
    score = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(score == score, score, float("inf"))


@triton.jit
def ranked(score, token):
    """Pack scores and tokens into int64 keys.

    The larger score comes first, then the lower token.
    """
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
    """Return whether a row's largest logit allows a choice.

    ``peak`` is the largest logit as `load_flagged` has it.
    """
    return (peak > -float("inf")) & (peak < float("inf"))


@triton.jit
def finite(peak):
    """Return ``peak``, with a finite number in place of -inf.

    That number is below all other logits.
    """
    return tl.maximum(peak, -3.0e38)
