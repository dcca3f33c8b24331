"""Device code of tree attention for Hopper, in Gluon: the contract of `tree_kernel`.

Warp specialisation as in FlashAttention-3 (Shah et al., 2024): one warpgroup brings tiles of keys
and values into a ring of shared-memory stages, one or two others multiply. The producer gathers
rows by ``cp.async``, or whole pages by TMA; scores of a tile are issued before the values of the
one before it, so that the softmax runs under a product.
"""

# no postponed annotations: aggregates read the types of their fields
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.attention_tile import EMPTY, FLOOR, LN2, MASKED
from specattn.kernels.tree_kernel import load_request, load_word, row_bits, spread


@aggregate
class Shape:
    """Constants of a launch."""

    Q_LEN: gl.constexpr
    TAIL: gl.constexpr
    WORDS: gl.constexpr
    WINDOW: gl.constexpr
    HAS_CAP: gl.constexpr
    CSR: gl.constexpr
    HAS_LSE: gl.constexpr
    GROUP: gl.constexpr
    NUM_KV: gl.constexpr
    HEAD_DIM: gl.constexpr
    GROUPS: gl.constexpr
    BN: gl.constexpr
    MT: gl.constexpr
    STAGES: gl.constexpr
    PAGE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, Q_LEN, TAIL, WORDS, WINDOW, HAS_CAP, CSR, HAS_LSE, GROUP, NUM_KV, HEAD_DIM, GROUPS,
        BN, MT, STAGES, PAGE,
    ):
        self.Q_LEN = gl.constexpr(Q_LEN)
        self.TAIL = gl.constexpr(TAIL)
        self.WORDS = gl.constexpr(WORDS)
        self.WINDOW = gl.constexpr(WINDOW)
        self.HAS_CAP = gl.constexpr(HAS_CAP)
        self.CSR = gl.constexpr(CSR)
        self.HAS_LSE = gl.constexpr(HAS_LSE)
        self.GROUP = gl.constexpr(GROUP)
        self.NUM_KV = gl.constexpr(NUM_KV)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.GROUPS = gl.constexpr(GROUPS)
        self.BN = gl.constexpr(BN)
        self.MT = gl.constexpr(MT)
        self.STAGES = gl.constexpr(STAGES)
        self.PAGE = gl.constexpr(PAGE)


@aggregate
class Ring:
    """Stages of shared memory, and the barriers that hand them over."""

    q: gl.shared_memory_descriptor        # [GROUPS, 64, HEAD_DIM]
    k: gl.shared_memory_descriptor        # [STAGES, BN, HEAD_DIM]
    v: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor   # [STAGES, 1]
    v_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, k_full, v_full, k_free, v_free):
        self.q = q
        self.k = k
        self.v = v
        self.k_full = k_full
        self.v_full = v_full
        self.k_free = k_free
        self.v_free = v_free


@aggregate
class Work:
    """The CTA's place, the plan and the index tables."""

    chunk: gl.tensor
    head: gl.tensor
    m_tile: gl.tensor
    requests: gl.tensor
    chunks: gl.tensor
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

    @gluon.constexpr_function
    def __init__(
        self, chunk, head, m_tile, requests, chunks, indices, positions, tail_slots,
        tail_positions, tail_words, stride_pos, stride_tail, stride_tail_pos, stride_words,
        stride_words_q,
    ):
        self.chunk = chunk
        self.head = head
        self.m_tile = m_tile
        self.requests = requests
        self.chunks = chunks
        self.indices = indices
        self.positions = positions
        self.tail_slots = tail_slots
        self.tail_positions = tail_positions
        self.tail_words = tail_words
        self.stride_pos = stride_pos
        self.stride_tail = stride_tail
        self.stride_tail_pos = stride_tail_pos
        self.stride_words = stride_words
        self.stride_words_q = stride_words_q


