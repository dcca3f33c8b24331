"""Ring of tiles, producers and consumer of the Gluon kernels for Hopper.

Warp specialisation as in FlashAttention-3 (Shah et al., 2024): one warpgroup brings tiles of keys
and values into a ring of shared-memory stages, one or two others multiply. The producer gathers
rows by ``cp.async``, or whole pages by TMA; over float8 keys two more convert them on the way.
Scores of a tile are issued before the values of the one before it, so that the softmax runs under
a product.
"""

# no postponed annotations: aggregates read the types of their fields
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_wait

from specattn.kernels.attention.softmax import FLOOR, MASKED, start_from_sinks
from specattn.kernels.attention.splits import load_word, row_bits, spread
from specattn.kernels.gluon_names import async_load, tma_load


def record(cls: Any) -> Any:
    """Make an aggregate of the annotated fields, given in their order."""
    names = tuple(cls.__annotations__)

    def __init__(self, *fields):
        for name, field in zip(names, fields, strict=True):
            setattr(self, name, field)

    # not part of the device code, whose hash would otherwise have to cover it
    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__
    return aggregate(cls)


@record
class Tile:
    """Constants of the tiles.

    Without a tail and with ``CAUSAL``, keys are masked by position.

    With ``PREFETCH``, what is read before `gdc_wait` passes by the L1 cache (``CACHE``), which
    keeps nothing of other kernels' writes up to date.
    """

    TAIL: gl.constexpr
    WORDS: gl.constexpr
    WINDOW: gl.constexpr
    CAUSAL: gl.constexpr
    HAS_CAP: gl.constexpr
    HEAD_DIM: gl.constexpr
    GROUPS: gl.constexpr
    BN: gl.constexpr
    STAGES: gl.constexpr
    PAGE: gl.constexpr
    PRODUCERS: gl.constexpr
    PREFETCH: gl.constexpr
    CACHE: gl.constexpr


@record
class KVRing:
    """Stages of shared memory, and the barriers that hand them over."""

    q: gl.shared_memory_descriptor  # [GROUPS, 64, HEAD_DIM]
    k: gl.shared_memory_descriptor  # [STAGES, BN, HEAD_DIM]
    v: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor  # [STAGES, 1]
    v_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor


@record
class Pools:
    """Keys and values, their TMA descriptors, and the steps in them."""

    k_cache: gl.tensor  # [slots, NUM_KV, HEAD_DIM]
    v_cache: gl.tensor
    k_pages: object  # descriptors of [slots, NUM_KV * HEAD_DIM] with PAGE > 1, or anything
    v_pages: object
    K_SLOT: gl.constexpr
    K_HEAD: gl.constexpr
    V_SLOT: gl.constexpr
    V_HEAD: gl.constexpr


@record
class Factors:
    """What scores and values are multiplied by; see `TreeAttention`."""

    base2: gl.tensor
    cap_in: gl.tensor
    cap_out: gl.tensor
    v_scale: gl.tensor
    HAS_SCALE: gl.constexpr


@gluon.jit
def make_ring(dtype: gl.constexpr, t, arrivals: gl.constexpr):
    """Allocate a ring of 16-bit tiles; ``arrivals`` fill a stage."""
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([t.BN, t.HEAD_DIM], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, t.HEAD_DIM], dtype)
    q = gl.allocate_shared_memory(dtype, [t.GROUPS, 64, t.HEAD_DIM], q_layout)
    return _make_stages(q, dtype, kv_layout, t, arrivals, t.GROUPS)


