"""Device code of attention for Hopper: that of `splits`, in Gluon.

A producer warpgroup and one or two consumers walk the split's segments; see `gluon_ring`.

It is a programmatic dependent launch: it may start while the kernel before it still runs, and
what that one wrote is there after ``gdc_wait``, which lasts until it is complete and its writes
are in memory. With ``PREFETCH`` the producer reads plan, index table, positions and tiles of the
prefix before it waits, which takes more than that rule. Let A be the attention that ran before on
the same plan, for an earlier layer, and R the kernel before A.

1. A lets its successor start (``gdc_launch_dependents``) in no CTA before that CTA has waited,
   with ``PREFETCH`` or without. So when anything after A starts, R is complete and its writes are
   in memory.
2. A grid in whose every CTA some thread waits is not complete before the grid before it is; one
   that is no programmatic launch does not even start before. All kernels here are one or the
   other, those too that let their successor start before they wait (products, norms, merges): that
   lets kernels start early, not finish. So with R, everything launched before R is complete: the
   plan, the step's tables and positions, the KV commit and the stores of the step before.
3. This kernel starts after A does: of the kernels between them, none starts before its
   predecessor. What it reads early was written by R or before R. Its loads pass by the L1 cache,
   as copies to shared memory do, and so find what is in memory and no older line.
4. What comes after A writes activations and, right before this kernel, keys and values of the
   tail. Tiles with tail keys, or with a key left of a window, for which a tail key stands in, are
   brought after the wait. No prefix slot is a tail slot of the same forward.
5. All else waits first, as without ``PREFETCH``: queries and words are read, results and partial
   results written by consumers that have waited, so that whatever read the latter is complete.

The first attention after a plan has no A: a kernel that lets its successor start before it waits,
as the one that stores keys does, may stand between the plan and itself.

By the same rule the kernel that rotates heads (`fused.qk_norm_rope_store_kv`) reads positions and
slots before it waits, in layers that follow another one's attention.
"""

# no postponed annotations: aggregates read the types of their fields
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.attention.gluon_ring import (
    Factors,
    Pools,
    Tile,
    attend,
    convert,
    drain,
    make_raw_ring,
    make_ring,
    produce,
    record,
    start,
)
from specattn.kernels.attention.softmax import EMPTY, LN2


@record
class TreeConstants:
    """Constants of a launch besides those of its tiles."""

    Q_LEN: gl.constexpr
    CSR: gl.constexpr
    GROUP: gl.constexpr
    NUM_KV: gl.constexpr
    MT: gl.constexpr
    Q_TOKEN: gl.constexpr
    Q_HEAD: gl.constexpr
    OUT_TOKEN: gl.constexpr
    OUT_HEAD: gl.constexpr
    HAS_LSE: gl.constexpr
    LSE_TOKEN: gl.constexpr
    LSE_HEAD: gl.constexpr
    SHARED: gl.constexpr


@record
class Rows:
    """Queries, and where their results go."""

    q: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    partial_out: gl.tensor
    partial_lse: gl.tensor
    sinks: object  # a pointer to [Hq] natural logits, or None


@record
class Work:
    """The CTA's place, the plan and the index tables."""

    split: gl.tensor
    head: gl.tensor
    m_tile: gl.tensor
    requests: gl.tensor
    splits: gl.tensor
    indices: gl.tensor
    positions: gl.tensor
    tail_slots: gl.tensor
    tail_positions: gl.tensor
    tail_words: gl.tensor
    stride_pos: gl.tensor
    stride_tail: gl.tensor
    stride_tail_pos: gl.tensor
    stride_words: gl.tensor
    stride_words_q: gl.tensor
    members: object  # of shared prefixes, as the next, else None
    own_rows: object
    # of prompts, whose CTAs have a block of rows of a request (in place of a split) each, else None
    qo_indptr: object
    seq_lens: object
    table_rows: object
    stride_table: object