@gluon.jit
def _first_segment(work):
    """Tiles of the chunk; its first segment: tile, request and the request's numbers."""
    entry = work.chunks + work.chunk * 8
    left = gl.load(entry).to(gl.int32)
    tile = gl.load(entry + 1).to(gl.int32)
    req = gl.load(entry + 2).to(gl.int32)
    base, prefix_len, first_tile, parts, split_rank = load_request(entry + 3)
    return left, tile, req, base, prefix_len, first_tile, parts, split_rank


@gluon.jit
def _bounds(tile, left, prefix_len, first_tile, shape):
    """First key, end of the keys and tiles of a segment; at least one tile has to be visited."""
    kv_len = prefix_len + shape.TAIL
    tiles = gl.maximum((kv_len + shape.BN - 1) // shape.BN - first_tile, 1)
    stop = gl.minimum(tiles, tile + left)
    begin = (first_tile + tile) * shape.BN
    end = gl.minimum(kv_len, (first_tile + stop) * shape.BN)
    return begin, end, stop - tile


@gluon.jit
def _query_positions(work, req, prefix_len, shape):
    """Lowest and highest position among a request's query tokens."""
    low = prefix_len - 1
    high = low
    if not shape.CSR:
        row = work.positions + req.to(gl.int64) * work.stride_pos
        low = gl.load(row).to(gl.int32)
        high = low
        for i in range(1, shape.Q_LEN):
            position = gl.load(row + i).to(gl.int32)
            low = gl.minimum(low, position)
            high = gl.maximum(high, position)
    return low, high


@gluon.jit
def _advance(stage, phase, shape):
    stage += 1
    last = stage == shape.STAGES
    return gl.where(last, 0, stage), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load_slots(index_row, tail_row, start, r, first_key, prefix_len, shape):
    """Slots of the tile at ``start``, read raw and a tile ahead of their use."""
    pos = start + r                                                       # [BN]
    if (start >= first_key) & (start + shape.BN <= prefix_len):
        slots = gl.load(index_row + pos)
    else:
        last = gl.maximum(prefix_len - 1, 0)
        if shape.TAIL > 0:
            # keys left of the window may lie in recycled slots: a tail key stands in for them
            inside = (pos < prefix_len) & (pos >= first_key)
            tail = gl.minimum(gl.maximum(pos - prefix_len, 0), shape.TAIL - 1)
            slots = gl.load(gl.where(inside, index_row + gl.minimum(pos, last), tail_row + tail))
        else:
            pos = gl.minimum(gl.maximum(pos, gl.minimum(first_key, last)), last)
            slots = gl.load(index_row + pos, mask=pos < prefix_len, other=0)
    return slots


@gluon.jit
def _fill_by_rows(k_tile, v_tile, k_full, v_full, k_free, v_free, phase, k_rows, v_rows):
    mbarrier.wait(k_free, phase)
    async_copy.async_copy_global_to_shared(k_tile, k_rows)
    async_copy.mbarrier_arrive(k_full, increment_count=False)
    mbarrier.wait(v_free, phase)
    async_copy.async_copy_global_to_shared(v_tile, v_rows)
    async_copy.mbarrier_arrive(v_full, increment_count=False)


@gluon.jit
def _produce(
    ring, work, shape, k_cache, v_cache,
    K_SLOT: gl.constexpr, K_HEAD: gl.constexpr, V_SLOT: gl.constexpr, V_HEAD: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Bring the tiles of the chunk's segments into the ring, row by row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    r = gl.arange(0, shape.BN, layout=gl.SliceLayout(1, layout))          # [BN]
    d = gl.arange(0, shape.HEAD_DIM, layout=gl.SliceLayout(0, layout))    # [HEAD_DIM]
    k_head = k_cache + work.head.to(gl.int64) * K_HEAD + d[None, :]       # [1, HEAD_DIM]
    v_head = v_cache + work.head.to(gl.int64) * V_HEAD + d[None, :]
    left, tile, req, base, prefix_len, first_tile, _, _ = _first_segment(work)
    stage = 0
    phase = 1
    while left > 0:
        begin, _, count = _bounds(tile, left, prefix_len, first_tile, shape)
        index_row = work.indices + base
        tail_row = work.tail_slots + req.to(gl.int64) * work.stride_tail
        first_key = 0
        if shape.WINDOW >= 0:
            low, _ = _query_positions(work, req, prefix_len, shape)
            first_key = gl.maximum(low - shape.WINDOW, 0)
        ahead = _load_slots(index_row, tail_row, begin, r, first_key, prefix_len, shape)
        for start in range(begin, begin + count * shape.BN, shape.BN):
            rows = ahead.to(gl.int64)[:, None]                            # [BN, 1]
            ahead = _load_slots(
                index_row, tail_row, start + shape.BN, r, first_key, prefix_len, shape
            )
            _fill_by_rows(
                ring.k.index(stage), ring.v.index(stage), ring.k_full.index(stage),
                ring.v_full.index(stage), ring.k_free.index(stage), ring.v_free.index(stage),
                phase, k_head + rows * K_SLOT, v_head + rows * V_SLOT,
            )
            stage, phase = _advance(stage, phase, shape)
        left -= count
        tile = 0
        if left > 0:
            req += 1
            base, prefix_len, first_tile, _, _ = load_request(work.requests + req * 8)
    async_copy.wait_group(0)


@gluon.jit
def _fill_by_pages(desc, tile, full, free, phase, slots, column, shape):
    """One TMA box per page, or per tile where pages are larger."""
    BOX: gl.constexpr = shape.PAGE if shape.PAGE < shape.BN else shape.BN
    mbarrier.wait(free, phase)
    mbarrier.expect(full, shape.BN * shape.HEAD_DIM * 2)
    for z in gl.static_range(shape.BN // BOX):
        if BOX == shape.BN:
            tma.async_copy_global_to_shared(desc, [slots[z], column], full, tile)
        else:
            tma.async_copy_global_to_shared(
                desc, [slots[z], column], full, tile.slice(z * BOX, BOX)
            )


@gluon.jit
def _produce_pages(
    ring, work, shape, k_cache, v_cache, k_pages, v_pages,
    K_SLOT: gl.constexpr, K_HEAD: gl.constexpr, V_SLOT: gl.constexpr, V_HEAD: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Bring whole pages by TMA, and by rows the tiles that hold tail keys or a window's edge.

    A page may hold anything past its request's keys, so only tiles full of keys come this way.
    """
    BN: gl.constexpr = shape.BN
    BOX: gl.constexpr = shape.PAGE if shape.PAGE < BN else BN
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    r = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))                # [BN]
    d = gl.arange(0, shape.HEAD_DIM, layout=gl.SliceLayout(0, layout))    # [HEAD_DIM]
    k_head = k_cache + work.head.to(gl.int64) * K_HEAD + d[None, :]       # [1, HEAD_DIM]
    v_head = v_cache + work.head.to(gl.int64) * V_HEAD + d[None, :]
    column = work.head * shape.HEAD_DIM
    left, tile, req, base, prefix_len, first_tile, _, _ = _first_segment(work)
    stage = 0
    phase = 1
    while left > 0:
        begin, _, count = _bounds(tile, left, prefix_len, first_tile, shape)
        index_row = work.indices + base
        tail_row = work.tail_slots + req.to(gl.int64) * work.stride_tail
        first_key = 0
        if shape.WINDOW >= 0:
            low, _ = _query_positions(work, req, prefix_len, shape)
            first_key = gl.maximum(low - shape.WINDOW, 0)
        for start in range(begin, begin + count * BN, BN):
            k_tile = ring.k.index(stage)
            v_tile = ring.v.index(stage)
            k_full = ring.k_full.index(stage)
            v_full = ring.v_full.index(stage)
            if (start >= first_key) & (start + BN <= prefix_len):
                slots = ()
                for z in gl.static_range(BN // BOX):
                    # Gluon knows tuple addition, not unpacking
                    slots = slots + (gl.load(index_row + start + z * BOX),)  # type: ignore[assignment]  # noqa: RUF005
                _fill_by_pages(
                    k_pages, k_tile, k_full, ring.k_free.index(stage), phase, slots, column, shape
                )
                _fill_by_pages(
                    v_pages, v_tile, v_full, ring.v_free.index(stage), phase, slots, column, shape
                )
            else:
                rows = _load_slots(index_row, tail_row, start, r, first_key, prefix_len, shape)
                rows = rows.to(gl.int64)[:, None]                         # [BN, 1]
                mbarrier.wait(ring.k_free.index(stage), phase)
                async_copy.async_copy_global_to_shared(k_tile, k_head + rows * K_SLOT)
                async_copy.commit_group()
                mbarrier.wait(ring.v_free.index(stage), phase)
                async_copy.async_copy_global_to_shared(v_tile, v_head + rows * V_SLOT)
                async_copy.commit_group()
                # the barriers count one arrival, TMA's or this one
                async_copy.wait_group(1)
                fence_async_shared()
                mbarrier.arrive(k_full, count=1)
                async_copy.wait_group(0)
                fence_async_shared()
                mbarrier.arrive(v_full, count=1)
            stage, phase = _advance(stage, phase, shape)
        left -= count
        tile = 0
        if left > 0:
            req += 1
            base, prefix_len, first_tile, _, _ = load_request(work.requests + req * 8)


@gluon.jit
def _produce_any(
    ring, work, shape, k_cache, v_cache, k_pages, v_pages,
    K_SLOT: gl.constexpr, K_HEAD: gl.constexpr, V_SLOT: gl.constexpr, V_HEAD: gl.constexpr,
    WARPS: gl.constexpr,
):
    if shape.PAGE == 1:
        _produce(
            ring, work, shape, k_cache, v_cache, K_SLOT, K_HEAD, V_SLOT, V_HEAD, WARPS
        )
    else:
        _produce_pages(
            ring, work, shape, k_cache, v_cache, k_pages, v_pages, K_SLOT, K_HEAD, V_SLOT, V_HEAD,
            WARPS,
        )


@gluon.jit
def _load_words(word_row, row_ok, masked, first, shape):
    """Tail words of a tile with tail keys, read before its scores are there."""
    word0 = row_ok.to(gl.uint64) * 0                                      # [64]
    word1 = word0
    word2 = word0
    if shape.TAIL > 0:
        if masked:
            word0 = load_word(word_row, row_ok, first, 0, shape.WORDS)
            word1 = load_word(word_row, row_ok, first, 1, shape.WORDS)
            if shape.BN > 64:
                word2 = load_word(word_row, row_ok, first, 2, shape.WORDS)
    return word0, word1, word2


@gluon.jit
def _mask(s, words, tail_pos_row, pos_q, r, start, end, prefix_len, shape):
    """Mask the scores of a tile that holds tail keys, the end or a window's edge."""
    first = start - prefix_len
    pos = start + r                                                       # [BN]
    if shape.TAIL > 0:
        bits = row_bits(words[0], words[1], first, end - start)           # [64]
        if shape.BN > 64:
            more = row_bits(words[1], words[2], first + 64, end - start - 64)
            visible = spread(bits, more, r[None, :], shape.BN)
        else:
            visible = spread(bits, None, r[None, :], shape.BN)
        s = gl.where(visible, s, MASKED)
    else:
        s = gl.where((pos < end)[None, :], s, MASKED)
    if shape.WINDOW >= 0:
        pos_k = pos
        if shape.TAIL > 0:
            tail = gl.minimum(gl.maximum(pos - prefix_len, 0), shape.TAIL - 1)
            pos_k = gl.where(pos < prefix_len, pos, gl.load(tail_pos_row + tail * 2))
        distance = (pos_q[:, None] - pos_k[None, :]).to(gl.uint32, bitcast=True)
        s = gl.where(distance <= shape.WINDOW, s, MASKED)
    return s


@gluon.jit
def _soften(s, top, total, base2, shape):
    """Online softmax of a tile's scores: weights, running maximum and sum, rescaling."""
    new_top = gl.maximum(top, gl.max(s, 1))
    # a cap has scaled the scores already
    if shape.HAS_CAP:
        fade = gl.exp2(top - new_top)
        p = gl.exp2(s - new_top[:, None])
    else:
        fade = gl.exp2((top - new_top) * base2)
        p = gl.exp2(s * base2 - (new_top * base2)[:, None])
    return p, new_top, total * fade + gl.sum(p, 1), fade


@gluon.jit
def _cap(s, cap_in, cap_out, shape):
    """Apply the logit cap: ``cap_out * tanh(cap_in * s)``, to 1e-7 of ``cap_out``."""
    if shape.HAS_CAP:
        e = gl.exp2(s * (cap_in * 2.8853900817779268))
        s = cap_out - (2.0 * cap_out) / (e + 1.0)
    return s


@gluon.jit
def _consume(
    ring, work, shape, q, out, lse, partial_out, partial_lse, base2, cap_in, cap_out,
    Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr, LSE_TOKEN: gl.constexpr, LSE_HEAD: gl.constexpr, WG: gl.constexpr,
):
    """Attend with the 64 packed rows of warpgroup ``WG`` to the tiles in the ring."""
    BN: gl.constexpr = shape.BN
    HEAD_DIM: gl.constexpr = shape.HEAD_DIM
    GROUP: gl.constexpr = shape.GROUP
    dtype: gl.constexpr = q.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, values, 2)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    by_score: gl.constexpr = gl.SliceLayout(1, scores)
    by_value: gl.constexpr = gl.SliceLayout(1, values)
    row0 = (work.m_tile * shape.GROUPS + WG) * 64
    q_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, loads))      # [64], packed rows
    s_row = row0 + gl.arange(0, 64, layout=by_score)
    o_row = row0 + gl.arange(0, 64, layout=by_value)
    q_col = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, loads))
    o_col = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, values))
    r = gl.arange(0, BN, layout=gl.SliceLayout(0, scores))
    s_ok = s_row < shape.Q_LEN * GROUP
    q_tile = ring.q.index(WG)
    left, tile, req, _base, prefix_len, first_tile, parts, split_rank = _first_segment(work)
    stage = 0
    phase = 0
    while left > 0:
        begin, end, count = _bounds(tile, left, prefix_len, first_tile, shape)
        q_at = (req * shape.Q_LEN + q_row // GROUP).to(gl.int64) * Q_TOKEN
        q_at += (work.head * GROUP + q_row % GROUP) * Q_HEAD
        q_tile.store(gl.load(
            q + q_at[:, None] + q_col[None, :], mask=(q_row < shape.Q_LEN * GROUP)[:, None],
            other=0.0,
        ))
        fence_async_shared()
        token = s_row // GROUP
        word_row = work.tail_words + req.to(gl.int64) * work.stride_words
        word_row += token * work.stride_words_q                           # [64]
        tail_pos_row = work.tail_positions + req.to(gl.int64) * work.stride_tail_pos
        tail_pos_row = tail_pos_row.to(gl.pointer_type(gl.int32), bitcast=True)
        # tiles between these keys are visible to every row
        clear_from = 0
        pos_q = token
        if shape.WINDOW >= 0:
            _low, high = _query_positions(work, req, prefix_len, shape)
            clear_from = high - shape.WINDOW
            if shape.CSR:
                pos_q = prefix_len - 1 + token * 0
            else:
                pos_row = work.positions + req.to(gl.int64) * work.stride_pos
                pos_q = gl.load(pos_row + gl.minimum(token, shape.Q_LEN - 1)).to(gl.int32)

        top = gl.full([64], FLOOR, gl.float32, by_score)
        total = gl.full([64], 0.0, gl.float32, by_score)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, values)
        nothing = gl.zeros([64, BN], gl.float32, scores)
        masked = (begin < clear_from) | (begin + BN > prefix_len)
        words = _load_words(word_row, s_ok, masked, begin - prefix_len, shape)
        mbarrier.wait(ring.k_full.index(stage), phase)
        fence_async_shared()
        s = warpgroup_mma(
            q_tile, ring.k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(ring.k_free.index(stage), count=1)
        s = _cap(s, cap_in, cap_out, shape)
        if masked:
            s = _mask(s, words, tail_pos_row, pos_q, r, begin, end, prefix_len, shape)
        p, top, total, _fade = _soften(s, top, total, base2, shape)
        p = gl.convert_layout(p.to(dtype), weights)
        for start in range(begin + BN, begin + count * BN, BN):
            before, before_phase = stage, phase
            stage, phase = _advance(stage, phase, shape)
            masked = (start < clear_from) | (start + BN > prefix_len)
            words = _load_words(word_row, s_ok, masked, start - prefix_len, shape)
            mbarrier.wait(ring.k_full.index(stage), phase)
            fence_async_shared()
            s_next = warpgroup_mma(
                q_tile, ring.k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            mbarrier.wait(ring.v_full.index(before), before_phase)
            fence_async_shared()
            acc_next = warpgroup_mma(p, ring.v.index(before), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_next])
            mbarrier.arrive(ring.k_free.index(stage), count=1)
            s = _cap(s, cap_in, cap_out, shape)
            if masked:
                s = _mask(s, words, tail_pos_row, pos_q, r, start, end, prefix_len, shape)
            p_next, top, total, fade = _soften(s, top, total, base2, shape)
            p_next = gl.convert_layout(p_next.to(dtype), weights)
            acc, p = warpgroup_mma_wait(0, deps=[acc_next, p])
            mbarrier.arrive(ring.v_free.index(before), count=1)
            acc = acc * gl.convert_layout(fade, by_value)[:, None]
            p = p_next
        mbarrier.wait(ring.v_full.index(stage), phase)
        fence_async_shared()
        acc_next = warpgroup_mma(p, ring.v.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(ring.v_free.index(stage), count=1)
        stage, phase = _advance(stage, phase, shape)

        inverse = gl.convert_layout(gl.where(total > 0.0, 1.0 / total, 0.0), by_value)
        # a row that saw nothing may have met anything in the pool
        acc = gl.where((inverse > 0.0)[:, None], acc * inverse[:, None], 0.0)
        log2_sum = (top if shape.HAS_CAP else top * base2) + gl.log2(total)
        if parts == 1:
            at = (req * shape.Q_LEN + o_row // GROUP).to(gl.int64) * OUT_TOKEN
            at += (work.head * GROUP + o_row % GROUP) * OUT_HEAD
            gl.store(
                out + at[:, None] + o_col[None, :], acc.to(dtype),
                mask=(o_row < shape.Q_LEN * GROUP)[:, None],
            )
            if shape.HAS_LSE:
                at = (req * shape.Q_LEN + token).to(gl.int64) * LSE_TOKEN
                at += (work.head * GROUP + s_row % GROUP) * LSE_HEAD
                gl.store(
                    lse + at, gl.where(total > 0.0, log2_sum * LN2, float("-inf")), mask=s_ok
                )
        else:
            block = ((work.chunk + split_rank) * shape.NUM_KV + work.head).to(gl.int64)
            block = block * (shape.MT * shape.GROUPS * 64)
            gl.store(
                partial_out + (block + o_row)[:, None] * HEAD_DIM + o_col[None, :], acc.to(dtype),
                mask=(o_row < shape.Q_LEN * GROUP)[:, None],
            )
            gl.store(partial_lse + block + s_row, gl.where(total > 0.0, log2_sum, EMPTY))
        left -= count
        tile = 0
        if left > 0:
            req += 1
            _base, prefix_len, first_tile, parts, split_rank = load_request(
                work.requests + req * 8
            )


# strides of small tensors: no variants of the kernel for round ones
@gluon.jit(do_not_specialize=[
    "stride_pos", "stride_tail", "stride_tail_pos", "stride_words", "stride_words_q",
])
def gluon_tree_kernel(
    q,               # [B * Q_LEN, Hq, HEAD_DIM]
    k_cache,         # [slots, NUM_KV, HEAD_DIM]
    v_cache,         # [slots, NUM_KV, HEAD_DIM]
    out,             # [B * Q_LEN, Hq, HEAD_DIM]
    lse,             # [B * Q_LEN, Hq] float32, or anything without HAS_LSE
    indices,         # int32: req_to_token rows, or with CSR kv_indices
    positions,       # [B, Q_LEN] int64, with WINDOW
    tail_slots,      # [B, TAIL] int32
    tail_positions,  # [B, TAIL] int64, with WINDOW
    tail_words,      # [B, Q_LEN, WORDS] int64
    requests,        # [B, 8] int64
    chunks,          # [NC, 8] int64
    partial_out,     # [slots, NUM_KV, MT, GROUPS * 64, HEAD_DIM]
    partial_lse,     # [slots, NUM_KV, MT, GROUPS * 64] float32, base 2
    k_pages,         # descriptors of [slots, NUM_KV * HEAD_DIM] with PAGE > 1, or anything
    v_pages,
    base2, cap_in, cap_out,
    stride_pos, stride_tail, stride_tail_pos, stride_words, stride_words_q,
    Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr, LSE_TOKEN: gl.constexpr, LSE_HEAD: gl.constexpr,
    K_SLOT: gl.constexpr, K_HEAD: gl.constexpr, V_SLOT: gl.constexpr, V_HEAD: gl.constexpr,
    Q_LEN: gl.constexpr, TAIL: gl.constexpr, WORDS: gl.constexpr, WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr, CSR: gl.constexpr, HAS_LSE: gl.constexpr, GROUP: gl.constexpr,
    NUM_KV: gl.constexpr, HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr,
    MT: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr, PRODUCERS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):
    """One CTA per (chunk, KV head, M tile) walks the segments of its chunk."""
    shape = Shape(
        Q_LEN, TAIL, WORDS, WINDOW, HAS_CAP, CSR, HAS_LSE, GROUP, NUM_KV, HEAD_DIM, GROUPS, BN, MT,
        STAGES, PAGE,
    )
    dtype: gl.constexpr = k_cache.dtype.element_ty
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, HEAD_DIM], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        gl.allocate_shared_memory(dtype, [GROUPS, 64, HEAD_DIM], q_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BN, HEAD_DIM], kv_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BN, HEAD_DIM], kv_layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
    )
    arrivals: gl.constexpr = PRODUCERS * 32 if PAGE == 1 else 1
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.k_full.index(stage), count=arrivals)
        mbarrier.init(ring.v_full.index(stage), count=arrivals)
        mbarrier.init(ring.k_free.index(stage), count=GROUPS)
        mbarrier.init(ring.v_free.index(stage), count=GROUPS)
    fence_async_shared()
    pid = gl.program_id(0)
    work = Work(
        pid // (MT * NUM_KV), pid // MT % NUM_KV, pid % MT, requests, chunks, indices, positions,
        tail_slots, tail_positions, tail_words, stride_pos, stride_tail, stride_tail_pos,
        stride_words, stride_words_q,
    )
    gdc_wait()
    gdc_launch_dependents()
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (
                ring, work, shape, q, out, lse, partial_out, partial_lse, base2, cap_in, cap_out,
                Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, LSE_TOKEN, LSE_HEAD, 0,
            )),
            (_produce_any, (
                ring, work, shape, k_cache, v_cache, k_pages, v_pages, K_SLOT, K_HEAD, V_SLOT,
                V_HEAD, PRODUCERS,
            )),
        ], [PRODUCERS], [PRODUCER_REGS])
    else:
        gl.warp_specialize([
            (_consume, (
                ring, work, shape, q, out, lse, partial_out, partial_lse, base2, cap_in, cap_out,
                Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, LSE_TOKEN, LSE_HEAD, 0,
            )),
            (_consume, (
                ring, work, shape, q, out, lse, partial_out, partial_lse, base2, cap_in, cap_out,
                Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, LSE_TOKEN, LSE_HEAD, 1,
            )),
            (_produce_any, (
                ring, work, shape, k_cache, v_cache, k_pages, v_pages, K_SLOT, K_HEAD, V_SLOT,
                V_HEAD, PRODUCERS,
            )),
        ], [4, PRODUCERS], [CONSUMER_REGS, PRODUCER_REGS])
