"""Where top-k and top-p cut a distribution: found by counting and weighing, without a sort."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.choose import finite, load_scores, score_of, token_of


@triton.jit
def sharpness_of(temperature):
    """Return what logits are multiplied with before exp2; finite at a temperature of 0."""
    return tl.minimum(tl.maximum(1.4426950408889634 / temperature, 1e-37), 3e38)


@triton.jit
def merge_parts(keys, masses, row, parts, sharpness, BLOCK_P: tl.constexpr):
    """Return a row's most probable token with its logit, all its weight, and its lowest part."""
    part = tl.arange(0, BLOCK_P)                                             # [BLOCK_P]
    live = part < parts
    key = tl.load(keys + row * parts + part, mask=live, other=-0x8000000000000000)
    peaks = tl.where(live, score_of(key), float("inf"))
    best = tl.max(key, 0)
    peak = score_of(best)
    mass = tl.load(masses + row * parts + part, mask=live, other=0)
    below = tl.where(live, finite(peaks) - finite(peak), 0.0)
    total = tl.sum(mass * tl.exp2(below * sharpness), 0)
    return token_of(best), peak, total, tl.min(peaks, 0)


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _as_bits(distance):
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def _within(row, vocab, peak, sharpness, limit, BLOCK: tl.constexpr):
    """Return how many tokens are at most ``limit`` below the peak, and their weight."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        distance = peak - load_scores(row, start + tl.arange(0, BLOCK), vocab)
        inside = distance <= limit
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp2(-distance * sharpness), 0.0)
    return tl.sum(count, 0), tl.sum(mass.to(tl.float64), 0)


@triton.jit
def _keep(row, vocab, peak, low, high, kept, BLOCK: tl.constexpr):
    """Write the distances above ``low`` and up to ``high`` side by side."""
    count = 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        bits = _as_bits(peak - load_scores(row, token, vocab))
        inside = (bits > low) & (bits <= high) & (token < vocab)
        place = count + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(kept + place, _as_float(bits), mask=inside)
        count += tl.sum(inside.to(tl.int32), 0)
    return count


@triton.jit
def _guess(round, first, low, high):
    """Return where to look next between two distances, given and returned as bits."""
    near = tl.where(low < 0, 0.0, _as_float(low))
    far = _as_float(high)
    # all finite logits if the first is too near; later steps that double
    beyond = tl.where(round == 1, 3.4028234e38, 2 * near + 8)
    middle = tl.where(far > 1e30, beyond, (near + far) / 2)
    bits = _as_bits(tl.where(round == 0, first, middle))
    # by bits at last: whatever the logits are, 31 more rounds end it
    bits = tl.where(round < 16, bits, low + (high - low) // 2)
    return tl.minimum(tl.maximum(bits, low + 1), high - 1)


@triton.jit
def _search(
    row, vocab, peak, sharpness, goal, by_mass, first, high, within, kept,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,
):
    """Find the least distance within which there are ``goal`` tokens, or as much weight.

    Returns its bits, the tokens up to it, and tokens and weight strictly nearer. ``high`` and
    ``within`` are a distance that is far enough, and the tokens up to it.
    """
    low = tl.full([], -1, tl.int32)
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    round = 0
    while (high - low > 1) & (within - count > KEPT):
        at = _guess(round, first, low, high)
        n, m = _within(row, vocab, peak, sharpness, _as_float(at), BLOCK)
        enough = tl.where(by_mass, m, n.to(tl.float64)) >= goal
        high = tl.where(enough, at, high)
        within = tl.where(enough, n, within)
        low = tl.where(enough, low, at)
        count = tl.where(enough, count, n)
        mass = tl.where(enough, mass, m)
        round += 1
    if high - low > 1:
        tl.debug_barrier()
        total = _keep(row, vocab, peak, low, high, kept, BLOCK)
        tl.debug_barrier()
        lane = tl.arange(0, KEPT)                                            # [KEPT]
        distance = tl.load(kept + lane, mask=lane < total, other=float("nan"))
        weight = tl.exp2(-distance * sharpness)
        nearer, lighter = count, mass
        while high - low > 1:
            at = low + (high - low) // 2
            inside = distance <= _as_float(at)
            n = nearer + tl.sum(inside.to(tl.int32), 0)
            m = lighter + tl.sum(tl.where(inside, weight, 0.0).to(tl.float64), 0)
            enough = tl.where(by_mass, m, n.to(tl.float64)) >= goal
            high = tl.where(enough, at, high)
            within = tl.where(enough, n, within)
            low = tl.where(enough, low, at)
            count = tl.where(enough, count, n)
            mass = tl.where(enough, mass, m)
    return high, within, count, mass


@triton.jit
def _nth_at(row, vocab, peak, cut, nth, BLOCK: tl.constexpr):
    """Return the ``nth`` token, from 1, whose distance is ``cut``."""
    found = vocab
    count = 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        equal = (peak - load_scores(row, token, vocab)) == cut
        place = count + tl.cumsum(equal.to(tl.int32), 0)
        found = tl.minimum(found, tl.min(tl.where(equal & (place == nth), token, vocab), 0))
        count += tl.sum(equal.to(tl.int32), 0)
    return found


@triton.jit
def cut_kernel(
    logits,       # [R, V]
    temperature,  # [B] float32
    top_k,        # [B] int32
    top_p,        # [B] float32
    keys,         # [R, parts] int64
    masses,       # [R, parts] float32
    cuts,         # [R, 2] float32, out: distance up to which tokens are kept, and their weight
    lasts,        # [R] int32, out: the last token that is kept at that distance
    kept,         # [R, KEPT] float32, scratch
    vocab, stride, rows_per_req, parts,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr,
    BLOCK_P: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):
    """Find what each row keeps: all up to a distance, and there all up to a token."""
    row = tl.program_id(0).to(tl.int64)
    req = row // rows_per_req
    warmth = tl.load(temperature + req)
    sharpness = sharpness_of(warmth)
    _, peak, total, lowest = merge_parts(keys, masses, row, parts, sharpness, BLOCK_P)
    logits += row * stride
    kept += row * KEPT
    few = vocab
    if HAS_K:
        few = tl.load(top_k + req)
    share = tl.full([], 1.0, tl.float32)
    if HAS_P:
        share = tl.load(top_p + req)
    drawn = (warmth != 0) & (peak > -float("inf"))
    high = tl.full([], 0x7F800000, tl.int32)
    within = vocab
    # of the tokens at the cut, those that are kept
    ties = vocab
    mass = total.to(tl.float64)
    if drawn & (few > 0) & (few < vocab):
        high, within, nearer, lighter = _search(
            logits, vocab, peak, sharpness, few.to(tl.float64), False,
            finite(peak) - finite(lowest), high, within, kept, KEPT, BLOCK,
        )
        ties = few - nearer
        mass = lighter + ties * tl.exp2(-_as_float(high) * sharpness).to(tl.float64)
    if drawn & (share < 1):
        # what is further away weighs less than what may be left out
        spare = tl.maximum((1 - share) * mass.to(tl.float32) / vocab, 1e-37)
        goal = share.to(tl.float64) * mass
        cut, upto, nearer, lighter = _search(
            logits, vocab, peak, sharpness, goal, True,
            tl.minimum(tl.maximum(-tl.log2(spare), 0.0) / sharpness, 1e38), high, within, kept,
            KEPT, BLOCK,
        )
        each = tl.exp2(-_as_float(cut) * sharpness).to(tl.float64)
        wanted = tl.ceil((goal - lighter) / tl.maximum(each, 1e-300))
        there = tl.where(cut == high, tl.minimum(ties, upto - nearer), upto - nearer)
        wanted = tl.minimum(tl.maximum(wanted, 1.0), there.to(tl.float64))
        high, within, ties = cut, upto, wanted.to(tl.int32)
        mass = lighter + wanted * each
        ties = tl.where(ties < upto - nearer, ties, vocab)
    elif drawn & (few > 0) & (few < vocab):
        ties = tl.where(ties < within - (few - ties), ties, vocab)
    last = vocab
    # what is infinitely far away has no weight
    if (ties < vocab) & (high < 0x7F800000):
        last = _nth_at(logits, vocab, peak, _as_float(high), ties, BLOCK)
    tl.store(cuts + row * 2, _as_float(high))
    tl.store(cuts + row * 2 + 1, mass.to(tl.float32))
    tl.store(lasts + row, last)
