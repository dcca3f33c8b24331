"""Find the thresholds of top-k and top-p in lists, or by counting.

Functions are given the ``whole`` row: its logits, their number, the peak, the inverse temperature.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.sampling.keys import finite, load_scores
from specattn.kernels.sampling.thresholds import as_bits, as_float, reach_of, settings_of


@triton.jit
def _within(whole, limit, BLOCK: tl.constexpr):
    """Return number and weight of tokens at most ``limit`` below the peak."""
    row, vocab, peak, inv_temperature = whole
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        distance = peak - load_scores(row, start + tl.arange(0, BLOCK), vocab)
        inside = distance <= limit
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp2(-distance * inv_temperature), 0.0)
    return tl.sum(count, 0), tl.sum(mass.to(tl.float64), 0)


@triton.jit
def _keep(whole, low, high, kept, BLOCK: tl.constexpr):
    """Write the distances above ``low`` and up to ``high`` side by side."""
    row, vocab, peak, _ = whole
    count = 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        bits = as_bits(peak - load_scores(row, token, vocab))
        inside = (bits > low) & (bits <= high) & (token < vocab)
        place = count + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(kept + place, bits, mask=inside)
        count += tl.sum(inside.to(tl.int32), 0)
    return count


@triton.jit
def _guess(round, first, low, high):
    """Return the next distance to try between two bounds, all as bits."""
    near = tl.where(low < 0, 0.0, as_float(low))
    far = as_float(high)
    # all finite logits if the first is too near; later steps that double
    beyond = tl.where(round == 1, 3.4028234e38, 2 * near + 8)
    middle = tl.where(far > 1e30, beyond, (near + far) / 2)
    bits = as_bits(tl.where(round == 0, first, middle))
    # by bits at last: whatever the logits are, 31 more rounds end it
    bits = tl.where(round < 16, bits, low + (high - low) // 2)
    return tl.minimum(tl.maximum(bits, low + 1), high - 1)


@triton.jit
def _closer(at, n, m, goal, by_mass, low, high, within, count, mass):
    """Narrow a search after ``n`` tokens of weight ``m`` up to ``at``."""
    enough = tl.where(by_mass, m, n.to(tl.float64)) >= goal
    high = tl.where(enough, at, high)
    within = tl.where(enough, n, within)
    low = tl.where(enough, low, at)
    count = tl.where(enough, count, n)
    mass = tl.where(enough, mass, m)
    return low, high, within, count, mass


@triton.jit
def _halve(distance, weight, nearer, lighter, goal, by_mass, low, high, within):
    """Search among tokens in registers; those of no concern are NaN away."""
    count, mass = nearer, lighter
    while high - low > 1:
        at = low + (high - low) // 2
        inside = distance <= as_float(at)
        n = nearer + tl.sum(inside.to(tl.int32), 0)
        m = lighter + tl.sum(tl.where(inside, weight, 0.0).to(tl.float64), 0)
        low, high, within, count, mass = _closer(
            at, n, m, goal, by_mass, low, high, within, count, mass
        )
    return high, within, count, mass


@triton.jit
def _listed(listed, size, whole, KEPT: tl.constexpr):
    """Load a list's tokens and their distances, NaN behind its end."""
    row, vocab, peak, _ = whole
    lane = tl.arange(0, KEPT)  # [KEPT]
    token = tl.load(listed + lane, mask=lane < size, other=0)
    distance = peak - load_scores(row, token, vocab)
    return token, tl.where(lane < size, distance, float("nan"))


@triton.jit
def _among(listed, note, whole, goal, by_mass, high, within, KEPT: tl.constexpr):
    """Do as `_search` in a list; tell if it holds the threshold."""
    _, _, _, inv_temperature = whole
    nearer = tl.load(note + 2).to(tl.int32)
    size = tl.load(note + 3).to(tl.int32)
    lighter = tl.load(note).to(tl.float64) / 2.0**40
    _, distance = _listed(listed, size, whole, KEPT)
    weight = tl.exp2(-distance * inv_temperature)
    bits = as_bits(distance)
    there = distance == distance
    low = tl.min(tl.where(there, bits, 0x7F800000), 0) - 1
    least = tl.minimum(high, tl.max(tl.where(there, bits, -1), 0))
    inside = there & (bits <= least)
    upto = nearer + tl.sum(inside.to(tl.int32), 0)
    reached = lighter + tl.sum(tl.where(inside, weight, 0.0).to(tl.float64), 0)
    held = (size > 0) & (least > low)
    if by_mass:
        held = held & ((lighter < goal) | (nearer == 0)) & ((reached >= goal) | (upto >= within))
    threshold, upto, nearer, lighter = _halve(
        distance, weight, nearer, lighter, goal, by_mass, low, least, upto
    )
    return threshold, upto, nearer, lighter, held


@triton.jit
def _nth_listed(listed, note, whole, threshold, nth, KEPT: tl.constexpr):
    """Do as `_nth_at` in a list of all tokens at the threshold."""
    size = tl.load(note + 3).to(tl.int32)
    token, distance = _listed(listed, size, whole, KEPT)
    equal = distance == threshold
    low = tl.full([], -1, tl.int32)
    _, vocab, _, _ = whole
    high = vocab - 1
    while high - low > 1:
        at = low + (high - low) // 2
        enough = tl.sum((equal & (token <= at)).to(tl.int32), 0) >= nth
        high = tl.where(enough, at, high)
        low = tl.where(enough, low, at)
    return high