@gluon.jit
def make_raw_ring(dtype: gl.constexpr, t):
    """Allocate a ring of float8 tiles; a warpgroup fills, one empties each."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 1, [1, 0])
    # there are no queries in it
    q = gl.allocate_shared_memory(dtype, [1, 1, 16], layout)
    return _make_stages(q, dtype, layout, t, t.PRODUCERS * 32, 1)


@gluon.jit
def _make_stages(
    q,
    dtype: gl.constexpr,
    layout: gl.constexpr,
    t,
    arrivals: gl.constexpr,
    departures: gl.constexpr,
):
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    ring = KVRing(
        q,
        gl.allocate_shared_memory(dtype, [t.STAGES, t.BN, t.HEAD_DIM], layout),
        gl.allocate_shared_memory(dtype, [t.STAGES, t.BN, t.HEAD_DIM], layout),
        gl.allocate_shared_memory(gl.int64, [t.STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [t.STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [t.STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [t.STAGES, 1], barriers),
    )
    for stage in gl.static_range(t.STAGES):
        mbarrier.init(ring.k_full.index(stage), count=arrivals)
        mbarrier.init(ring.v_full.index(stage), count=arrivals)
        mbarrier.init(ring.k_free.index(stage), count=departures)
        mbarrier.init(ring.v_free.index(stage), count=departures)
    fence_async_shared()
    return ring


@gluon.jit
def advance(stage, phase, t):
    """Next stage, and the phase its barriers are in."""
    stage += 1
    last = stage == t.STAGES
    return gl.where(last, 0, stage), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load_slots(index_row, tail_row, start, r, first_key, prefix_len, t):
    """Load the raw slots of a tile ahead of their use."""
    pos = start + r  # [BN]
    if (start >= first_key) & (start + t.BN <= prefix_len):
        slots = gl.load(index_row + pos, cache_modifier=t.CACHE)
    else:
        last = gl.maximum(prefix_len - 1, 0)
        if t.TAIL > 0:
            # keys left of the window may lie in recycled slots: a tail key stands in for them
            inside = (pos < prefix_len) & (pos >= first_key)
            tail = gl.minimum(gl.maximum(pos - prefix_len, 0), t.TAIL - 1)
            slot = gl.where(inside, index_row + gl.minimum(pos, last), tail_row + tail)
            slots = gl.load(slot, cache_modifier=t.CACHE)
        else:
            pos = gl.minimum(gl.maximum(pos, gl.minimum(first_key, last)), last)
            slots = gl.load(index_row + pos, mask=pos < prefix_len, other=0)
    return slots


@gluon.jit
def _fill_by_pages(desc, tile, full, free, phase, slots, column, t):
    """One TMA box per page, or per tile where pages are larger."""
    BOX: gl.constexpr = t.PAGE if t.PAGE < t.BN else t.BN
    mbarrier.wait(free, phase)
    mbarrier.expect(full, t.BN * t.HEAD_DIM * 2)
    for z in gl.static_range(t.BN // BOX):
        if BOX == t.BN:
            tma_load(desc, [slots[z], column], full, tile)
        else:
            tma_load(desc, [slots[z], column], full, tile.slice(z * BOX, BOX))


@gluon.jit
def _convert(raw, raw_full, raw_free, tiles, full, free, raw_t, t, count, WARPS: gl.constexpr):
    """Turn ``count`` float8 tiles, of keys or of values, into 16-bit ones.

    It has warps of its own: a fence waits for all that its thread has under way, and would hold
    up the copies of a producer.
    """
    # 8 numbers a thread: their stores of 16 bytes meet no bank twice
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // t.HEAD_DIM, t.HEAD_DIM // 8], [WARPS, 1], [1, 0]
    )
    raw_stage = 0
    raw_phase = 0
    stage = 0
    phase = 1
    for _ in range(count):
        mbarrier.wait(raw_full.index(raw_stage), raw_phase)
        values = raw.index(raw_stage).load(layout)
        mbarrier.arrive(raw_free.index(raw_stage), count=1)
        mbarrier.wait(free.index(stage), phase)
        tiles.index(stage).store(values.to(tiles.dtype))
        fence_async_shared()
        mbarrier.arrive(full.index(stage), count=1)
        raw_stage, raw_phase = advance(raw_stage, raw_phase, raw_t)
        stage, phase = advance(stage, phase, t)


@gluon.jit
def convert(raw, ring, raw_t, t, count, WARPS: gl.constexpr, VALUES: gl.constexpr):
    """Convert the values or keys of ``count`` tiles from ring to ring."""
    if VALUES:
        _convert(
            raw.v, raw.v_full, raw.v_free, ring.v, ring.v_full, ring.v_free, raw_t, t, count, WARPS
        )
    else:
        _convert(
            raw.k, raw.k_full, raw.k_free, ring.k, ring.k_full, ring.k_free, raw_t, t, count, WARPS
        )


@gluon.constexpr_function
def _lane_layout(BN, WIDE):
    """Layout of one slot a lane, of rows that its warp copies.

    A copy of ``WIDE`` numbers a lane takes 2 or 4 rows a warp, of 4 warps; a tile takes several.
    """
    rows = WIDE // 4
    inside = [[1 << i] for i in range(rows.bit_length() - 1)]
    copies = [[4 * rows << i] for i in range((BN // (4 * rows)).bit_length() - 1)]
    lanes = (inside + copies + [[0]] * 5)[:5]
    return gl.DistributedLinearLayout([], lanes, [[rows], [2 * rows]], [], [BN])


@gluon.jit
def produce(
    ring,
    t,
    pools,
    head,
    index_row,
    tail_row,
    begin,
    count,
    first_key,
    prefix_len,
    stage,
    phase,
):
    """Bring ``count`` tiles into the ring, from key ``begin`` on.

    Returns the ring's stage and phase. Keys from ``first_key`` to ``prefix_len`` come through
    ``index_row``, the others through ``tail_row``. A page may hold anything past its request's
    keys, so only tiles full of keys come as pages. With ``PREFETCH``, tiles of the prefix alone
    come without waiting for the kernel before this one, which writes keys of the tail.
    """
    BN: gl.constexpr = t.BN
    BOX: gl.constexpr = t.PAGE if t.PAGE < BN else BN
    # 16 bytes a thread
    WIDE: gl.constexpr = 128 // ring.k.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout(
        [1, WIDE], [2 * WIDE // 8, 128 // WIDE], [t.PRODUCERS, 1], [1, 0]
    )
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    # a lane loads one slot of its warp's; all that need it get it by shuffles
    r = gl.arange(0, BN, layout=_lane_layout(BN, WIDE))  # [BN]
    d = gl.arange(0, t.HEAD_DIM, layout=gl.SliceLayout(0, layout))  # [HEAD_DIM]
    k_head = pools.k_cache + head.to(gl.int64) * pools.K_HEAD + d[None, :]  # [1, HEAD_DIM]
    v_head = pools.v_cache + head.to(gl.int64) * pools.V_HEAD + d[None, :]
    if t.PAGE == 1:
        ahead = _load_slots(index_row, tail_row, begin, r, first_key, prefix_len, t)
        for start in range(begin, begin + count * BN, BN):
            rows = gl.convert_layout(ahead, by_row).to(gl.int64)[:, None]  # [BN, 1]
            ahead = _load_slots(index_row, tail_row, start + BN, r, first_key, prefix_len, t)
            if t.PREFETCH:  # noqa: SIM102
                if (start < first_key) | (start + BN > prefix_len):
                    gdc_wait()
            mbarrier.wait(ring.k_free.index(stage), phase)
            async_load(ring.k.index(stage), k_head + rows * pools.K_SLOT)
            async_copy.mbarrier_arrive(ring.k_full.index(stage), increment_count=False)
            mbarrier.wait(ring.v_free.index(stage), phase)
            async_load(ring.v.index(stage), v_head + rows * pools.V_SLOT)
            async_copy.mbarrier_arrive(ring.v_full.index(stage), increment_count=False)
            stage, phase = advance(stage, phase, t)
    else:
        column = head * t.HEAD_DIM
        for start in range(begin, begin + count * BN, BN):
            k_tile = ring.k.index(stage)
            v_tile = ring.v.index(stage)
            k_full = ring.k_full.index(stage)
            v_full = ring.v_full.index(stage)
            if (start >= first_key) & (start + BN <= prefix_len):
                slots = ()
                for z in gl.static_range(BN // BOX):
                    slot = gl.load(index_row + start + z * BOX, cache_modifier=t.CACHE)
                    # Gluon knows tuple addition, not unpacking
                    slots = slots + (slot,)  # type: ignore[assignment]  # noqa: RUF005
                _fill_by_pages(
                    pools.k_pages, k_tile, k_full, ring.k_free.index(stage), phase, slots, column, t
                )
                _fill_by_pages(
                    pools.v_pages, v_tile, v_full, ring.v_free.index(stage), phase, slots, column, t
                )
            else:
                rows = _load_slots(index_row, tail_row, start, r, first_key, prefix_len, t)
                if t.PREFETCH:
                    gdc_wait()
                rows = gl.convert_layout(rows, by_row).to(gl.int64)[:, None]  # [BN, 1]
                mbarrier.wait(ring.k_free.index(stage), phase)
                async_load(k_tile, k_head + rows * pools.K_SLOT)
                async_copy.commit_group()
                mbarrier.wait(ring.v_free.index(stage), phase)
                async_load(v_tile, v_head + rows * pools.V_SLOT)
                async_copy.commit_group()
                # the barriers count one arrival, TMA's or this one
                async_copy.wait_group(1)
                fence_async_shared()
                mbarrier.arrive(k_full, count=1)
                async_copy.wait_group(0)
                fence_async_shared()
                mbarrier.arrive(v_full, count=1)
            stage, phase = advance(stage, phase, t)
    return stage, phase


@gluon.jit
def _load_words(word_row, row_ok, masked, first, t):
    """Load the tail words of a tile before its scores are there."""
    word0 = row_ok.to(gl.uint64) * 0  # [64]
    word1 = word0
    word2 = word0
    # the compiler decides the outer conditions, the device the inner one
    if t.TAIL > 0 and t.WORDS > 1:  # noqa: SIM102
        if masked:
            word0 = load_word(word_row, row_ok, first, 0, t.WORDS)
            word1 = load_word(word_row, row_ok, first, 1, t.WORDS)
            if t.BN > 64:
                word2 = load_word(word_row, row_ok, first, 2, t.WORDS)
    return word0, word1, word2


@gluon.jit
def _pick_words(words, only_word, first, t):
    """Return a tile's tail words: loaded ones, or pieces of one."""
    word0, word1, word2 = words
    if t.WORDS == 1:
        nothing = only_word * 0
        word0 = gl.where((first >> 6) == 0, only_word, nothing)
        word1 = gl.where((first >> 6) == -1, only_word, nothing)
        word2 = gl.where((first >> 6) == -2, only_word, nothing)
    return word0, word1, word2


