"""Device code of tree attention: splits of keys against packed query rows."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.attention.paths import own_tiles
from specattn.kernels.attention.softmax import (
    EMPTY,
    FLOOR,
    LN2,
    as_factor,
    attend_tile,
    load_query,
    start_from_sinks,
    store_rows,
)


@triton.jit
def load_word(word_row, row_ok, first, nth: tl.constexpr, WORDS: tl.constexpr):
    """Load the ``nth`` tail word from bit ``first`` on; outside, 0."""
    at = (first >> 6) + nth
    ok = row_ok & (at >= 0) & (at < WORDS)
    word = tl.load(word_row + tl.minimum(tl.maximum(at, 0), WORDS - 1), mask=ok, other=0)
    return word.to(tl.uint64, bitcast=True)  # [BM]


@triton.jit
def ones(count):
    """The lowest ``count`` bits, none below 0 and all 64 above 63."""
    some = (1 << (tl.minimum(tl.maximum(count, 0), 63)).to(tl.uint64)) - 1
    return tl.where(count > 63, 0xFFFFFFFFFFFFFFFF, some)


@triton.jit
def row_bits(word, next_word, first, left):
    """Return the visibility of 64 keys, ``left`` in the split, to rows.

    Bit 0 is tail key ``first``, a prefix key where that is negative.
    """
    shift = (first & 63).to(tl.uint64)
    # two shifts, as one by 64 would be undefined
    bits = (word >> shift) | ((next_word << 1) << (63 - shift))  # [BM]
    return (bits | ones(-first)) & ones(left)


@triton.jit
def spread(bits, more_bits, r, BN: tl.constexpr):
    """Spread bits, ``more_bits`` from 64 on, over keys ``r [1, BN]``."""
    half = bits.to(tl.uint32)[:, None]  # [BM, 1]
    # halves, so that a thread's shifts are 32 bits wide and by almost constant amounts
    if BN > 32:
        half = tl.where(r & 32 == 0, half, (bits >> 32).to(tl.uint32)[:, None])
    if BN > 64:
        low = more_bits.to(tl.uint32)[:, None]
        high = (more_bits >> 32).to(tl.uint32)[:, None]
        half = tl.where(r < 64, half, tl.where(r & 32 == 0, low, high))
    return ((half >> (r & 31).to(tl.uint32)) & 1) != 0  # [BM, BN]


@triton.jit
def _load_index(index_row, pos, first_key, prefix_len):
    """Load raw slots of prefix positions, clamped to readable ones, unmasked."""
    return tl.load(
        index_row + tl.maximum(tl.minimum(tl.maximum(pos, first_key), prefix_len - 1), 0)
    )


@triton.jit
def _load_tail(tail_row, pos, prefix_len, TAIL: tl.constexpr, STEP: tl.constexpr):
    return tl.load(tail_row + tl.minimum(tl.maximum(pos - prefix_len, 0), TAIL - 1) * STEP)


@triton.jit
def _masked_tiles(
    q,
    acc,
    top,
    total,
    begin,
    end,  # first key of the first tile; end of the keys
    # of the first tile; None where there is no tail, no such word, no window
    raw_index,  # [BN] int32, index entries
    raw_tail,  # [BN] int32, tail slots
    raw_pos,  # [BN] int32, tail positions
    word0,  # [BM] uint64, tail bits
    word1,  # [BM] uint64
    word2,  # [BM] uint64
    index_row,  # the request's index entries
    tail_row,  # its tail slots
    tail_pos_row,  # its tail positions, two int32 each
    word_row,  # [BM], its rows' words
    pos_q,  # [BM] int32, or None without a window
    row_ok,  # [BM] bool
    first_key,
    prefix_len,
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
    TAIL: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to tiles of ``[begin, end)`` under bounds, tail bits and window.

    What the next tile needs is loaded a tile ahead and travels raw: with arithmetic on it at the
    load, the loop would wait for every copy; loaded in its own tile, it would be copied through
    shared memory.
    """
    r = tl.arange(0, BN)  # [BN]
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        pos = start + r
        slots = raw_index
        raw_index = _load_index(index_row, pos + BN, first_key, prefix_len)
        pos_k = pos
        if TAIL > 0:
            in_prefix = pos < prefix_len
            # keys left of the window may lie in recycled slots: read a tail key in their place
            slots = tl.where(in_prefix & (pos >= first_key), slots, raw_tail)
            raw_tail = _load_tail(tail_row, pos + BN, prefix_len, TAIL, 1)
            first = start - prefix_len
            bits = row_bits(word0, word1, first, end - start)
            if BN > 64:
                more = row_bits(word1, word2, first + 64, end - start - 64)
                visible = spread(bits, more, r[None, :], BN)
            else:
                visible = spread(bits, None, r[None, :], BN)
            if start + BN < end:
                word0 = load_word(word_row, row_ok, first + BN, 0, WORDS)
                word1 = load_word(word_row, row_ok, first + BN, 1, WORDS)
                if BN > 64:
                    word2 = load_word(word_row, row_ok, first + BN, 2, WORDS)
            if WINDOW >= 0:
                pos_k = tl.where(in_prefix, pos, raw_pos)
                raw_pos = _load_tail(tail_pos_row, pos + BN, prefix_len, TAIL, 2)
        else:
            visible = (pos < end)[None, :]
        if WINDOW >= 0:
            # unsigned: a key after the query is too far, too
            distance = (pos_q[:, None] - pos_k[None, :]).to(tl.uint32, bitcast=True)
            visible = visible & (distance <= WINDOW)
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