@triton.jit
def _search(
    whole, goal, by_mass, first, high, within, kept, KEPT: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the least distance within which are ``goal`` tokens, or that weight.

    Returns its bits, the tokens up to it, and tokens and weight strictly nearer. ``high`` and
    ``within`` are a distance that is far enough, and the tokens up to it.
    """
    _, _, _, inv_temperature = whole
    low = tl.full([], -1, tl.int32)
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    round = 0
    while (high - low > 1) & (within - count > KEPT):
        at = _guess(round, first, low, high)
        n, m = _within(whole, as_float(at), BLOCK)
        low, high, within, count, mass = _closer(
            at, n, m, goal, by_mass, low, high, within, count, mass
        )
        round += 1
    if high - low > 1:
        tl.debug_barrier()
        total = _keep(whole, low, high, kept, BLOCK)
        tl.debug_barrier()
        lane = tl.arange(0, KEPT)  # [KEPT]
        distance = as_float(tl.load(kept + lane, mask=lane < total, other=0x7FC00000))
        weight = tl.exp2(-distance * inv_temperature)
        high, within, count, mass = _halve(
            distance, weight, count, mass, goal, by_mass, low, high, within
        )
    return high, within, count, mass


@triton.jit
def _nth_at(whole, threshold, nth, BLOCK: tl.constexpr):
    """Return the ``nth`` token, from 1, whose distance is ``threshold``."""
    row, vocab, peak, _ = whole
    found = vocab
    count = 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        equal = (peak - load_scores(row, token, vocab)) == threshold
        place = count + tl.cumsum(equal.to(tl.int32), 0)
        found = tl.minimum(found, tl.min(tl.where(equal & (place == nth), token, vocab), 0))
        count += tl.sum(equal.to(tl.int32), 0)
    return found


@triton.jit(do_not_specialize=["splits"])
def threshold_kernel(
    logits,  # [R, V]
    given,  # temperature, top-k, top-p, keys, masses: see `settings_of`
    thresholds,  # [R, 2] float32, out: distance up to which tokens are kept, and their weight
    lasts,  # [R] int32, out: the last token that is kept at that distance
    lists,  # [R, thresholds, KEPT] int32: tokens around a threshold; scratch if they are more
    notes,  # [R, 2, 4] int64: see `histogram.gather_kernel`
    vocab,
    stride,
    rows_per_req,
    splits,
    BLOCK_P: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the distance, and the last token there, that rows keep."""
    HAS_K: tl.constexpr = given[1] is not None
    HAS_P: tl.constexpr = given[2] is not None
    row = tl.program_id(0).to(tl.int64)
    inv_temperature, peak, total, lowest, few, share, by_count, by_mass = settings_of(
        given, row, splits, vocab, rows_per_req, BLOCK_P
    )
    # what all searches read of the row
    whole = logits + row * stride, vocab, peak, inv_temperature
    lists += row * (HAS_K + HAS_P) * KEPT
    notes += row * 8
    high = tl.full([], 0x7F800000, tl.int32)
    within = vocab
    # of the tokens at the threshold, those that are kept
    ties = vocab
    mass = total.to(tl.float64)
    # whether a list has the tokens at the threshold
    known = vocab < 0
    nearer = tl.full([], 0, tl.int32)
    lighter = tl.full([], 0.0, tl.float64)
    if by_count:
        goal = few.to(tl.float64)
        known = tl.load(notes + 3) <= KEPT
        if known:
            high, within, nearer, lighter, known = _among(
                lists, notes, whole, goal, False, high, within, KEPT
            )
        if known == 0:
            first = finite(peak) - finite(lowest)
            furthest = tl.full([], 0x7F800000, tl.int32)
            high, within, nearer, lighter = _search(
                whole, goal, False, first, furthest, vocab, lists, KEPT, BLOCK
            )
        ties = few - nearer
        mass = lighter + ties * tl.exp2(-as_float(high) * inv_temperature).to(tl.float64)
    if by_mass:
        goal = share.to(tl.float64) * mass
        threshold, upto = high, within
        known = tl.load(notes + 7) <= KEPT
        listed = lists + HAS_K * KEPT
        if known:
            threshold, upto, nearer, lighter, known = _among(
                listed, notes + 4, whole, goal, True, high, within, KEPT
            )
        if known == 0:
            reach = reach_of(share, mass.to(tl.float32), vocab, inv_temperature)
            reach = tl.minimum(reach, 1e38)
            threshold, upto, nearer, lighter = _search(
                whole, goal, True, reach, high, within, listed, KEPT, BLOCK
            )
        each = tl.exp2(-as_float(threshold) * inv_temperature).to(tl.float64)
        wanted = tl.ceil((goal - lighter) / tl.maximum(each, 1e-300))
        there = tl.where(threshold == high, tl.minimum(ties, upto - nearer), upto - nearer)
        wanted = tl.minimum(tl.maximum(wanted, 1.0), there.to(tl.float64))
        high, within, ties = threshold, upto, wanted.to(tl.int32)
        mass = lighter + wanted * each
        ties = tl.where(ties < upto - nearer, ties, vocab)
    elif by_count:
        ties = tl.where(ties < within - (few - ties), ties, vocab)
    last = vocab
    # what is infinitely far away has no weight
    if (ties < vocab) & (high < 0x7F800000):
        if known:
            lists += tl.where(by_mass, HAS_K + 0, 0) * KEPT
            notes += tl.where(by_mass, 4, 0)
            last = _nth_listed(lists, notes, whole, as_float(high), ties, KEPT)
        else:
            last = _nth_at(whole, as_float(high), ties, BLOCK)
    tl.store(thresholds + row * 2, as_float(high))
    tl.store(thresholds + row * 2 + 1, mass.to(tl.float32))
    tl.store(lasts + row, last)