@gluon.jit
def _mask(s, words, only_word, tail_pos_row, pos_q, r, start, end, prefix_len, t):
    """Mask a tile's scores by tail bits, end of keys and position."""
    first = start - prefix_len
    pos = start + r  # [BN]
    if t.TAIL > 0:
        words = _pick_words(words, only_word, first, t)
        bits = row_bits(words[0], words[1], first, end - start)  # [64]
        if t.BN > 64:
            more = row_bits(words[1], words[2], first + 64, end - start - 64)
            visible = spread(bits, more, r[None, :], t.BN)
        else:
            visible = spread(bits, None, r[None, :], t.BN)
        s = gl.where(visible, s, MASKED)
    elif t.CAUSAL:
        s = gl.where(pos_q[:, None] >= pos[None, :], s, MASKED)
    else:
        s = gl.where((pos < end)[None, :], s, MASKED)
    if t.WINDOW >= 0:
        pos_k = pos
        if t.TAIL > 0:
            tail = gl.minimum(gl.maximum(pos - prefix_len, 0), t.TAIL - 1)
            pos_k = gl.where(pos < prefix_len, pos, gl.load(tail_pos_row + tail * 2))
        # unsigned: a key after the query is too far, too
        distance = (pos_q[:, None] - pos_k[None, :]).to(gl.uint32, bitcast=True)
        s = gl.where(distance <= t.WINDOW, s, MASKED)
    return s


