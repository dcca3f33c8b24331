"""Device code of a query token's own last tiles, for deterministic attention.

A *path* is what a query token reads from the last full tile of the prefix on: the rest of the
prefix, then the tail keys it sees, in their order, as if they followed the prefix, which is where
they will be once they are committed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.attention.softmax import attend_tile


@triton.jit
def own_tiles(
    q,
    acc,
    top,
    total,
    paths,  # the path of the first token, from the first tile on
    tiles,
    tokens,
    token,  # [BM], of each row, counted from the first
    k_head,
    v_head,
    base2,
    cap_in,
    cap_out,
    K_SLOT: tl.constexpr,
    V_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to ``tiles`` tiles of each token's path, for its rows only."""
    r = tl.arange(0, BN)  # [BN]
    raw = tl.load(paths + r, mask=tiles > 0, other=0)
    turn = 0
    tile = 0
    for _ in tl.range(0, tiles * tokens, num_stages=STAGES):
        entry = raw
        visible = (token == turn)[:, None] & (entry >= 0)[None, :]
        tile += 1
        turn += (tile == tiles).to(tl.int32)
        tile = tl.where(tile == tiles, 0, tile)
        raw = tl.load(paths + tl.minimum(turn, tokens - 1) * WIDTH + tile * BN + r)
        # the complement where no key is visible
        slots = entry ^ (entry >> 31)
        acc, top, total = attend_tile(
            q,
            acc,
            top,
            total,
            slots,
            visible,
            k_head,
            v_head,
            base2,
            cap_in,
            cap_out,
            K_SLOT,
            V_SLOT,
            HEAD_DIM,
            V_DIM,
            D_PAD,
            V_PAD,
            HAS_CAP,
        )
    return acc, top, total


@triton.jit(
    do_not_specialize=[
        "stride_pos",
        "stride_tail",
        "stride_tail_pos",
        "stride_words",
        "stride_words_q",
    ]
)
def path_kernel(
    requests,  # [B, 8] int64, of the plan
    indices,  # flat int32: slot of each prefix position
    positions,  # [B, Q_LEN] int64, read under a window
    tail_slots,  # [B, TAIL] int32
    tail_positions,  # [B, TAIL] int64, read under a window
    tail_words,  # [B, Q_LEN, WORDS] int64
    paths,  # [B * Q_LEN, WIDTH] int32, out
    path_lens,  # [B * Q_LEN] int32, out
    stride_pos,
    stride_tail,
    stride_tail_pos,
    stride_words,
    stride_words_q,
    Q_LEN: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CSR: tl.constexpr,
    BN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    req = query // Q_LEN
    base = tl.load(requests + req * 8)
    prefix = tl.load(requests + req * 8 + 1).to(tl.int32)
    begin = prefix // BN * BN
    rest = prefix - begin
    # a key that is surely readable stands, complemented, for one that is not visible
    spare_at = indices + base + tl.maximum(prefix - 1, 0)
    if TAIL > 0:
        spare_at = tail_slots + req * stride_tail
    spare = ~tl.load(spare_at)
    pos_q = (prefix - 1).to(tl.int64)
    if WINDOW >= 0 and not CSR:
        pos_q = tl.load(positions + req * stride_pos + query % Q_LEN)

    r = tl.arange(0, BN)  # [BN]
    slots = tl.load(indices + base + begin + r, mask=r < rest, other=0)
    if WINDOW >= 0:
        distance = pos_q - (begin + r)
        slots = tl.where((distance >= 0) & (distance <= WINDOW), slots, spare)
    row = paths + query * WIDTH
    tl.store(row + r, slots, mask=r < rest)
    length = rest
    if TAIL > 0:
        key = tl.arange(0, TAIL_BLOCK)  # [TAIL_BLOCK]
        words = tail_words + req * stride_words + query % Q_LEN * stride_words_q
        word = tl.load(words + key // 64, mask=key < TAIL, other=0)
        seen = ((word >> (key % 64)) & 1) != 0
        slots = tl.load(tail_slots + req * stride_tail + key, mask=seen, other=0)
        if WINDOW >= 0:
            pos_k = tl.load(tail_positions + req * stride_tail_pos + key, mask=seen, other=0)
            distance = pos_q - pos_k
            slots = tl.where((distance >= 0) & (distance <= WINDOW), slots, spare)
        rank = tl.cumsum(seen.to(tl.int32), 0) - 1
        tl.store(row + rest + rank, slots, mask=seen)
        length += tl.sum(seen.to(tl.int32), 0)
    # tokens that share rows of a tile walk as many tiles as the longest path of them
    for start in tl.range(length, WIDTH, BN):
        tl.store(row + start + r, spare + r * 0, mask=start + r < WIDTH)
    tl.store(path_lens + query, length)