@triton.jit
def load_request(entry):
    """Load a request's index start, prefix, first tile, partials, merge rank."""
    return (
        tl.load(entry),
        tl.load(entry + 1).to(tl.int32),
        tl.load(entry + 2).to(tl.int32),
        tl.load(entry + 3).to(tl.int32),
        tl.load(entry + 4).to(tl.int32),
    )


@triton.jit
def load_entry_rows(entry):
    """Load where an entry's packed rows begin and end.

    They count among those of all groups; both are 0 for a request.
    """
    end = tl.load(entry + 3) >> 32
    begin = tl.load(entry + 4) >> 32
    return begin.to(tl.int32), end.to(tl.int32)


# strides of small tensors, and where shared results begin: no variants for round ones
@triton.jit(
    do_not_specialize=[
        "stride_pos",
        "stride_tail",
        "stride_tail_pos",
        "stride_words",
        "stride_words_q",
        "own_rows",
    ]
)
def tree_attention_kernel(
    q,  # [B * Q_LEN, Hq, HEAD_DIM]
    k_cache,  # [slots, NUM_KV, HEAD_DIM]
    v_cache,  # [slots, NUM_KV, V_DIM]
    out,  # [B * Q_LEN, Hq, V_DIM], out
    lse,  # [B * Q_LEN, Hq] float32, out, or None
    indices,  # flat int32: slot of each prefix position
    positions,  # [B, Q_LEN] int64, read under a window
    tail_slots,  # [B, TAIL] int32
    tail_positions,  # [B, TAIL] int64, read under a window
    tail_words,  # [B, Q_LEN, WORDS] int64
    requests,  # [B, 8] int64
    splits,  # [SPLITS, 8] int64
    partial_out,  # [partials, NUM_KV, MT, BM, V_DIM], out
    partial_lse,  # [partials, NUM_KV, MT, BM] float32, out, base 2
    sinks,  # [Hq] natural logits, or None
    base2,
    cap_in,
    cap_out,
    v_scale,  # of float8 values, else None
    stride_q,
    stride_q_head,
    stride_out,
    stride_out_head,
    stride_lse,
    stride_lse_head,
    stride_pos,
    stride_tail,
    stride_tail_pos,
    stride_words,
    stride_words_q,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    Q_LEN: tl.constexpr,
    TAIL: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    CSR: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MT: tl.constexpr,
    STAGES: tl.constexpr,
    SHORT: tl.constexpr,
    PDL: tl.constexpr,
    DETERMINISTIC: tl.constexpr = False,
    # of deterministic trees and lists
    PARTIAL_TILES: tl.constexpr = 0,
    EXTRA: tl.constexpr = 0,
    TOKENS: tl.constexpr = 1,
    WIDTH: tl.constexpr = 0,
    paths=None,  # [B * Q_LEN, WIDTH] int32
    path_lens=None,  # [B * Q_LEN] int32
    # of shared prefixes
    members=None,  # [B] int32
    own_rows=None,
    # of prompts
    qo_indptr=None,  # [B + 1] int32
    seq_lens=None,  # [B] int32
    table_rows=None,  # [B] int64
    stride_table=None,
):
    """Walk a split's segments: one CTA per (split, M tile, KV head).

    Prompts have no plan and no tail: a CTA per (M tile, KV head, request) takes all keys of its
    rows, masked by position.

    With ``PARTIAL_TILES`` a segment ends where that many tiles of the request do, counted from
    position 0. Of what follows the last full tile of the prefix, every query token then reads its
    own path, of which a tile's ``TOKENS`` take turns. All of a row's sums are then functions of its
    own keys, in the order of their positions: a key that it does not see has weight 0 and leaves
    its running maximum alone, so it changes no bit.

    With ``members`` a segment may be an entry's: keys that a group of requests shares, in whole
    tiles, and a block of the group's packed rows, all of which see them. Its results are partial,
    and lie behind the ``own_rows`` of those of requests.
    """
    SHARED: tl.constexpr = members is not None
    ROWS: tl.constexpr = Q_LEN * GROUP
    # tail keys whose words are read
    MASKED_TAIL: tl.constexpr = 0 if PARTIAL_TILES else TAIL
    PROMPT: tl.constexpr = qo_indptr is not None
    # how far back a row sees, or -1: in prompts, positions keep it from seeing later keys, too
    REACH: tl.constexpr = 2147483647 if PROMPT and WINDOW < 0 else WINDOW
    # whether there are tiles without a mask, which keeps the compiler from fusing a cap's product
    # into what follows, as it can without
    FULL: tl.constexpr = (WINDOW < 0 or PROMPT) and not (DETERMINISTIC and HAS_CAP)
    # whether these and paths are all there is
    BARE: tl.constexpr = PARTIAL_TILES > 0 and FULL
    pid = tl.program_id(0)
    head = pid % NUM_KV
    m_tile = pid // NUM_KV % MT
    split = pid // (NUM_KV * MT)
    if PROMPT:
        # the last M tiles have most keys: they start first
        m_tile = tl.num_programs(0) - 1 - pid
        head = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    packed = m_tile * BM + tl.arange(0, BM)  # [BM]
    if not SHARED:
        token = packed // GROUP
        q_head = head * GROUP + packed % GROUP
    q_len = Q_LEN
    if PROMPT:
        req = tl.program_id(2)
        first_row = tl.load(qo_indptr + req)
        q_len = tl.load(qo_indptr + req + 1) - first_row
    if not SHARED:
        row_ok = packed < q_len * GROUP
    r = tl.arange(0, BN)  # [BN]
    k_head = k_cache + head.to(tl.int64) * K_HEAD
    v_head = v_cache + head.to(tl.int64) * V_HEAD
    if PROMPT:
        cached = tl.load(seq_lens + req)
        first_pos = cached + m_tile * BM // GROUP
        # up to the last row's own key
        prefix_len = cached + tl.minimum((m_tile * BM + BM - 1) // GROUP, q_len - 1) + 1
        base = tl.load(table_rows + req) * stride_table
        first_tile = tl.maximum(first_pos - REACH, 0) // BN
        left = (prefix_len + BN - 1) // BN - first_tile
        left = tl.where(m_tile * BM < q_len * GROUP, left, 0)
        tile = 0
        partials = 1
        merge_rank = 0
    else:
        entry = splits + split * 8
        left = tl.load(entry).to(tl.int32)
        tile = tl.load(entry + 1).to(tl.int32)
        req = tl.load(entry + 2).to(tl.int32)
        base, prefix_len, first_tile, partials, merge_rank = load_request(entry + 3)
        if SHARED:
            rows_begin, rows_end = load_entry_rows(entry + 3)
    while left > 0:
        kv_len = prefix_len + TAIL
        # whose the rows are, and whose tail follows
        owner = req
        tail_req = req
        if SHARED:
            entry_rows = rows_end > 0
            kv_len = tl.where(entry_rows, prefix_len, kv_len)
            nth_row = rows_begin + packed  # [BM]
            row_ok = nth_row < tl.where(entry_rows, rows_end, ROWS)
            owner = tl.load(members + nth_row // ROWS, mask=row_ok & entry_rows, other=0)  # [BM]
            owner = tl.where(entry_rows, owner, req)
            token = nth_row % ROWS // GROUP
            q_head = head * GROUP + nth_row % GROUP
            # of an entry nothing is read there, but the addresses must exist
            tail_req = tl.where(entry_rows, 0, req)
        tiles = tl.maximum((kv_len + BN - 1) // BN - first_tile, 1)
        stop = tl.minimum(tiles, tile + left)
        if PARTIAL_TILES:
            nth = (first_tile + tile) // PARTIAL_TILES
            stop = tl.minimum(tiles, (nth + 1) * PARTIAL_TILES - first_tile)
        begin = (first_tile + tile) * BN
        end = tl.minimum(kv_len, (first_tile + stop) * BN)
        index_row = indices + base
        # full tiles of the prefix need no mask at all; a window masks every tile of a tree
        full_begin = begin
        full_end = begin
        if PROMPT:
            if FULL:
                full_end = tl.maximum((first_pos + 1) // BN * BN, begin)
            if WINDOW >= 0:
                full_begin = (tl.maximum(prefix_len - 1 - WINDOW, 0) + BN - 1) // BN * BN
                full_begin = tl.minimum(full_begin, full_end)
        elif FULL:
            full_end = tl.maximum(tl.minimum(end, prefix_len) // BN * BN, begin)
            few = full_end - begin <= SHORT * BN
            if SHARED:
                few = few & ~entry_rows
            full_end = tl.where(few, begin, full_end)
        if PARTIAL_TILES:
            end = tl.maximum(tl.minimum(end, prefix_len) // BN * BN, begin)
            full_end = end if BARE else begin

        q_row = ((first_row if PROMPT else owner * Q_LEN) + token).to(tl.int64)  # [BM]
        q_rows = q + q_row * stride_q + q_head * stride_q_head
        q_tile = as_factor(load_query(q_rows, row_ok, HEAD_DIM, D_PAD), k_cache)
        tail_row = tail_slots
        tail_pos_row = tail_positions
        word_row = tail_words
        if MASKED_TAIL > 0:
            tail_row += tail_req.to(tl.int64) * stride_tail
            word_row += tail_req.to(tl.int64) * stride_words + token * stride_words_q  # [BM]
        pos_q = None
        first_key = 0
        if REACH >= 0:
            if PROMPT:
                pos_q = cached + tl.minimum(token, q_len - 1)
            elif CSR:
                pos_q = prefix_len - 1 + packed * 0
            else:
                # rows past the last repeat it
                pos_row = positions + req.to(tl.int64) * stride_pos
                pos_q = tl.load(pos_row + tl.minimum(token, Q_LEN - 1)).to(tl.int32)
            if MASKED_TAIL > 0:
                # the low halves are enough of a position
                tail_pos_row += req.to(tl.int64) * stride_tail_pos
                tail_pos_row = tail_pos_row.to(tl.pointer_type(tl.int32), bitcast=True)
        if WINDOW >= 0:
            first_key = tl.maximum(tl.min(pos_q, 0) - WINDOW, 0)

        # what both loops read first, before either starts: the latencies overlap
        raw_index = _load_index(index_row, full_end + r, first_key, prefix_len)
        raw_left = raw_index
        if PROMPT and WINDOW >= 0:
            raw_left = _load_index(index_row, begin + r, first_key, prefix_len)
        raw_tail = None
        raw_pos = None
        word0 = None
        word1 = None
        word2 = None
        if MASKED_TAIL > 0:
            raw_tail = _load_tail(tail_row, full_end + r, prefix_len, TAIL, 1)
            word0 = load_word(word_row, row_ok, full_end - prefix_len, 0, WORDS)
            word1 = load_word(word_row, row_ok, full_end - prefix_len, 1, WORDS)
            if BN > 64:
                word2 = load_word(word_row, row_ok, full_end - prefix_len, 2, WORDS)
            if WINDOW >= 0:
                raw_pos = _load_tail(tail_pos_row, full_end + r, prefix_len, TAIL, 2)
        top = tl.full([BM], FLOOR, tl.float32)
        total = tl.zeros([BM], tl.float32)
        if sinks is not None and not PARTIAL_TILES:
            first_keys = tile == 0
            if SHARED:
                # a request has tiles of its own, too
                first_keys = first_keys & ~entry_rows
            top, total = start_from_sinks(sinks + q_head, first_keys, base2, HAS_CAP)
        acc = tl.zeros([BM, V_PAD], tl.float32)
        # of prompts under a window, keys that not all rows see any more; full tiles; the rest
        for part in tl.static_range(0 if PROMPT and WINDOW >= 0 else 1, 3):
            if part == 1:
                if FULL:
                    raw_full = _load_index(index_row, full_begin + r, 0, prefix_len)
                    for start in tl.range(full_begin, full_end, BN, num_stages=STAGES):
                        slots = raw_full
                        raw_full = _load_index(index_row, start + BN + r, 0, prefix_len)
                        acc, top, total = attend_tile(
                            q_tile,
                            acc,
                            top,
                            total,
                            slots,
                            None,
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
            elif not BARE:
                acc, top, total = _masked_tiles(
                    q_tile,
                    acc,
                    top,
                    total,
                    begin if part == 0 else full_end,
                    full_begin if part == 0 else end,
                    raw_left if part == 0 else raw_index,
                    raw_tail,
                    raw_pos,
                    word0,
                    word1,
                    word2,
                    index_row,
                    tail_row,
                    tail_pos_row,
                    word_row,
                    pos_q,
                    row_ok,
                    first_key,
                    prefix_len,
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
                    MASKED_TAIL,
                    WORDS,
                    REACH,
                    BN,
                    STAGES,
                )
        if PARTIAL_TILES:
            # the tokens whose rows are in this M tile
            first_token = m_tile * BM // GROUP
            tokens = tl.minimum((m_tile * BM + BM - 1) // GROUP, Q_LEN - 1) - first_token + 1
            near = tl.arange(0, TOKENS)  # [TOKENS]
            query = req.to(tl.int64) * Q_LEN + first_token
            longest = tl.max(tl.load(path_lens + query + near, mask=near < tokens, other=0), 0)
            own = prefix_len // BN
            own_begin = tl.maximum(first_tile + tile, own)
            own_stop = tl.minimum(first_tile + stop, own + (longest + BN - 1) // BN)
            acc, top, total = own_tiles(
                q_tile,
                acc,
                top,
                total,
                paths + query * WIDTH + (own_begin - own) * BN,
                tl.maximum(own_stop - own_begin, 0),
                tokens,
                token - first_token,
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
                WIDTH,
                BN,
                STAGES,
            )
        log2_sum = (top if HAS_CAP else top * base2) + tl.log2(tl.where(total != 0.0, total, 1.0))
        whole = partials == 1
        if PARTIAL_TILES and sinks is not None:
            # the merge adds them, after all keys
            whole = False
        if PROMPT or whole:
            store_rows(
                out + q_row * stride_out + q_head * stride_out_head,
                acc,
                total,
                row_ok,
                V_DIM,
                V_PAD,
                v_scale,
            )
            if lse is not None:
                tl.store(
                    lse + q_row * stride_lse + q_head * stride_lse_head,
                    tl.where(total != 0.0, log2_sum * LN2, float("-inf")),
                    mask=row_ok,
                )
        else:
            if PARTIAL_TILES:
                # no rows of padding
                at = (merge_rank + nth - first_tile // PARTIAL_TILES) * NUM_KV + head
                at = at.to(tl.int64) * ROWS + packed  # [BM]
            elif SHARED:
                slot = ((split + merge_rank) * NUM_KV + head).to(tl.int64)
                at = tl.where(entry_rows, own_rows + slot * (MT * BM), slot * ROWS) + packed
            else:
                at = ((split + merge_rank) * NUM_KV + head) * MT + m_tile
                at = at.to(tl.int64) * BM + tl.arange(0, BM)  # [BM]
            store_rows(partial_out + at * V_DIM, acc, total, row_ok, V_DIM, V_PAD, v_scale)
            lse_ok = row_ok if PARTIAL_TILES or SHARED else None
            tl.store(partial_lse + at, tl.where(total != 0.0, log2_sum, EMPTY), mask=lse_ok)
        left -= stop - tile
        if PROMPT:
            # one turn. A pass of the compiler that takes this for a loop must find what follows
            # from these to differ in every turn, or it computes it ahead, and holds it
            first_row += left
            prefix_len += left
            left = 0
        if PARTIAL_TILES:
            ended = stop == tiles
            left -= tl.where(ended, EXTRA, 0)
        if not PROMPT and left > 0:
            if PARTIAL_TILES:
                req += ended.to(tl.int32)
                tile = tl.where(ended, 0, stop)
            else:
                req += 1
                tile = 0
            base, prefix_len, first_tile, partials, merge_rank = load_request(requests + req * 8)
            if SHARED:
                rows_begin, rows_end = load_entry_rows(requests + req * 8)