@gluon.jit
def _soften(s, top, total, base2, t):
    """Online softmax of a tile's scores: weights, running maximum and sum, rescaling."""
    new_top = gl.maximum(top, gl.max(s, 1))
    # a cap has scaled the scores already
    if t.HAS_CAP:
        fade = gl.exp2(top - new_top)
        p = gl.exp2(s - new_top[:, None])
    else:
        fade = gl.exp2((top - new_top) * base2)
        p = gl.exp2(s * base2 - (new_top * base2)[:, None])
    return p, new_top, total * fade + gl.sum(p, 1), fade


@gluon.jit
def _cap(s, factors, t):
    """Return ``cap_out * tanh(cap_in * s)`` to 1e-7 of ``cap_out``."""
    if t.HAS_CAP:
        e = gl.exp2(s * (factors.cap_in * 2.8853900817779268))
        s = factors.cap_out - (2.0 * factors.cap_out) / (e + 1.0)
    return s


@gluon.jit
def start(sinks, heads, first, factors, t):
    """Return running maximum and sum of 64 rows before their keys.

    That is nothing, or with ``sinks``, a pointer or None, each row's own: see `start_from_sinks`.
    """
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, t.BN, 16])
    by_score: gl.constexpr = gl.SliceLayout(1, scores)
    if sinks is None:
        top = gl.full([64], FLOOR, gl.float32, by_score)
        total = gl.full([64], 0.0, gl.float32, by_score)
    else:
        top, total = start_from_sinks(sinks + heads, first, factors.base2, t.HAS_CAP)
    return top, total


@gluon.jit
def drain(ring, t, count, stage, phase):
    """Hand ``count`` tiles back unread; return the ring's stage and phase."""
    for _ in range(count):
        mbarrier.wait(ring.k_full.index(stage), phase)
        mbarrier.arrive(ring.k_free.index(stage), count=1)
        mbarrier.wait(ring.v_full.index(stage), phase)
        mbarrier.arrive(ring.v_free.index(stage), count=1)
        stage, phase = advance(stage, phase, t)
    return stage, phase


