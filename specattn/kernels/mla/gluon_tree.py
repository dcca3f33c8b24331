"""Device code of latent tree attention for Hopper, in Gluon.

A producer warpgroup gathers latent rows into a ring of tiles in shared memory. Of two consumer
warpgroups, each keeps half of the value columns of 64 packed query rows in registers; the first
one scores a tile for both and leaves the weights in shared memory. That split of the value columns
is FlashMLA's (https://github.com/deepseek-ai/FlashMLA); splits, clamped loads and visibility bits
are those of `splits`, whose contract this is, at 512 + 64 columns and 16 bits. `tree`
is the host side.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.attention.gluon_ring import advance
from specattn.kernels.attention.softmax import EMPTY, FLOOR, LN2, MASKED
from specattn.kernels.attention.splits import load_request, load_word, row_bits, spread
from specattn.kernels.gluon_names import barrier, reinterpret
from specattn.kernels.mla.gluon_ring import (
    BM,
    BN,
    RANK,
    LatentConstants,
    Work,
    bounds,
    first_segment,
    make_ring,
    produce,
)

# value columns of a consumer
COLUMNS = gl.constexpr(256)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
# where a result lies when it is stored: 16 bytes per thread and 64 per row at a time, each warp
# with the rows it has in `VALUES`, so that numbers move between the lanes of a warp alone
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)


@gluon.jit
def _score(ring, t, stage, phase, word_row, row_ok, start, end, prefix_len):
    """Compute the logits of the tile at key ``start``, masked by visibility."""
    first = start - prefix_len
    word = row_ok.to(gl.uint64) * 0
    next_word = word
    if first + BN > 0:
        # ahead of the wait for the tile
        word = load_word(word_row, row_ok, first, 0, t.WORDS)
        next_word = load_word(word_row, row_ok, first, 1, t.WORDS)
    # always 0, which the compiler cannot know: the addresses of the 36 query operands are made
    # from one again rather than kept in registers, most of them spilled
    zero = start >> 30
    mbarrier.wait(ring.full.index(stage), phase)
    # the copies went through the generic proxy, the products read through the async one
    fence_async_shared()
    s = gl.zeros([BM, BN], gl.float32, SCORES)
    s = warpgroup_mma(
        ring.q_rotated.index(zero),
        ring.rotated.index(stage).permute((1, 0)),
        s,
        use_acc=False,
        is_async=True,
    )
    s = warpgroup_mma(
        ring.q_latent.index(zero), ring.latent.index(stage).permute((1, 0)), s, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=[s])
    if start + BN >= end:
        mbarrier.arrive(ring.q_empty.index(0), count=1)
    if first + BN > 0:
        r = gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES))
        bits = row_bits(word, next_word, first, end - start)
        s = gl.where(spread(bits, None, r[None, :], BN), s, MASKED)
    return s


@gluon.jit
def _soften(s, top, total, base2):
    """Return an online-softmax step's weights, fade, maxima and sums."""
    new_top = gl.maximum(top, gl.max(s, 1))
    fade = gl.exp2((top - new_top) * base2)
    p = gl.exp2(s * base2 - (new_top * base2)[:, None])
    return p, fade, new_top, total * fade + gl.sum(p, 1)


