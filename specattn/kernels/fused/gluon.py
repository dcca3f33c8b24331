"""Gluon kernels multiply few rows by a large weight on Hopper.

Weights are read once and are all that costs time, so they are streamed: one warp brings tiles of
them by TMA, another the few rows, and a warpgroup multiplies weights (as the left factor of
``wgmma``, 64 rows at a time) by these. As a programmatic dependent launch it fills its ring with
weights while the kernel that writes the rows still runs.

Functions pass tuples on: ``boxes``, the descriptors of the weights; the ``ring``, weights and rows
in shared memory, and barriers for weights that came, rows that came, and stages that are free; a
CTA's ``share``, its first step, steps per tile, tiles; and what products go ``to``: tensor, rows,
columns, row stride.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.gluon_names import tma_load


@gluon.jit
def make_ring(w, x, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Return stages of shared memory, and barriers that say what they hold.

    A stage's weights came, its rows of x are there, and all ``CONSUMERS`` have read both.
    """
    came = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(came.index(stage), count=1)
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    fence_async_shared()
    return w, x, came, full, free


@gluon.jit
def _bring_weights(boxes, w, barrier, half, row, k, STEP: gl.constexpr):
    """Bring ``STEP`` rows of weights by TMA, in three boxes."""
    w32, w16, w8 = boxes
    for z in gl.static_range(STEP // 32):
        tma_load(w32, [row + z * 32, k], barrier, w.index(half).slice(z * 32, 32))
    if STEP % 32 >= 16:
        at: gl.constexpr = STEP // 32 * 32
        tma_load(w16, [row + at, k], barrier, w.index(half).slice(at, 16))
    if STEP % 16 >= 8:
        last: gl.constexpr = STEP // 16 * 16
        tma_load(w8, [row + last, k], barrier, w.index(half).slice(last, 8))


@gluon.jit
def bring(
    boxes, ring, low, high, k, step, STEP: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr
):
    """Bring both halves of a step's weights, from column ``k`` on."""
    w, _, came, _, _ = ring
    BYTES: gl.constexpr = w.dtype.primitive_bitwidth // 8
    stage = step % STAGES
    barrier = came.index(stage)
    mbarrier.expect(barrier, 2 * STEP * BK * BYTES)
    _bring_weights(boxes, w, barrier, stage * 2, low, k, STEP)
    _bring_weights(boxes, w, barrier, stage * 2 + 1, high, k, STEP)


@gluon.jit
def produce_weights(
    boxes,
    ring,
    share,
    low,
    high,
    apart,
    STEP: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PACE: gl.constexpr,
    MANY: gl.constexpr,
):
    """Bring the weights of the CTA's tiles after the first ``PACE`` steps.

    The tiles are ``apart`` rows from each other. Until the ring is full, ``PACE`` tiles are on
    their way at a time: kernels before this one still load their operands, which come behind all
    that has been asked for.
    """
    _, _, came, _, free = ring
    begin, count, turns = share
    for step in range(gl.minimum(count, PACE), count * turns):
        if step >= STAGES:
            mbarrier.wait(free.index(step % STAGES), (step // STAGES + 1) & 1)
        elif step >= PACE:
            mbarrier.wait(came.index(step - PACE), 0)
        row = 0
        at = step
        if MANY:
            row = step // count * apart
            at = step % count
        k = (begin + at) * BK
        bring(boxes, ring, low + row, high + row, k, step, STEP, BK, STAGES)


@gluon.jit
def produce_rows(
    rows,
    ring,
    share,
    BT: gl.constexpr,
    BOX: gl.constexpr,
    BOXES: gl.constexpr,
    BK: gl.constexpr,
    TERMS: gl.constexpr,
    STAGES: gl.constexpr,
    MANY: gl.constexpr,
):
    """Bring the rows of x once the previous kernel is complete.

    Rows of a tile that no box brings are multiplied, but never stored. Of several terms each has a
    tile of BT rows, and whole boxes of ``rows``.
    """
    _, x, _, full, free = ring
    BYTES: gl.constexpr = x.dtype.primitive_bitwidth // 8
    begin, count, turns = share
    gdc_wait()
    for step in range(count * turns):
        stage = step % STAGES
        if step >= STAGES:
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
        barrier = full.index(stage)
        mbarrier.expect(barrier, TERMS * BOXES * BOX * BK * BYTES)
        at = step
        if MANY:
            at = step % count
        k = (begin + at) * BK
        for term in gl.static_range(TERMS):
            for z in gl.static_range(BOXES):
                to = x.index(stage).slice(term * BT + z * BOX, BOX)
                tma_load(rows, [(term * BOXES + z) * BOX, k], barrier, to)


@gluon.jit
def store_tile(
    to,
    values,
    first,
    step,
    BT: gl.constexpr,
    layout: gl.constexpr,
    FROM: gl.constexpr = 0,
):
    """Store ``step`` of a tile's rows as columns from ``first`` on.

    Its columns are the rows of x from ``FROM`` on.
    """
    out, tokens, width, stride_row = to
    HEIGHT: gl.constexpr = values.shape[0]
    token = FROM + gl.arange(0, BT, layout=gl.SliceLayout(0, layout))  # [BT]
    row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))  # [H]
    column = first + row
    ok = (token < tokens)[None, :] & ((row < step) & (column < width))[:, None]
    at = out + (token.to(gl.int64) * stride_row)[None, :] + column[:, None]
    gl.store(at, gl.convert_layout(values.to(out.dtype.element_ty), layout), mask=ok)


@gluon.jit
def _consume(
    to,
    ring,
    share,
    tile,
    others,
    STEP: gl.constexpr,
    BT: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Multiply, and store tile after tile, ``others`` apart."""
    w, x, came, full, free = ring
    _, count, turns = share
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    across: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    for turn in range(turns):
        low = gl.zeros([64, BT], gl.float32, layout)
        high = gl.zeros([64, BT], gl.float32, layout)
        for step in range(turn * count, turn * count + count):
            stage = step % STAGES
            mbarrier.wait(came.index(stage), (step // STAGES) & 1)
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            right = x.index(stage).permute((1, 0))
            low_next = warpgroup_mma(w.index(stage * 2), right, low, is_async=True)
            high_next = warpgroup_mma(w.index(stage * 2 + 1), right, high, is_async=True)
            low, high = warpgroup_mma_wait(0, deps=[low_next, high_next])
            mbarrier.arrive(free.index(stage), count=1)
        if GATED:
            low = low / (1.0 + gl.exp(-low)) * high
            store_tile(to, low, tile * STEP, STEP, BT, across)
        else:
            first = tile * (2 * STEP)
            store_tile(to, low, first, STEP, BT, across)
            store_tile(to, high, first + STEP, STEP, BT, across)
        tile += others


@gluon.jit(do_not_specialize=["tokens"])
def gluon_linear_kernel(
    w32,
    w16,
    w8,  # descriptors of the weights [N, K], boxes of so many rows by BK
    rows,  # descriptor of [T, K], boxes [BOX, BK]
    out,  # [SPLIT, T, N]; with GATED [T, N / 2]
    tokens,
    width,
    steps,
    stride_part,
    stride_row,
    STEP: gl.constexpr,
    BT: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    BOX: gl.constexpr,
    BOXES: gl.constexpr,
    SPLIT: gl.constexpr,
    GATED: gl.constexpr,
    PACE: gl.constexpr,
    MANY: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Multiply a CTA's rows of weights by x over its K share.

    A CTA takes 2 STEP rows of the weights (GATED: STEP and those they gate) and a share of K. With
    ``MANY`` there are fewer CTAs than such tiles: each takes several, and reads on in between.
    """
    SIZE: gl.constexpr = STEP if GATED else 2 * STEP
    gdc_launch_dependents()
    tile = gl.program_id(0) // SPLIT
    others = 0
    turns = 1
    if MANY:
        others = gl.num_programs(0) // SPLIT
        turns = (width + SIZE * others - 1 - tile * SIZE) // (SIZE * others)
    part = gl.program_id(0) % SPLIT
    begin = part * steps // SPLIT
    count = (part + 1) * steps // SPLIT - begin
    low = tile * SIZE
    high = low + (width if GATED else STEP)
    w_layout: gl.constexpr = w32.layout
    x_layout: gl.constexpr = rows.layout
    w = gl.allocate_shared_memory(w32.dtype, [STAGES * 2, 64, BK], w_layout)
    x = gl.allocate_shared_memory(w32.dtype, [STAGES, BT, BK], x_layout)
    # what passes between warps, and what they share of the work
    boxes, ring = (w32, w16, w8), make_ring(w, x, 1, STAGES)
    share = begin, count, turns
    # the warps that take over need most of a microsecond to start
    for step in range(gl.minimum(count, PACE)):
        bring(boxes, ring, low, high, (begin + step) * BK, step, STEP, BK, STAGES)
    to = out + part.to(gl.int64) * stride_part, tokens, width, stride_row
    apart = others * SIZE
    gl.warp_specialize(
        [
            (_consume, (to, ring, share, tile, others, STEP, BT, STAGES, GATED)),
            (
                produce_weights,
                (boxes, ring, share, low, high, apart, STEP, BK, STAGES, PACE, MANY),
            ),
            (produce_rows, (rows, ring, share, BT, BOX, BOXES, BK, 1, STAGES, MANY)),
        ],
        [1, 1],
        [PRODUCER_REGS, PRODUCER_REGS],
    )