@gluon.jit
def _pack(p, dtype: gl.constexpr, BN: gl.constexpr):
    """Return weights in 16 bits, two in a word: one register."""
    low, high = gl.split(gl.reshape(p, [64, BN // 2, 2]))
    if dtype == gl.bfloat16:
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    else:
        words = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    return words


@gluon.jit
def _unpack(words, dtype: gl.constexpr, BN: gl.constexpr, layout: gl.constexpr):
    """Return the weights of `_pack`."""
    low = words.to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    p = gl.reshape(gl.join(low, high), [64, BN])
    return gl.convert_layout(p, layout)


@gluon.jit
def attend(
    ring,
    t,
    q_tile,
    begin,
    end,
    count,  # first key, end of the keys, tiles
    clear_from,
    clear_to,  # tiles between these keys are visible to every row
    prefix_len,
    word_row,
    row_ok,
    tail_pos_row,
    pos_q,
    factors,
    top,
    total,  # what `start` returned
    stage,
    phase,
):
    """Attend with 64 rows to ``count`` tiles in the ring.

    Returns weighted values, running maximum, sum of weights, and the ring's stage and phase.
    """
    BN: gl.constexpr = t.BN
    HEAD_DIM: gl.constexpr = t.HEAD_DIM
    dtype: gl.constexpr = q_tile.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, values, 2)
    by_value: gl.constexpr = gl.SliceLayout(1, values)
    r = gl.arange(0, BN, layout=gl.SliceLayout(0, scores))
    acc = gl.zeros([64, HEAD_DIM], gl.float32, values)
    nothing = gl.zeros([64, BN], gl.float32, scores)
    # one word per row stays in registers: fewer than pointers and three words take
    only_word = row_ok.to(gl.uint64) * 0  # [64]
    if t.TAIL > 0 and t.WORDS == 1:
        only_word = load_word(word_row, row_ok, 0, 0, 1)
    masked = (begin < clear_from) | (begin + BN > clear_to)
    words = _load_words(word_row, row_ok, masked, begin - prefix_len, t)
    mbarrier.wait(ring.k_full.index(stage), phase)
    fence_async_shared()
    s = warpgroup_mma(
        q_tile, ring.k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(ring.k_free.index(stage), count=1)
    s = _cap(s, factors, t)
    if masked:
        s = _mask(s, words, only_word, tail_pos_row, pos_q, r, begin, end, prefix_len, t)
    first_p, top, total, _fade = _soften(s, top, total, factors.base2, t)
    words_p = _pack(first_p, dtype, BN)
    mbarrier.wait(ring.v_full.index(stage), phase)
    for start in range(begin + BN, begin + count * BN, BN):
        before = stage
        stage, phase = advance(stage, phase, t)
        masked = (start < clear_from) | (start + BN > clear_to)
        words = _load_words(word_row, row_ok, masked, start - prefix_len, t)
        mbarrier.wait(ring.k_full.index(stage), phase)
        fence_async_shared()
        s_next = warpgroup_mma(
            q_tile, ring.k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        p = _unpack(words_p, dtype, BN, weights)
        acc_next = warpgroup_mma(p, ring.v.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_next])
        mbarrier.arrive(ring.k_free.index(stage), count=1)
        s = _cap(s, factors, t)
        if masked:
            s = _mask(s, words, only_word, tail_pos_row, pos_q, r, start, end, prefix_len, t)
        p_next, top, total, fade = _soften(s, top, total, factors.base2, t)
        # between weights and the product before: the compiler moves a wait for a product up to
        # the last branch, and then nothing would run under it
        mbarrier.wait(ring.v_full.index(stage), phase)
        acc, _p = warpgroup_mma_wait(0, deps=[acc_next, p])
        words_p = _pack(p_next, dtype, BN)
        mbarrier.arrive(ring.v_free.index(before), count=1)
        acc = acc * gl.convert_layout(fade, by_value)[:, None]
    fence_async_shared()
    p = _unpack(words_p, dtype, BN, weights)
    acc_next = warpgroup_mma(p, ring.v.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_next])
    mbarrier.arrive(ring.v_free.index(stage), count=1)
    stage, phase = advance(stage, phase, t)
    inverse = gl.convert_layout(gl.where(total != 0.0, 1.0 / total, 0.0), by_value)
    # a row that saw nothing may have met anything in the pool
    acc = gl.where((inverse != 0.0)[:, None], acc * inverse[:, None], 0.0)
    if factors.HAS_SCALE:
        acc = acc * factors.v_scale
    log2_sum = (top if t.HAS_CAP else top * factors.base2) + gl.log2(total)
    return acc, total, log2_sum, stage, phase