@gluon.jit
def _block(work, c, t):
    """Return a prompt's first row, tokens and prefix, a block's end positions."""
    BM: gl.constexpr = t.GROUPS * 64
    first_row = gl.load(work.qo_indptr + work.split)
    tokens = gl.load(work.qo_indptr + work.split + 1) - first_row
    cached = gl.load(work.seq_lens + work.split)
    first_pos = cached + work.m_tile * BM // c.GROUP
    last_pos = cached + gl.minimum((work.m_tile * BM + BM - 1) // c.GROUP, tokens - 1)
    return first_row, tokens, cached, first_pos, last_pos


@gluon.jit
def _load_request(entry, t):
    """Load a request's index start, prefix, first tile, partials, merge rank."""
    base = gl.load(entry, cache_modifier=t.CACHE)
    prefix_len = gl.load(entry + 1, cache_modifier=t.CACHE).to(gl.int32)
    first_tile = gl.load(entry + 2, cache_modifier=t.CACHE).to(gl.int32)
    partials = gl.load(entry + 3, cache_modifier=t.CACHE).to(gl.int32)
    merge_rank = gl.load(entry + 4, cache_modifier=t.CACHE).to(gl.int32)
    return base, prefix_len, first_tile, partials, merge_rank


@gluon.jit
def _load_entry_rows(entry, c, t):
    """Load where an entry's rows begin and end; zeros for requests."""
    begin, end = 0, 0
    if c.SHARED:
        end = (gl.load(entry + 3, cache_modifier=t.CACHE) >> 32).to(gl.int32)
        begin = (gl.load(entry + 4, cache_modifier=t.CACHE) >> 32).to(gl.int32)
    return begin, end


@gluon.jit
def _find_rows(packed, work, c, first_row, tokens, req, rows_begin, rows_end):
    """Return packed rows' query rows and heads, and which are there.

    They are a request's, from ``first_row`` on, or an entry's, ``rows_end`` being above 0.
    """
    GROUP: gl.constexpr = c.GROUP
    ROWS: gl.constexpr = c.Q_LEN * GROUP
    if c.SHARED:
        of_entry = rows_end > 0
        packed = rows_begin + packed
        ok = packed < gl.where(of_entry, rows_end, ROWS)
        owner = gl.load(work.members + packed // ROWS, mask=ok & of_entry, other=0)
        owner = gl.where(of_entry, owner, req)
        row = owner * c.Q_LEN + packed % ROWS // GROUP
    else:
        ok = packed < tokens * GROUP
        row = first_row + packed // GROUP
    return row, work.head * GROUP + packed % GROUP, ok


@gluon.jit
def _first_segment(work, c, t):
    """Load a split's tiles and first segment: tile, request, its numbers."""
    if t.CAUSAL:
        # all keys of the rows, which have no tail
        _first_row, tokens, _cached, first_pos, last_pos = _block(work, c, t)
        base = gl.load(work.table_rows + work.split) * work.stride_table
        prefix_len = last_pos + 1
        first_tile = 0
        if t.WINDOW >= 0:
            first_tile = gl.maximum(first_pos - t.WINDOW, 0) // t.BN
        has_rows = work.m_tile * t.GROUPS * 64 < tokens * c.GROUP
        left = gl.where(has_rows, last_pos // t.BN + 1 - first_tile, 0)
        tile, req, partials, merge_rank = 0, work.split, 1, 0
    else:
        entry = work.splits + work.split * 8
        left = gl.load(entry, cache_modifier=t.CACHE).to(gl.int32)
        tile = gl.load(entry + 1, cache_modifier=t.CACHE).to(gl.int32)
        req = gl.load(entry + 2, cache_modifier=t.CACHE).to(gl.int32)
        base, prefix_len, first_tile, partials, merge_rank = _load_request(entry + 3, t)
    return left, tile, req, base, prefix_len, first_tile, partials, merge_rank


@gluon.jit
def _bounds(tile, left, prefix_len, first_tile, rows_end, c, t):
    """Return a segment's first key, end of keys, and its 1+ tiles."""
    kv_len = prefix_len + t.TAIL
    if c.SHARED:
        # entries have no tail
        kv_len = gl.where(rows_end > 0, prefix_len, kv_len)
    tiles = gl.maximum((kv_len + t.BN - 1) // t.BN - first_tile, 1)
    stop = gl.minimum(tiles, tile + left)
    begin = (first_tile + tile) * t.BN
    end = gl.minimum(kv_len, (first_tile + stop) * t.BN)
    return begin, end, stop - tile


@gluon.jit
def _query_positions(work, req, prefix_len, c, t):
    """Lowest and highest position among a request's query tokens, or a block's."""
    low = prefix_len - 1
    high = low
    if t.CAUSAL:
        _first_row, _tokens, _cached, low, high = _block(work, c, t)
    elif not c.CSR:
        row = work.positions + req.to(gl.int64) * work.stride_pos
        low = gl.load(row, cache_modifier=t.CACHE).to(gl.int32)
        high = low
        for i in range(1, c.Q_LEN):
            position = gl.load(row + i, cache_modifier=t.CACHE).to(gl.int32)
            low = gl.minimum(low, position)
            high = gl.maximum(high, position)
    return low, high


@gluon.jit
def _produce(ring, work, t, c, pools):
    """Bring the tiles of the split's segments into the ring."""
    left, tile, req, base, prefix_len, first_tile, _, _ = _first_segment(work, c, t)
    _, rows_end = _load_entry_rows(work.splits + work.split * 8 + 3, c, t)
    stage = 0
    phase = 1
    while left > 0:
        begin, _, count = _bounds(tile, left, prefix_len, first_tile, rows_end, c, t)
        # of an entry nothing is read there, but the addresses must exist
        tail_req = req
        if c.SHARED:
            tail_req = gl.where(rows_end > 0, 0, req)
        # the next request's numbers arrive while this one's tiles are brought
        next_base, next_prefix, next_first = base, prefix_len, first_tile
        if not t.CAUSAL and left > count:
            next_base, next_prefix, next_first, _, _ = _load_request(
                work.requests + (req + 1) * 8, t
            )
            _, rows_end = _load_entry_rows(work.requests + (req + 1) * 8, c, t)
        first_key = 0
        if t.WINDOW >= 0:
            low, _ = _query_positions(work, req, prefix_len, c, t)
            first_key = gl.maximum(low - t.WINDOW, 0)
        stage, phase = produce(
            ring,
            t,
            pools,
            work.head,
            work.indices + base,
            work.tail_slots + tail_req.to(gl.int64) * work.stride_tail,
            begin,
            count,
            first_key,
            prefix_len,
            stage,
            phase,
        )
        left -= count
        if t.CAUSAL:
            # as in `_consume`
            next_base += left
            next_prefix += left
            next_first += left
            left = 0
        tile = 0
        req += 1
        base, prefix_len, first_tile = next_base, next_prefix, next_first
    async_copy.wait_group(0)


@gluon.jit
def _convert(raw, ring, work, raw_t, t, c, WARPS: gl.constexpr, VALUES: gl.constexpr):
    """Convert all tiles of the split, whosever they are."""
    if t.CAUSAL:
        count, _, _, _, _, _, _, _ = _first_segment(work, c, t)
    else:
        count = gl.load(work.splits + work.split * 8).to(gl.int32)
    convert(raw, ring, raw_t, t, count, WARPS, VALUES)


@gluon.jit
def _load_next(entry, c, t):
    """Return what rows need of the next request or entry."""
    _base, prefix_len, first_tile, partials, merge_rank = _load_request(entry, t)
    rows_begin, rows_end = _load_entry_rows(entry, c, t)
    return prefix_len, first_tile, partials, merge_rank, rows_begin, rows_end


@gluon.jit
def _consume(ring, work, t, c, rows, factors, WG: gl.constexpr):
    """Attend with 64 packed rows to the ring's tiles."""
    HEAD_DIM: gl.constexpr = t.HEAD_DIM
    GROUP: gl.constexpr = c.GROUP
    dtype: gl.constexpr = rows.out.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, t.BN, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row0 = (work.m_tile * t.GROUPS + WG) * 64
    q_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, loads))  # [64], packed rows
    s_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    o_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, values))
    q_col = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, loads))
    o_col = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, values))
    tokens = c.Q_LEN
    if t.CAUSAL:
        prompt_row, tokens, cached, first_pos, _last_pos = _block(work, c, t)
    token = s_row // GROUP
    q_tile = ring.q.index(WG)
    left, tile, req, _base, prefix_len, first_tile, partials, merge_rank = _first_segment(
        work, c, t
    )
    rows_begin, rows_end = _load_entry_rows(work.splits + work.split * 8 + 3, c, t)
    if t.PREFETCH:
        # in every CTA: whatever starts after this kernel finds all before it complete
        gdc_wait()
        gdc_launch_dependents()
    stage = 0
    phase = 0
    while left > 0:
        begin, end, count = _bounds(tile, left, prefix_len, first_tile, rows_end, c, t)
        next_prefix, next_first, next_partials, next_rank = (
            prefix_len,
            first_tile,
            partials,
            merge_rank,
        )
        next_begin, next_end = rows_begin, rows_end
        there = True
        if c.SHARED:
            # tiles are as large as groups need: of a request, half of one may be empty
            there = rows_begin + row0 < gl.where(rows_end > 0, rows_end, c.Q_LEN * GROUP)
        if there:
            first_row = prompt_row if t.CAUSAL else req * c.Q_LEN
            row, head, ok = _find_rows(q_row, work, c, first_row, tokens, req, rows_begin, rows_end)
            q_at = row.to(gl.int64) * c.Q_TOKEN + head * c.Q_HEAD
            queries = gl.load(rows.q + q_at[:, None] + q_col[None, :], mask=ok[:, None], other=0.0)
            q_tile.store(queries.to(q_tile.dtype))
            fence_async_shared()
            s_at, s_head, s_ok = _find_rows(
                s_row, work, c, first_row, tokens, req, rows_begin, rows_end
            )
            tail_req = req
            first_keys = tile == 0
            if c.SHARED:
                # as in `_produce`; and a request has tiles of its own, too
                tail_req = gl.where(rows_end > 0, 0, req)
                first_keys = first_keys & (rows_end == 0)
            word_row = work.tail_words + tail_req.to(gl.int64) * work.stride_words
            word_row += token * work.stride_words_q  # [64]
            tail_pos_row = work.tail_positions + req.to(gl.int64) * work.stride_tail_pos
            # the low halves are enough of a position
            tail_pos_row = tail_pos_row.to(gl.pointer_type(gl.int32), bitcast=True)
            clear_from = 0
            clear_to = prefix_len
            pos_q = token
            if t.WINDOW >= 0:
                _low, high = _query_positions(work, req, prefix_len, c, t)
                clear_from = high - t.WINDOW
                if c.CSR:
                    pos_q = prefix_len - 1 + token * 0
                elif not t.CAUSAL:
                    pos_row = work.positions + req.to(gl.int64) * work.stride_pos
                    pos_q = gl.load(pos_row + gl.minimum(token, c.Q_LEN - 1)).to(gl.int32)
            if t.CAUSAL:
                clear_to = first_pos + 1
                pos_q = cached + gl.minimum(token, tokens - 1)
            top, total = start(rows.sinks, s_head, first_keys, factors, t)
            acc, total, log2_sum, stage, phase = attend(
                ring,
                t,
                q_tile,
                begin,
                end,
                count,
                clear_from,
                clear_to,
                prefix_len,
                word_row,
                s_ok,
                tail_pos_row,
                pos_q,
                factors,
                top,
                total,
                stage,
                phase,
            )
            # only now: registers are short while tiles are attended to
            if not t.CAUSAL and left > count:
                next_prefix, next_first, next_partials, next_rank, next_begin, next_end = (
                    _load_next(work.requests + (req + 1) * 8, c, t)
                )
            # a sink is in the sum of a request without keys, whose one tile may hold anything
            if rows.sinks is not None:  # noqa: SIM102  # known when the kernel is compiled; the next is not
                if end <= begin:
                    acc = gl.zeros([64, HEAD_DIM], gl.float32, values)
            row, head, ok = _find_rows(o_row, work, c, first_row, tokens, req, rows_begin, rows_end)
            if t.CAUSAL or partials == 1:
                at = row.to(gl.int64) * c.OUT_TOKEN + head * c.OUT_HEAD
                gl.store(rows.out + at[:, None] + o_col[None, :], acc.to(dtype), mask=ok[:, None])
                if c.HAS_LSE:
                    at = s_at.to(gl.int64) * c.LSE_TOKEN + s_head * c.LSE_HEAD
                    gl.store(
                        rows.lse + at,
                        gl.where(total != 0.0, log2_sum * LN2, float("-inf")),
                        mask=s_ok,
                    )
            else:
                block = ((work.split + merge_rank) * c.NUM_KV + work.head).to(gl.int64)
                if c.SHARED:
                    in_entry = work.own_rows + block * (c.MT * t.GROUPS * 64)
                    block = gl.where(rows_end > 0, in_entry, block * (c.Q_LEN * GROUP))
                else:
                    block = block * (c.MT * t.GROUPS * 64)
                gl.store(
                    rows.partial_out + (block + o_row)[:, None] * HEAD_DIM + o_col[None, :],
                    acc.to(dtype),
                    mask=ok[:, None],
                )
                # without sharing there is room for rows of padding
                gl.store(
                    rows.partial_lse + block + s_row,
                    gl.where(total != 0.0, log2_sum, EMPTY),
                    mask=s_ok if c.SHARED else None,
                )
        else:
            stage, phase = drain(ring, t, count, stage, phase)
            if not t.CAUSAL and left > count:
                next_prefix, next_first, next_partials, next_rank, next_begin, next_end = (
                    _load_next(work.requests + (req + 1) * 8, c, t)
                )
        left -= count
        if t.CAUSAL:
            # one turn. A pass of the compiler that takes this for a loop must find what follows
            # from these to differ in every turn, or it computes it ahead, and holds it
            prompt_row += left
            tokens += left
            cached += left
            first_pos += left
            next_prefix += left
            left = 0
        tile = 0
        req += 1
        prefix_len, first_tile, partials, merge_rank = (
            next_prefix,
            next_first,
            next_partials,
            next_rank,
        )
        rows_begin, rows_end = next_begin, next_end


