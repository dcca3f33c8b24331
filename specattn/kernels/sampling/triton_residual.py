"""Draw tokens from distributions or their residuals; coins to draw by."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weights(
    p_row,
    q_row,
    q_on,
    refused,
    num_refused,
    segment,
    vocab,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Return max(p - q, 0), or p, without refused tokens; NaN stays."""
    lane = tl.arange(0, SEGMENT)  # [SEGMENT]
    token = segment[:, None] * SEGMENT + lane[None, :]  # [ROWS, SEGMENT]
    rest = tl.load(p_row + token, mask=token < vocab, other=0)
    if q_row is not None:
        rest -= tl.load(q_row + token, mask=(token < vocab) & q_on, other=0)
    rest = tl.where(rest < 0, 0.0, rest)
    for first in range(0, num_refused, 32):
        # a token is refused where its row and its column name the same entry of the list
        rows = tl.zeros([ROWS], tl.int32)
        columns = tl.zeros([SEGMENT], tl.int32)
        for i in range(first, tl.minimum(first + 32, num_refused)):
            gone = tl.load(refused + i)
            rows |= tl.where(segment == gone // SEGMENT, 1 << (i - first), 0)
            columns |= tl.where(lane == gone % SEGMENT, 1 << (i - first), 0)
        rest = tl.where((rows[:, None] & columns[None, :]) != 0, 0.0, rest)
    return rest


@triton.jit
def sample_weights(
    p_row,
    q_row,
    q_on,
    refused,
    num_refused,
    coin,
    vocab,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Return the first token to exceed coin * total; -1 for none."""
    row = tl.arange(0, ROWS)  # [ROWS]
    tile = tl.arange(0, TILES)[:, None]  # [TILES, 1]
    masses = tl.zeros([TILES, ROWS], tl.float32)
    for i in range(tl.cdiv(vocab, ROWS * SEGMENT)):
        here = i * ROWS + row
        rest = _weights(p_row, q_row, q_on, refused, num_refused, here, vocab, ROWS, SEGMENT)
        masses = tl.where(tile == i, tl.sum(rest, 1)[None, :], masses)
    mass = tl.reshape(masses, [TILES * ROWS])
    segment = tl.arange(0, TILES * ROWS)
    reached = tl.cumsum(mass, 0)
    goal = coin * tl.max(reached, 0)
    # Rounding may leave nothing above the goal: then the last token with weight. A segment whose
    # mass is NaN or infinite comes after all others.
    last = tl.where(mass > 0, segment, -1)
    last = tl.max(tl.where(mass < float("inf"), last, TILES * ROWS), 0)
    hit = tl.min(tl.where((mass > 0) & (reached > goal), segment, TILES * ROWS), 0)
    chosen = tl.where(hit < TILES * ROWS, hit, last)
    below = tl.max(tl.where(segment == chosen - 1, reached, 0.0), 0)

    here = tl.maximum(chosen, 0) + tl.arange(0, 1)
    rest = _weights(p_row, q_row, q_on, refused, num_refused, here, vocab, 1, SEGMENT)
    rest = tl.reshape(rest, [SEGMENT])
    token = tl.maximum(chosen, 0) * SEGMENT + tl.arange(0, SEGMENT)
    past = (rest > 0) & (below + tl.cumsum(rest, 0) > goal)
    hit = tl.min(tl.where(past, token, vocab), 0)
    found = tl.where(hit < vocab, hit, tl.max(tl.where(rest > 0, token, -1), 0))
    return tl.where(last < TILES * ROWS, found, -1)


@triton.jit
def sample_residual(
    p_row,
    q_row,
    q_on,
    refused,
    num_refused,
    coin,
    vocab,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Draw from the residual; without mass from the target; else -1."""
    token = tl.full([], -1, tl.int32)
    tries = 0
    while (token < 0) & (tries < 2):
        first = tries == 0
        count = tl.where(first, num_refused, 0)
        token = sample_weights(
            p_row, q_row, q_on & first, refused, count, coin, vocab, ROWS, SEGMENT, TILES
        )
        tries += 1
    return token.to(tl.int64)


@triton.jit
def draw_kernel(
    weights,  # [B, V] float32
    coins,  # [B] float32
    tokens,  # [B] int64, out
    vocab,
    stride,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Draw a token of one row."""
    req = tl.program_id(0).to(tl.int64)
    row = weights + req * stride
    coin = tl.load(coins + req)
    # it refuses no tokens: any pointer names the list of none
    token = sample_weights(row, None, False, tokens, 0, coin, vocab, ROWS, SEGMENT, TILES)
    tl.store(tokens + req, tl.maximum(token, 0).to(tl.int64))


@triton.jit
def _mix(state):
    """One SplitMix64 step."""
    state += 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def coins_kernel(
    seeds,  # [B] int64
    positions,  # [B, M] or [B]
    coins,  # [draws, B, D] float32, out
    count,
    width,
    first_draw,
    stride_req,
    stride_depth,
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the coins of requests, depths and draws."""
    draw = tl.program_id(1)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
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
