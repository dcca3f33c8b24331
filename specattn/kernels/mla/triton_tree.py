"""Device code of latent tree attention: splits of rows against packed queries.

The splits, the clamped loads and the visibility bits are those of `attention.splits`; there is
one KV head, and a tile is key and value at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.attention.softmax import EMPTY, FLOOR, LN2, store_rows
from specattn.kernels.attention.splits import (
    _load_index,
    _load_tail,
    load_request,
    load_word,
    row_bits,
    spread,
)
from specattn.kernels.mla.triton_tile import attend_latent_tile, load_latent_query


@triton.jit
def _masked_tiles(
    query,  # of `load_latent_query`
    acc,
    top,
    total,
    begin,
    end,  # first key of the first tile; end of the keys
    ahead,  # of the first tile: [BN] int32 index entries and tail slots, [BM] uint64 bits, twice
    index_row,  # the request's index entries
    tail_row,  # its tail slots
    word_row,  # [BM], its rows' words
    row_ok,  # [BM] bool
    prefix_len,
    cache,
    base2,
    SLOT: tl.constexpr,
    WIDTHS: tl.constexpr,  # see `latent_widths`
    TAIL: tl.constexpr,
    WORDS: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to tiles of ``[begin, end)``, of at most 64 keys, masked.

    What the next tile needs is loaded as in `attention.splits._masked_tiles`.
    """
    raw_index, raw_tail, word0, word1 = ahead
    r = tl.arange(0, BN)  # [BN]
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        pos = start + r
        slots = raw_index
        raw_index = _load_index(index_row, pos + BN, 0, prefix_len)
        slots = tl.where(pos < prefix_len, slots, raw_tail)
        raw_tail = _load_tail(tail_row, pos + BN, prefix_len, TAIL, 1)
        first = start - prefix_len
        visible = spread(row_bits(word0, word1, first, end - start), None, r[None, :], BN)
        if start + BN < end:
            word0 = load_word(word_row, row_ok, first + BN, 0, WORDS)
            word1 = load_word(word_row, row_ok, first + BN, 1, WORDS)
        acc, top, total = attend_latent_tile(
            query, acc, top, total, slots, visible, cache, base2, SLOT, WIDTHS
        )
    return acc, top, total


# strides of small tensors: no variants of the kernel for round ones
@triton.jit(do_not_specialize=["stride_tail", "stride_words", "stride_words_q"])
def mla_attention_kernel(
    q,  # [B * Q_LEN, HEADS, RANK + ROPE]
    cache,  # [slots, RANK + ROPE]
    out,  # [B * Q_LEN, HEADS, RANK], out
    lse,  # [B * Q_LEN, HEADS] float32, out, or None
    indices,  # flat int32: slot of each prefix position
    tail_slots,  # [B, TAIL] int32
    tail_words,  # [B, Q_LEN, WORDS] int64
    requests,  # [B, 8] int64
    splits,  # [SPLITS, 8] int64
    partial_out,  # [partials, MT, BM, RANK], out
    partial_lse,  # [partials, MT, BM] float32, out, base 2
    base2,
    stride_q,
    stride_q_head,
    stride_out,
    stride_out_head,
    stride_lse,
    stride_lse_head,
    stride_tail,
    stride_words,
    stride_words_q,
    SLOT: tl.constexpr,
    Q_LEN: tl.constexpr,
    TAIL: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTHS: tl.constexpr,  # see `latent_widths`
    BM: tl.constexpr,
    BN: tl.constexpr,
    MT: tl.constexpr,
    STAGES: tl.constexpr,
    SHORT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per (split, M tile) walks the segments of its split."""
    RANK: tl.constexpr = WIDTHS[0]
    RANK_PAD: tl.constexpr = WIDTHS[2]
    pid = tl.program_id(0)
    m_tile = pid % MT
    split = pid // MT
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    packed = m_tile * BM + tl.arange(0, BM)  # [BM]
    token = packed // HEADS
    head = packed % HEADS
    row_ok = packed < Q_LEN * HEADS
    r = tl.arange(0, BN)  # [BN]
    entry = splits + split * 8
    left = tl.load(entry).to(tl.int32)
    tile = tl.load(entry + 1).to(tl.int32)
    req = tl.load(entry + 2).to(tl.int32)
    base, prefix_len, _, partials, merge_rank = load_request(entry + 3)
    while left > 0:
        kv_len = prefix_len + TAIL
        stop = tl.minimum(tl.maximum((kv_len + BN - 1) // BN, 1), tile + left)
        begin = tile * BN
        end = tl.minimum(kv_len, stop * BN)
        index_row = indices + base
        # full tiles of the prefix need no mask at all
        full_end = tl.maximum(tl.minimum(end, prefix_len) // BN * BN, begin)
        full_end = tl.where(full_end - begin <= SHORT * BN, begin, full_end)

        q_row = (req * Q_LEN + token).to(tl.int64)  # [BM]
        query = load_latent_query(q + q_row * stride_q + head * stride_q_head, row_ok, WIDTHS)
        tail_row = tail_slots + req.to(tl.int64) * stride_tail
        word_row = tail_words + req.to(tl.int64) * stride_words + token * stride_words_q  # [BM]
        # what both loops read first, before either starts: the latencies overlap
        ahead = (
            _load_index(index_row, full_end + r, 0, prefix_len),
            _load_tail(tail_row, full_end + r, prefix_len, TAIL, 1),
            load_word(word_row, row_ok, full_end - prefix_len, 0, WORDS),
            load_word(word_row, row_ok, full_end - prefix_len, 1, WORDS),
        )
        raw_full = _load_index(index_row, begin + r, 0, prefix_len)
        top = tl.full([BM], FLOOR, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, RANK_PAD], tl.float32)
        for start in tl.range(begin, full_end, BN, num_stages=STAGES):
            slots = raw_full
            raw_full = _load_index(index_row, start + BN + r, 0, prefix_len)
            acc, top, total = attend_latent_tile(
                query, acc, top, total, slots, None, cache, base2, SLOT, WIDTHS
            )
        acc, top, total = _masked_tiles(
            query,
            acc,
            top,
            total,
            full_end,
            end,
            ahead,
            index_row,
            tail_row,
            word_row,
            row_ok,
            prefix_len,
            cache,
            base2,
            SLOT,
            WIDTHS,
            TAIL,
            WORDS,
            BN,
            STAGES,
        )
        log2_sum = top * base2 + tl.log2(tl.where(total != 0.0, total, 1.0))
        if partials == 1:
            out_rows = out + q_row * stride_out + head * stride_out_head
            store_rows(out_rows, acc, total, row_ok, RANK, RANK_PAD)
            if lse is not None:
                tl.store(
                    lse + q_row * stride_lse + head * stride_lse_head,
                    tl.where(total != 0.0, log2_sum * LN2, float("-inf")),
                    mask=row_ok,
                )
        else:
            at = ((split + merge_rank) * MT + m_tile).to(tl.int64) * BM + tl.arange(0, BM)
            store_rows(partial_out + at * RANK, acc, total, row_ok, RANK, RANK_PAD)
            tl.store(partial_lse + at, tl.where(total != 0.0, log2_sum, EMPTY))
        left -= stop - tile
        if left > 0:
            req += 1
            tile = 0
            base, prefix_len, _, partials, merge_rank = load_request(requests + req * 8)
