"""Gluon kernels multiply few quantised rows by a float8 weight on Hopper.

Weights are streamed as in `specattn.kernels.fused.gluon`, whose warps bring both operands, too. The
warpgroup multiplies 128 columns from nothing, since sums of float8 products keep 14 bits on Hopper,
and adds what comes out in float32: times both scales, or, where these hold for all columns, as it
is.

Beside what functions pass on there, ``scales`` are those of x, ``[G, P]``, and its row stride;
those of the weight, their row stride and the index of their last row; and room for the share's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.fused.gluon import bring, make_ring, produce_rows, produce_weights, store_tile
from specattn.kernels.gluon_names import reinterpret


@gluon.jit
def _scales_of_tile(scales, row, k, STEP: gl.constexpr, HEIGHT: gl.constexpr):
    """Load the scales of a tile's rows, in two blocks at most."""
    _, _, weight, stride, last, _ = scales
    block = gl.minimum(row // HEIGHT, last)
    one = gl.load(weight + block * stride + k)
    other = one
    if HEIGHT % STEP != 0:
        other = gl.load(weight + gl.minimum(block + 1, last) * stride + k)
    return one, other


@gluon.jit
def _for_rows(loaded, row, STEP: gl.constexpr, HEIGHT: gl.constexpr, layout: gl.constexpr):
    """Spread `_scales_of_tile` over the 64 rows of a tile."""
    one, other = loaded
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))  # [64]
    spread = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, layout)) + one
    if HEIGHT % STEP != 0:
        spread = gl.where(row + at < (row // HEIGHT + 1) * HEIGHT, spread, other)
    return spread[:, None]


@gluon.jit
def _keep_scales(scales, share, tokens, BT: gl.constexpr, KEPT: gl.constexpr):
    """Put the share's scales of x into shared memory.

    Returns a row ``[BT]`` per step. From global memory they would come too late for the steps whose
    operands are there by now.
    """
    x, stride, _, _, _, room = scales
    begin, count, _ = share
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    step = gl.arange(0, KEPT, layout=gl.SliceLayout(1, flat))  # [KEPT]
    token = gl.arange(0, BT, layout=gl.SliceLayout(0, flat))  # [BT]
    at = x + token[None, :] + (begin + step)[:, None] * stride
    room.store(gl.load(at, mask=(token < tokens)[None, :] & (step < count)[:, None], other=0.0))
    return reinterpret(room, gl.float32, [KEPT, BT], line)


@gluon.jit
def _scale_all(scales, values, row, tokens, BT: gl.constexpr, HEIGHT: gl.constexpr):
    """Multiply sums of all columns by the scales of both."""
    x, _, weight, stride, last, _ = scales
    layout: gl.constexpr = values.type.layout
    token = gl.arange(0, BT, layout=gl.SliceLayout(0, layout))  # [BT]
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))  # [64]
    of_x = gl.load(x + token, mask=token < tokens, other=0.0)
    of_w = gl.load(weight + gl.minimum((row + at) // HEIGHT, last) * stride)
    return values * (of_w[:, None] * of_x[None, :])


@gluon.jit
def _consume(
    to,
    ring,
    share,
    scales,
    tile,
    others,
    apart,
    STEP: gl.constexpr,
    BT: gl.constexpr,
    STAGES: gl.constexpr,
    KEPT: gl.constexpr,
    HEIGHT: gl.constexpr,
    GATED: gl.constexpr,
    BLOCKS: gl.constexpr,
    TERMS: gl.constexpr,
):
    """Multiply, and store tile after tile, ``others`` apart.

    The halves of a tile are ``apart`` rows from each other.
    """
    w, x, came, full, free = ring
    begin, count, turns = share
    _, tokens, _, _ = to
    SIZE: gl.constexpr = STEP if GATED else 2 * STEP
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 32])
    across: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    row = tile * SIZE
    if BLOCKS:
        # no kernel writes those of weights: a step's are loaded during the step before
        low_scale = _scales_of_tile(scales, row, begin, STEP, HEIGHT)
        high_scale = _scales_of_tile(scales, row + apart, begin, STEP, HEIGHT)
    gdc_wait()
    of_step = x
    if BLOCKS:
        of_step = _keep_scales(scales, share, tokens, BT, KEPT)
    for turn in range(turns):
        row = tile * SIZE
        if BLOCKS:  # noqa: SIM102 - a constant, without which nothing of this is compiled
            if turn > 0:
                low_scale = _scales_of_tile(scales, row, begin, STEP, HEIGHT)
                high_scale = _scales_of_tile(scales, row + apart, begin, STEP, HEIGHT)
        low = gl.zeros([64, BT], gl.float32, layout)
        high = gl.zeros([64, BT], gl.float32, layout)
        nothing = gl.zeros([64, BT], gl.float32, layout)
        for at in range(count):
            step = turn * count + at
            stage = step % STAGES
            mbarrier.wait(came.index(stage), (step // STAGES) & 1)
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            w_low, w_high = w.index(stage * 2), w.index(stage * 2 + 1)
            right = x.index(stage).slice(0, BT).permute((1, 0))
            low_part = warpgroup_mma(w_low, right, nothing, use_acc=False, is_async=True)
            high_part = warpgroup_mma(w_high, right, nothing, use_acc=False, is_async=True)
            if TERMS == 2:
                second = x.index(stage).slice(BT, BT).permute((1, 0))
                low_rest = warpgroup_mma(w_low, second, nothing, use_acc=False, is_async=True)
                high_rest = warpgroup_mma(w_high, second, nothing, use_acc=False, is_async=True)
            if BLOCKS:
                # while they multiply
                of_x = of_step.index(at).load(gl.SliceLayout(0, layout))[None, :]
                low_factor = _for_rows(low_scale, row, STEP, HEIGHT, layout) * of_x
                high_factor = _for_rows(high_scale, row + apart, STEP, HEIGHT, layout) * of_x
                k = begin + gl.minimum(at + 1, count - 1)
                low_scale = _scales_of_tile(scales, row, k, STEP, HEIGHT)
                high_scale = _scales_of_tile(scales, row + apart, k, STEP, HEIGHT)
            if TERMS == 2:
                low_part, high_part, low_rest, high_rest = warpgroup_mma_wait(
                    0, deps=[low_part, high_part, low_rest, high_rest]
                )
                low_part += low_rest * 0.0625
                high_part += high_rest * 0.0625
            else:
                low_part, high_part = warpgroup_mma_wait(0, deps=[low_part, high_part])
            mbarrier.arrive(free.index(stage), count=1)
            if BLOCKS:
                low_part *= low_factor
                high_part *= high_factor
            low += low_part
            high += high_part
        if not BLOCKS:
            low = _scale_all(scales, low, row, tokens, BT, HEIGHT)
            high = _scale_all(scales, high, row + apart, tokens, BT, HEIGHT)
        if GATED:
            low = low / (1.0 + gl.exp(-low)) * high
            store_tile(to, low, row, STEP, BT, across)
        else:
            store_tile(to, low, row, STEP, BT, across)
            store_tile(to, high, row + STEP, STEP, BT, across)
        tile += others


@gluon.jit(do_not_specialize=["tokens"])
def gluon_scaled_linear_kernel(
    w32,
    w16,
    w8,  # descriptors of the weights [N, K] e4m3, boxes of so many rows by 128
    rows,  # descriptor of [TERMS * BOXES * BOX, K] e4m3, boxes [BOX, 128]
    out,  # [SPLIT, T, N]; with GATED [T, N / 2]
    x_scale,  # [K / 128, P] float32; [1, P] unless BLOCKS
    w_scale,  # [ceil(N / HEIGHT), K / 128] float32; [.., 1] unless BLOCKS
    tokens,
    width,
    steps,
    last,
    stride_part,
    stride_row,
    stride_xs,
    stride_ws,
    STEP: gl.constexpr,
    BT: gl.constexpr,
    STAGES: gl.constexpr,
    KEPT: gl.constexpr,
    HEIGHT: gl.constexpr,
    BOX: gl.constexpr,
    BOXES: gl.constexpr,
    SPLIT: gl.constexpr,
    GATED: gl.constexpr,
    BLOCKS: gl.constexpr,
    TERMS: gl.constexpr,
    PACE: gl.constexpr,
    MANY: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Multiply a CTA's rows of weights by x over its K share.

    CTAs take what those of `gluon_linear_kernel` take. Blocks are at least as high as STEP.
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
    apart = width if GATED else STEP
    low = tile * SIZE
    high = low + apart
    w = gl.allocate_shared_memory(w32.dtype, [STAGES * 2, 64, 128], w32.layout)
    x = gl.allocate_shared_memory(w32.dtype, [STAGES, TERMS * BT, 128], rows.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    room = gl.allocate_shared_memory(gl.float32, [KEPT, BT], plain)
    boxes, ring = (w32, w16, w8), make_ring(w, x, 1, STAGES)
    share = begin, count, turns
    for step in range(gl.minimum(count, PACE)):
        bring(boxes, ring, low, high, (begin + step) * 128, step, STEP, 128, STAGES)
    to = out + part.to(gl.int64) * stride_part, tokens, width, stride_row
    scales = x_scale, stride_xs, w_scale, stride_ws, last, room
    between = others * SIZE
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    to,
                    ring,
                    share,
                    scales,
                    tile,
                    others,
                    apart,
                    STEP,
                    BT,
                    STAGES,
                    KEPT,
                    HEIGHT,
                    GATED,
                    BLOCKS,
                    TERMS,
                ),
            ),
            (
                produce_weights,
                (boxes, ring, share, low, high, between, STEP, 128, STAGES, PACE, MANY),
            ),
            (produce_rows, (rows, ring, share, BT, BOX, BOXES, 128, TERMS, STAGES, MANY)),
        ],
        [1, 1],
        [PRODUCER_REGS, PRODUCER_REGS],
    )