# strides of small tensors, and where shared results begin: no variants for round ones
@gluon.jit(
    do_not_specialize=[
        "stride_pos",
        "stride_tail",
        "stride_tail_pos",
        "stride_words",
        "stride_words_q",
        "own_rows",
        "stride_table",
        "batch",
    ]
)
def gluon_tree_kernel(
    q,  # [B * Q_LEN, Hq, HEAD_DIM]
    k_cache,  # [slots, NUM_KV, HEAD_DIM]
    v_cache,  # [slots, NUM_KV, HEAD_DIM]
    out,  # [B * Q_LEN, Hq, HEAD_DIM]
    lse,  # [B * Q_LEN, Hq] float32, or anything without HAS_LSE
    indices,  # int32: req_to_token rows, or with CSR kv_indices
    positions,  # [B, Q_LEN] int64, with WINDOW
    tail_slots,  # [B, TAIL] int32
    tail_positions,  # [B, TAIL] int64, with WINDOW
    tail_words,  # [B, Q_LEN, WORDS] int64
    requests,  # [B, 8] int64
    splits,  # [SPLITS, 8] int64
    partial_out,  # [slots, NUM_KV, MT, GROUPS * 64, HEAD_DIM]
    partial_lse,  # [slots, NUM_KV, MT, GROUPS * 64] float32, base 2
    sinks,  # [Hq] natural logits, or None
    k_pages,  # descriptors of [slots, NUM_KV * HEAD_DIM] with PAGE > 1, or anything
    v_pages,
    base2,
    cap_in,
    cap_out,
    v_scale,
    stride_pos,
    stride_tail,
    stride_tail_pos,
    stride_words,
    stride_words_q,
    Q_TOKEN: gl.constexpr,
    Q_HEAD: gl.constexpr,
    OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr,
    LSE_TOKEN: gl.constexpr,
    LSE_HEAD: gl.constexpr,
    K_SLOT: gl.constexpr,
    K_HEAD: gl.constexpr,
    V_SLOT: gl.constexpr,
    V_HEAD: gl.constexpr,
    Q_LEN: gl.constexpr,
    TAIL: gl.constexpr,
    WORDS: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    CSR: gl.constexpr,
    HAS_LSE: gl.constexpr,
    GROUP: gl.constexpr,
    NUM_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    GROUPS: gl.constexpr,
    BN: gl.constexpr,
    MT: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    PRODUCERS: gl.constexpr,
    RAW: gl.constexpr,
    CONVERTERS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    CONVERTER_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PREFETCH: gl.constexpr,
    # of shared prefixes
    members=None,  # [B] int32
    own_rows=None,
    # of prompts
    qo_indptr=None,  # [B + 1] int32
    seq_lens=None,  # [B] int32
    table_rows=None,  # [B] int64
    stride_table=None,
    batch=None,
):
    """Walk a split's segments: one CTA per (split, KV head, M tile).

    Prompts have neither plan nor tail: one CTA per (block of rows, request, KV head).
    """
    CAUSAL: gl.constexpr = qo_indptr is not None
    FLOAT8: gl.constexpr = RAW > 0
    # over float8 keys, what the producer fills is another ring
    CACHE: gl.constexpr = ".cg" if PREFETCH else ""
    t = Tile(
        TAIL,
        WORDS,
        WINDOW,
        CAUSAL,
        HAS_CAP,
        HEAD_DIM,
        GROUPS,
        BN,
        STAGES,
        PAGE,
        PRODUCERS,
        PREFETCH,
        CACHE,
    )
    c = TreeConstants(
        Q_LEN,
        CSR,
        GROUP,
        NUM_KV,
        MT,
        Q_TOKEN,
        Q_HEAD,
        OUT_TOKEN,
        OUT_HEAD,
        HAS_LSE,
        LSE_TOKEN,
        LSE_HEAD,
        members is not None,
    )
    rows = Rows(q, out, lse, partial_out, partial_lse, sinks)
    pools = Pools(k_cache, v_cache, k_pages, v_pages, K_SLOT, K_HEAD, V_SLOT, V_HEAD)
    factors = Factors(base2, cap_in, cap_out, v_scale, FLOAT8)
    if FLOAT8:
        raw_t = Tile(
            TAIL,
            WORDS,
            WINDOW,
            CAUSAL,
            HAS_CAP,
            HEAD_DIM,
            GROUPS,
            BN,
            RAW,
            1,
            PRODUCERS,
            PREFETCH,
            CACHE,
        )
        ring = make_ring(gl.float16, t, 1)
        raw = make_raw_ring(k_cache.dtype.element_ty, raw_t)
    else:
        ring = make_ring(k_cache.dtype.element_ty, t, PRODUCERS * 32 if PAGE == 1 else 1)
    pid = gl.program_id(0)
    split = pid // (MT * NUM_KV)
    head = pid // MT % NUM_KV
    m_tile = pid % MT
    if CAUSAL:
        head = pid % NUM_KV
        split = pid // NUM_KV % batch
        # the last blocks have most keys: they start first
        m_tile = (gl.num_programs(0) - 1 - pid) // (NUM_KV * batch)
    work = Work(
        split,
        head,
        m_tile,
        requests,
        splits,
        indices,
        positions,
        tail_slots,
        tail_positions,
        tail_words,
        stride_pos,
        stride_tail,
        stride_tail_pos,
        stride_words,
        stride_words_q,
        members,
        own_rows,
        qo_indptr,
        seq_lens,
        table_rows,
        stride_table,
    )
    if not PREFETCH:
        gdc_wait()
        gdc_launch_dependents()
    if FLOAT8:
        if GROUPS == 1:
            gl.warp_specialize(
                [
                    (_consume, (ring, work, t, c, rows, factors, 0)),
                    (_convert, (raw, ring, work, raw_t, t, c, CONVERTERS, False)),
                    (_convert, (raw, ring, work, raw_t, t, c, CONVERTERS, True)),
                    (_produce, (raw, work, raw_t, c, pools)),
                ],
                [CONVERTERS, CONVERTERS, PRODUCERS],
                [CONVERTER_REGS, CONVERTER_REGS, PRODUCER_REGS],
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (ring, work, t, c, rows, factors, 0)),
                    (_consume, (ring, work, t, c, rows, factors, 1)),
                    (_convert, (raw, ring, work, raw_t, t, c, CONVERTERS, False)),
                    (_convert, (raw, ring, work, raw_t, t, c, CONVERTERS, True)),
                    (_produce, (raw, work, raw_t, c, pools)),
                ],
                [4, CONVERTERS, CONVERTERS, PRODUCERS],
                [CONSUMER_REGS, CONVERTER_REGS, CONVERTER_REGS, PRODUCER_REGS],
            )
    elif GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (ring, work, t, c, rows, factors, 0)),
                (_produce, (ring, work, t, c, pools)),
            ],
            [PRODUCERS],
            [PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, work, t, c, rows, factors, 0)),
                (_consume, (ring, work, t, c, rows, factors, 1)),
                (_produce, (ring, work, t, c, pools)),
            ],
            [4, PRODUCERS],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
