"""Compute a row's settings, peak and distances for top-k and top-p."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.sampling.keys import finite, is_sound, score_of, token_of


@triton.jit
def inv_temperature_of(temperature):
    """Return the factor of logits before exp2, finite at temperature 0."""
    return tl.minimum(tl.maximum(1.4426950408889634 / temperature, 1e-37), 3e38)


@triton.jit
def merge_splits(keys, masses, row, splits, inv_temperature, BLOCK_P: tl.constexpr):
    """Return a row's best token, its logit, whole weight, lowest split peak."""
    split = tl.arange(0, BLOCK_P)  # [BLOCK_P]
    live = split < splits
    key = tl.load(keys + row * splits + split, mask=live, other=-0x8000000000000000)
    peaks = tl.where(live, score_of(key), float("inf"))
    best = tl.max(key, 0)
    peak = score_of(best)
    mass = tl.load(masses + row * splits + split, mask=live, other=0)
    below = tl.where(live, finite(peaks) - finite(peak), 0.0)
    total = tl.sum(mass * tl.exp2(below * inv_temperature), 0)
    return token_of(best), peak, total, tl.min(peaks, 0)


@triton.jit
def settings_of(given, row, splits, vocab, rows_per_req, BLOCK_P: tl.constexpr):
    """Return the settings of a row's distribution.

    They are the inverse temperature, the peak, the whole weight, the lowest peak of a split, top-k,
    top-p, and whether each of the two removes tokens. They come of what is ``given``: temperatures
    ``[B]`` float32, top-k ``[B]`` int32 or None, top-p ``[B]`` float32 or None, and each split's
    best key and weight, ``[R, splits]`` int64 and float32.
    """
    temperature, top_k, top_p, keys, masses = given
    req = row // rows_per_req
    temp = tl.load(temperature + req)
    inv_temperature = inv_temperature_of(temp)
    _, peak, total, lowest = merge_splits(keys, masses, row, splits, inv_temperature, BLOCK_P)
    drawn = (temp != 0) & is_sound(peak)
    few = vocab
    if top_k is not None:
        few = tl.load(top_k + req)
    share = tl.full([], 1.0, tl.float32)
    if top_p is not None:
        share = tl.load(top_p + req)
    by_count = drawn & (few > 0) & (few < vocab)
    return inv_temperature, peak, total, lowest, few, share, by_count, drawn & (share < 1)


@triton.jit
def as_float(bits):
    """Return the float32 of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(distance):
    """Return the bits of distances, which are ordered as they are."""
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def reach_of(share, mass, vocab, inv_temperature):
    """Return a distance past which tokens weigh less than top-p leaves out."""
    spare = tl.maximum((1 - share) * mass / vocab, 1e-37)
    return tl.maximum(-tl.log2(spare), 0.0) / inv_temperature
