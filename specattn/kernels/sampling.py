"""Sampling: what a request draws from, its coins, and draws; nothing is sorted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specattn.kernels.accept import invert, vocab_tiles
from specattn.kernels.choose import finite, load_scores, ranked, require_rows, score_of, token_of
from specattn.kernels.dense import require_dense
from specattn.kernels.reference.sampling import ACCEPT, DRAFT, FINAL
from specattn.kernels.spread import programs_per_row

__all__ = ["ACCEPT", "DRAFT", "FINAL", "draw_tokens", "path_coins", "target_probs", "uniform"]

# tokens that a program reads at a time
BLOCK = 2048
CUT_BLOCK = 8192
# tokens that a cut is searched among in registers
KEPT = 4096


@triton.jit
def _sharpness(temperature):
    """Return what logits are multiplied with before exp2; finite at a temperature of 0."""
    return tl.minimum(tl.maximum(1.4426950408889634 / temperature, 1e-37), 3e38)


@triton.jit
def _peaks_kernel(
    logits,       # [R, V]
    temperature,  # [B] float32
    keys,         # [R, parts] int64, out: the most probable token of each part
    masses,       # [R, parts] float32, out: weights relative to it
    vocab, stride, rows_per_req,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    sharpness = _sharpness(tl.load(temperature + row // rows_per_req))
    lane = tl.arange(0, BLOCK)                                               # [BLOCK]
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    tile = tl.zeros([BLOCK], tl.int32) + part
    mass = tl.zeros([BLOCK], tl.float32)
    peak = -3.0e38
    for i in range(part, tl.cdiv(vocab, BLOCK), parts):
        score = load_scores(logits + row * stride, i * BLOCK + lane, vocab)
        higher = tl.maximum(peak, tl.max(score, 0))
        mass *= tl.exp2((peak - higher) * sharpness)
        mass += tl.exp2((score - higher) * sharpness)
        peak = higher
        better = score > best
        best = tl.where(better, score, best)
        tile = tl.where(better, i, tile)
    tl.store(keys + row * parts + part, tl.max(ranked(best, tile * BLOCK + lane), 0))
    tl.store(masses + row * parts + part, tl.sum(mass, 0))


@triton.jit
def _merge(keys, masses, row, parts, sharpness, BLOCK_P: tl.constexpr):
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
def _cut_kernel(
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
    row = tl.program_id(0).to(tl.int64)
    req = row // rows_per_req
    warmth = tl.load(temperature + req)
    sharpness = _sharpness(warmth)
    _, peak, total, lowest = _merge(keys, masses, row, parts, sharpness, BLOCK_P)
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


@triton.jit
def _probs_kernel(
    logits,       # [R, V]
    temperature,  # [B] float32
    keys,         # [R, parts] int64
    masses,       # [R, parts] float32
    cuts,         # [R, 2] float32
    lasts,        # [R] int32
    probs,        # [R, V] float32, out
    vocab, stride, rows_per_req,
    CUT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    warmth = tl.load(temperature + row // rows_per_req)
    sharpness = _sharpness(warmth)
    best, peak, total, _ = _merge(keys, masses, row, parts, sharpness, BLOCK_P)
    one = (warmth == 0) | (peak == -float("inf"))
    if CUT:
        cut = tl.load(cuts + row * 2)
        total = tl.load(cuts + row * 2 + 1)
        last = tl.load(lasts + row)
    scale = 1 / total
    for i in range(part, tl.cdiv(vocab, BLOCK), parts):
        token = i * BLOCK + tl.arange(0, BLOCK)                              # [BLOCK]
        # only its place matters to a row of one token
        score = load_scores(logits + row * stride, token, tl.where(one, 0, vocab))
        distance = finite(peak) - score
        prob = tl.exp2(-distance * sharpness) * scale
        if CUT:
            prob = tl.where((distance < cut) | ((distance == cut) & (token <= last)), prob, 0.0)
        prob = tl.where(one, (token == best).to(tl.float32), prob)
        tl.store(probs + row * vocab + token, prob, mask=token < vocab)


@triton.jit
def _mix(state):
    """One SplitMix64 step."""
    state += 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _coins_kernel(
    seeds,      # [B] int64
    positions,  # [B, M] or [B]
    coins,      # [draws, B, D] float32, out
    count, width, first_draw, stride_req, stride_depth,
    DEPTHS: tl.constexpr, BLOCK: tl.constexpr,
):
    draw = tl.program_id(1)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)                    # [BLOCK]
    live = flat < count
    req, depth = flat // width, flat % width
    seed = tl.load(seeds + req, mask=live, other=0).to(tl.uint64)
    place = positions + req.to(tl.int64) * stride_req
    if DEPTHS:
        position = tl.load(place, mask=live, other=0).to(tl.int64) + depth
    else:
        position = tl.load(place + depth * stride_depth, mask=live, other=0).to(tl.int64)
    state = _mix(_mix(_mix(seed) + position.to(tl.uint64)) + (first_draw + draw).to(tl.uint64))
    coin = (state >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    tl.store(coins + draw * count + flat, coin, mask=live)


@triton.jit
def _draw_kernel(
    weights,   # [B, V] float32
    coins,     # [B] float32
    fallback,  # [B, V] float32
    tokens,    # [B] int64, out
    vocab, stride, stride_fallback,
    HAS_FALLBACK: tl.constexpr,
    ROWS: tl.constexpr, SEGMENT: tl.constexpr, TILES: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    row = weights + req * stride
    coin = tl.load(coins + req)
    # it refuses no tokens: any pointer names the list of none
    token = invert(row, row, False, tokens, 0, coin, vocab, ROWS, SEGMENT, TILES, False)
    if HAS_FALLBACK:
        row = fallback + req * stride_fallback
        other = invert(row, row, False, tokens, 0, coin, vocab, ROWS, SEGMENT, TILES, False)
        token = tl.where(token < 0, other, token)
    tl.store(tokens + req, tl.maximum(token, 0).to(tl.int64))


def target_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    rows_per_req: int,
) -> Tensor:
    """Return the distributions that sampling with these settings draws from.

    See `specattn.kernels.reference.sampling.target_probs`, whose law it is, ties included. Where a
    cut lies is found by counting and weighing, first over the row, then among few: two launches,
    and a third with ``top_k`` or ``top_p``, in which rows that have both off do nothing.

    Raises
    ------
    ValueError
        If the last axis of ``logits`` is not dense.
    """
    require_rows(logits)
    rows, vocab = logits.shape
    probs = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if not rows:
        return probs
    parts = programs_per_row(rows, triton.cdiv(vocab, BLOCK))
    keys = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    masses = probs.new_empty(rows, parts)
    common = (vocab, logits.stride(0), rows_per_req)
    block_p = triton.next_power_of_2(parts)
    _peaks_kernel[(rows, parts)](logits, temperature, keys, masses, *common, BLOCK=BLOCK)
    cut = top_k is not None or top_p is not None
    cuts, lasts = masses, keys
    if cut:
        cuts, lasts = probs.new_empty(rows, 2), keys.new_empty(rows, dtype=torch.int32)
        _cut_kernel[(rows,)](
            logits, temperature, temperature if top_k is None else top_k,
            temperature if top_p is None else top_p, keys, masses, cuts, lasts,
            probs.new_empty(rows, KEPT), *common, parts,
            HAS_K=top_k is not None, HAS_P=top_p is not None, BLOCK_P=block_p,
            KEPT=KEPT, BLOCK=CUT_BLOCK, num_warps=16,
        )
    _probs_kernel[(rows, parts)](
        logits, temperature, keys, masses, cuts, lasts, probs, *common,
        CUT=cut, BLOCK_P=block_p, BLOCK=BLOCK,
    )
    return probs


def uniform(seeds: Tensor, positions: Tensor, draw: int) -> Tensor:
    """Return coins in one launch; see `specattn.kernels.reference.sampling.uniform`."""
    require_dense(seeds=seeds)
    width = positions[0].numel() if len(positions) else 0
    flat = positions.reshape(len(positions), width) if positions.dim() != 1 else positions[:, None]
    coins = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    if coins.numel():
        _coins_kernel[(triton.cdiv(coins.numel(), 256), 1)](
            seeds, flat, coins, coins.numel(), width, draw, flat.stride(0), flat.stride(1),
            DEPTHS=False, BLOCK=256,
        )
    return coins


def path_coins(seeds: Tensor, seq_lens: Tensor, depths: int, draws: int) -> Tensor:
    """Return a step's coins in one launch.

    See `specattn.kernels.reference.sampling.path_coins`.
    """
    require_dense(seeds=seeds, seq_lens=seq_lens)
    coins = torch.empty(draws, len(seeds), depths, dtype=torch.float32, device=seeds.device)
    count = len(seeds) * depths
    if count:
        _coins_kernel[(triton.cdiv(count, 256), draws)](
            seeds, seq_lens, coins, count, depths, 0, 1, 0, DEPTHS=True, BLOCK=256,
        )
    return coins


def draw_tokens(weights: Tensor, coins: Tensor, fallback: Tensor | None = None) -> Tensor:
    """Draw one token per row in one launch; see `specattn.kernels.reference.sampling.draw_tokens`.

    Raises
    ------
    ValueError
        If a last axis is not dense.
    """
    require_dense(coins=coins)
    other = weights if fallback is None else fallback
    require_rows(weights)
    require_rows(other)
    tokens = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    if len(weights):
        _draw_kernel[(len(weights),)](
            weights, coins, other, tokens, weights.shape[1], weights.stride(0), other.stride(0),
            HAS_FALLBACK=fallback is not None, **vocab_tiles(weights.shape[1], 64),
        )
    return tokens