@gluon.jit
def _weights_of(rotated):
    """Return a tile's weights ``[BM, BN]``, in place of its rotated keys."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BN], rotated.dtype)
    return reinterpret(rotated, rotated.dtype, [BM, BN], layout)


@gluon.jit
def _store(
    acc,
    total,
    out,
    partial_out,
    work,
    t,
    req,
    partials,
    partial,
    stride_out,
    stride_out_head,
    SIDE: gl.constexpr,
):
    """Store value columns from ``256 * SIDE`` on: results, or partial ``partial``."""
    rows: gl.constexpr = gl.SliceLayout(1, VALUES)
    seen = total != 0.0
    inverse = gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0)
    acc = acc * gl.convert_layout(inverse, rows)[:, None]
    values = gl.convert_layout(acc.to(out.dtype.element_ty), STORED)
    row = gl.arange(0, BM, layout=gl.SliceLayout(1, STORED))
    column = SIDE * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, STORED))
    packed = work.m_tile * BM + row
    mask = (packed < t.Q_LEN * t.HEADS)[:, None]
    if partials == 1:
        at = (req * t.Q_LEN + packed // t.HEADS).to(gl.int64) * stride_out
        at += (packed % t.HEADS) * stride_out_head
        gl.store(out + at[:, None] + column[None, :], values, mask=mask)
    else:
        at = ((partial * t.MT + work.m_tile).to(gl.int64) * BM + row) * RANK
        gl.store(partial_out + at[:, None] + column[None, :], values, mask=mask)


@gluon.jit
def _store_sums(
    top,
    total,
    lse,
    partial_lse,
    work,
    t,
    base2,
    req,
    partials,
    partial,
    stride_lse,
    stride_lse_head,
):
    """Store log-sum-exps: as results, or as partial ``partial``."""
    row = gl.arange(0, BM, layout=top.type.layout)
    packed = work.m_tile * BM + row
    seen = total != 0.0
    log2_sum = top * base2 + gl.log2(gl.where(seen, total, 1.0))
    if partials == 1:
        if lse is not None:
            at = (req * t.Q_LEN + packed // t.HEADS).to(gl.int64) * stride_lse
            at += (packed % t.HEADS) * stride_lse_head
            value = gl.where(seen, log2_sum * LN2, float("-inf"))
            gl.store(lse + at, value, mask=packed < t.Q_LEN * t.HEADS)
    else:
        first = (partial * t.MT + work.m_tile).to(gl.int64) * BM
        gl.store(partial_lse + first + row, gl.where(seen, log2_sum, EMPTY))


@gluon.jit
def _attend_left(
    ring,
    work,
    t,
    out,
    lse,
    tail_words,
    partial_out,
    partial_lse,
    base2,
    stride_out,
    stride_out_head,
    stride_lse,
    stride_lse_head,
    stride_words,
    stride_words_q,
):
    """Compute the weights, for `_attend_right` too; keep value columns 0 to 255."""
    rows: gl.constexpr = gl.SliceLayout(1, SCORES)
    operand: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    packed = work.m_tile * BM + gl.arange(0, BM, layout=rows)
    row_ok = packed < t.Q_LEN * t.HEADS
    left, tile, req, _base, prefix_len, partials, merge_rank = first_segment(work)
    stage = 0
    phase = 0
    q_phase = 0
    while left > 0:
        begin, end, count = bounds(tile, left, prefix_len, t)
        word_row = tail_words + req.to(gl.int64) * stride_words
        word_row = word_row + (packed // t.HEADS) * stride_words_q
        top = gl.full([BM], FLOOR, gl.float32, rows)
        total = gl.full([BM], 0.0, gl.float32, rows)
        acc = gl.zeros([BM, COLUMNS], gl.float32, VALUES)
        if begin < end:
            mbarrier.wait(ring.q_full.index(0), q_phase)
            q_phase = q_phase ^ 1
        for start in range(begin, end, BN):
            s = _score(ring, t, stage, phase, word_row, row_ok, start, end, prefix_len)
            p, fade, top, total = _soften(s, top, total, base2)
            weights = p.to(ring.latent.dtype)
            # all warps are done with the rotated keys: the weights take their place
            barrier()
            _weights_of(ring.rotated.index(stage)).store(weights)
            ring.fades.index(stage).store(fade)
            ring.totals.index(stage).store(total)
            fence_async_shared()
            barrier()
            mbarrier.arrive(ring.scored.index(stage), count=1)
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, VALUES))[:, None]
            values = ring.latent.index(stage).slice(0, COLUMNS, dim=1)
            acc = warpgroup_mma(gl.convert_layout(weights, operand), values, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ring.empty.index(stage), count=1)
            stage, phase = advance(stage, phase, t)
        partial = work.split + merge_rank
        _store(
            acc,
            total,
            out,
            partial_out,
            work,
            t,
            req,
            partials,
            partial,
            stride_out,
            stride_out_head,
            0,
        )
        _store_sums(
            top,
            total,
            lse,
            partial_lse,
            work,
            t,
            base2,
            req,
            partials,
            partial,
            stride_lse,
            stride_lse_head,
        )
        left -= count
        tile = 0
        if left > 0:
            req += 1
            _base, prefix_len, _first, partials, merge_rank = load_request(work.requests + req * 8)


@gluon.jit
def _attend_right(ring, work, t, out, partial_out, stride_out, stride_out_head):
    """Take the weights of `_attend_left`; keep value columns 256 to 511."""
    rows: gl.constexpr = gl.SliceLayout(1, VALUES)
    left, tile, req, _base, prefix_len, partials, merge_rank = first_segment(work)
    stage = 0
    phase = 0
    while left > 0:
        begin, end, count = bounds(tile, left, prefix_len, t)
        total = gl.full([BM], 0.0, gl.float32, rows)
        acc = gl.zeros([BM, COLUMNS], gl.float32, VALUES)
        for _start in range(begin, end, BN):
            mbarrier.wait(ring.scored.index(stage), phase)
            fence_async_shared()
            fade = ring.fades.index(stage).load(rows)
            total = ring.totals.index(stage).load(rows)
            acc = acc * fade[:, None]
            values = ring.latent.index(stage).slice(COLUMNS, COLUMNS, dim=1)
            weights = _weights_of(ring.rotated.index(stage))
            acc = warpgroup_mma(weights, values, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ring.empty.index(stage), count=1)
            stage, phase = advance(stage, phase, t)
        _store(
            acc,
            total,
            out,
            partial_out,
            work,
            t,
            req,
            partials,
            work.split + merge_rank,
            stride_out,
            stride_out_head,
            1,
        )
        left -= count
        tile = 0
        if left > 0:
            req += 1
            _base, prefix_len, _first, partials, merge_rank = load_request(work.requests + req * 8)


# strides of small tensors: no variants of the kernel for round ones
@gluon.jit(do_not_specialize=["stride_tail", "stride_words", "stride_words_q"])
def mla_gluon_kernel(
    q,  # [B * Q_LEN, HEADS, 576]
    cache,  # [slots, 576]
    out,  # [B * Q_LEN, HEADS, 512], out
    lse,  # [B * Q_LEN, HEADS] float32, out, or None
    indices,  # flat int32: slot of each prefix position
    tail_slots,  # [B, TAIL] int32
    tail_words,  # [B, Q_LEN, WORDS] int64
    requests,  # [B, 8] int64
    splits,  # [SPLITS, 8] int64
    partial_out,  # [partials, MT, 64, 512], out
    partial_lse,  # [partials, MT, 64] float32, out, base 2
    base2,
    q_eighth,
    q_head_eighth,  # strides of q in steps of 8 numbers: copies move 16 bytes
    stride_out,
    stride_out_head,
    stride_lse,
    stride_lse_head,
    stride_tail,
    stride_words,
    stride_words_q,
    SLOT: gl.constexpr,
    Q_LEN: gl.constexpr,
    TAIL: gl.constexpr,
    WORDS: gl.constexpr,
    HEADS: gl.constexpr,
    MT: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One CTA per (split, M tile) walks the segments of its split."""
    t = LatentConstants(TAIL, WORDS, Q_LEN, HEADS, MT, STAGES)
    ring = make_ring(cache.dtype.element_ty, t)
    pid = gl.program_id(0)
    work = Work(pid // MT, pid % MT, requests, splits)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _attend_left,
                (
                    ring,
                    work,
                    t,
                    out,
                    lse,
                    tail_words,
                    partial_out,
                    partial_lse,
                    base2,
                    stride_out,
                    stride_out_head,
                    stride_lse,
                    stride_lse_head,
                    stride_words,
                    stride_words_q,
                ),
            ),
            (_attend_right, (ring, work, t, out, partial_out, stride_out, stride_out_head)),
            (
                produce,
                (
                    ring,
                    work,
                    t,
                    q,
                    cache,
                    indices,
                    tail_slots,
                    q_eighth,
                    q_head_eighth,
                    stride_tail,
                    SLOT,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGS, PRODUCER_REGS],
    )
