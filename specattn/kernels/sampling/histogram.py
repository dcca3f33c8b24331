"""Count tokens by distance from the peak; list those near thresholds."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.sampling.keys import load_scores
from specattn.kernels.sampling.thresholds import as_bits, as_float, reach_of, settings_of


@triton.jit
def _bin_of(distance, scale, BINS: tl.constexpr):
    """Return the bin of each distance.

    Three quarters of the bins are even; past them, each doubling of the distance has 8 bins.
    """
    EVEN: tl.constexpr = BINS // 4 * 3
    steps = distance * scale
    start = as_bits(tl.full([], EVEN, tl.float32))
    far = tl.minimum(EVEN + ((as_bits(steps) - start) >> 20), BINS - 1)
    return tl.where(steps < EVEN, tl.minimum(steps, EVEN).to(tl.int32), far)


@triton.jit
def _edge_of(number, BINS: tl.constexpr):
    """Return where a bin begins, in steps; past the last one, infinity."""
    EVEN: tl.constexpr = BINS // 4 * 3
    start = as_bits(tl.full([], EVEN, tl.float32))
    far = as_float(start + ((tl.maximum(number, EVEN) - EVEN) << 20))
    edge = tl.where(number <= EVEN, number.to(tl.float32), far)
    return tl.where(number < BINS, edge, float("inf"))


@triton.jit
def _scale_of(levels, row, splits, vocab, settings, BINS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return bins per unit of distance, fine where thresholds are likely."""
    inv_temperature, peak, total, _, _, share, by_count, by_mass = settings
    split = tl.arange(0, BLOCK_P)  # [BLOCK_P]
    level = tl.load(levels + row * splits + split, mask=split < splits, other=-float("inf"))
    known = level > -float("inf")
    mean = tl.sum(tl.where(known, peak - level, 0.0), 0)
    mean /= tl.maximum(tl.sum(known.to(tl.int32), 0), 1)
    reach = 2 * mean
    if by_mass & (by_count == 0):
        reach = tl.minimum(4 * mean, reach_of(share, total, vocab, inv_temperature))
    return tl.minimum(tl.maximum(BINS // 4 * 3 / tl.maximum(reach, 1e-30), 1e-30), 1e30)


@triton.jit
def count_kernel(
    logits,  # [R, V]
    given,  # temperature, top-k, top-p, keys, masses: see `settings_of`
    levels,  # [R, splits] float32: what a split's larger logits are about
    thresholds,  # [R, 2] float32, out: bins per distance, until there is a cut
    counts,  # [R, BINS] int32, zeros, out: tokens by their distance from the peak
    vocab,
    stride,
    rows_per_req,
    BLOCK_P: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count each split's tokens by distance, unless the row is kept whole."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    settings = settings_of(given, row, splits, vocab, rows_per_req, BLOCK_P)
    _, peak, _, _, _, _, by_count, by_mass = settings
    if by_count | by_mass:
        scale = _scale_of(levels, row, splits, vocab, settings, BINS, BLOCK_P)
        if split == 0:
            # the next kernel has to number distances exactly as this one
            tl.store(thresholds + row * 2, scale)
        found = tl.zeros([BINS], tl.int32)
        for i in range(split, tl.cdiv(vocab, BLOCK), splits):
            token = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
            distance = peak - load_scores(logits + row * stride, token, vocab)
            found += tl.histogram(_bin_of(distance, scale, BINS), BINS, mask=token < vocab)
        lane = tl.arange(0, BINS)
        tl.atomic_add(counts + row * BINS + lane, found, mask=found > 0)


@triton.jit
def _bins_of_cuts(count, fineness, settings, BINS: tl.constexpr):
    """Return the bin of the threshold by number, and two by mass.

    The weights of bins are known within bounds, those of their edges, and so is where a mass is
    reached: counted from the peak, or from the far end, whichever says more.
    """
    _, _, total, _, few, share, by_count, by_mass = settings
    lane = tl.arange(0, BINS)  # [BINS]
    until = tl.cumsum(count, 0)
    kth = tl.full([], BINS, tl.int32)
    if by_count:
        kth = tl.sum((until < few).to(tl.int32), 0)
        count = tl.where(lane < kth, count, tl.where(lane == kth, few - until + count, 0))
    first = tl.full([], BINS, tl.int32)
    last = tl.full([], -1, tl.int32)
    if by_mass:
        # room for rounding
        most = count * tl.exp2(-_edge_of(lane, BINS) * fineness) * 1.0002
        least = count * tl.exp2(-_edge_of(lane + 1, BINS) * fineness) * 0.9998
        upper, lower = tl.sum(most, 0), tl.sum(least, 0)
        if by_count == 0:
            upper, lower = tl.minimum(upper, total * 1.0001), tl.maximum(lower, total * 0.9999)
        inner = lane > 0
        spare = 1 - share
        # bins that end too early, whatever the weights; then those that may
        far = tl.sum(((tl.cumsum(least, 0, reverse=True) > spare * upper) & inner).to(tl.int32), 0)
        first = tl.maximum(far, tl.sum((tl.cumsum(most, 0) < share * lower).to(tl.int32), 0))
        far = tl.sum(((tl.cumsum(most, 0, reverse=True) > spare * lower) & inner).to(tl.int32), 0)
        last = tl.minimum(far, tl.sum((tl.cumsum(least, 0) < share * upper).to(tl.int32), 0))
    return kth, first, last


@triton.jit
def _append(listed, filled, inside, token, KEPT: tl.constexpr):
    """Add tokens to a list that programs share, in any order."""
    number = tl.sum(inside.to(tl.int32), 0)
    if number > 0:
        start = tl.atomic_add(filled, number.to(tl.int64)).to(tl.int32)
        place = start + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(listed + place, token, mask=inside & (place < KEPT))


@triton.jit
def gather_kernel(
    logits,  # [R, V]
    given,  # temperature, top-k, top-p, keys, masses: see `settings_of`
    thresholds,  # [R, 2] float32: bins per distance
    counts,  # [R, BINS] int32
    lists,  # [R, thresholds, KEPT] int32, out: tokens of the bins that hold a cut
    notes,  # [R, 2, 4] int64, zeros, out, by number and by mass: fixed-point weight of
    # what is nearer, tokens that lists were asked to take, tokens nearer, and in bins
    vocab,
    stride,
    rows_per_req,
    BLOCK_P: tl.constexpr,
    BINS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the tokens of the bins that hold thresholds; weigh nearer ones."""
    HAS_K: tl.constexpr = given[1] is not None
    HAS_P: tl.constexpr = given[2] is not None
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    settings = settings_of(given, row, splits, vocab, rows_per_req, BLOCK_P)
    inv_temperature, peak, _, _, _, _, by_count, by_mass = settings
    if by_count | by_mass:
        scale = tl.load(thresholds + row * 2)
        lane = tl.arange(0, BINS)
        count = tl.load(counts + row * BINS + lane)
        fineness = tl.minimum(inv_temperature / scale, 1e30)
        kth, first, last = _bins_of_cuts(count, fineness, settings, BINS)
        size = tl.sum(tl.where(lane == kth, count, 0), 0)
        sizes = tl.sum(tl.where((lane >= first) & (lane <= last), count, 0), 0)
        notes += row * 8
        if split == 0:
            tl.store(notes + 2, tl.sum(tl.where(lane < kth, count, 0), 0).to(tl.int64))
            tl.store(notes + 3, size.to(tl.int64))
            tl.store(notes + 6, tl.sum(tl.where(lane < first, count, 0), 0).to(tl.int64))
            tl.store(notes + 7, sizes.to(tl.int64))
        lists += row * (HAS_K + HAS_P) * KEPT
        nearer = tl.zeros([BLOCK], tl.float32)
        lighter = tl.zeros([BLOCK], tl.float32)
        for i in range(split, tl.cdiv(vocab, BLOCK), splits):
            token = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
            distance = peak - load_scores(logits + row * stride, token, vocab)
            number = tl.where(token < vocab, _bin_of(distance, scale, BINS), BINS)
            weight = tl.exp2(-distance * inv_temperature)
            if HAS_K:
                nearer += tl.where(number < kth, weight, 0.0)
                _append(
                    lists, notes + 1, (number == kth) & (kth < BINS) & (size <= KEPT), token, KEPT
                )
            if HAS_P:
                lighter += tl.where(number < first, weight, 0.0)
                inside = (number >= first) & (number <= last) & (sizes <= KEPT)
                _append(lists + HAS_K * KEPT, notes + 5, inside, token, KEPT)
        # sums of integers are the same in any order
        if HAS_K:
            tl.atomic_add(notes, (tl.sum(nearer.to(tl.float64), 0) * 2.0**40).to(tl.int64))
        if HAS_P:
            tl.atomic_add(notes + 4, (tl.sum(lighter.to(tl.float64), 0) * 2.0**40).to(tl.int64))
