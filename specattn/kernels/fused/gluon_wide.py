"""A Gluon kernel multiplies and gates 129 to 160 rows on Hopper.

Weights are streamed as in `specattn.kernels.fused.gluon`, whose warps bring them, too. Tiles have
powers of two, so rows of x lie in two: the first BT, and MORE of them.

A CTA reads all of x for each of its tiles, so it takes all of its weights at once: 64 gates and
what they gate for one warpgroup, few more for another. A warpgroup multiplies 64 rows of weights at
a time, so the tile of the second one is mixed: eight gates, the eight rows that they gate, eight
gates and so on. A thread has the sums of both.

Beside what functions pass on there, ``wide`` are the further rows of x and the mixed tiles in
shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specattn.kernels.fused.gluon import bring, make_ring, produce_weights, store_tile
from specattn.kernels.gluon_names import tma_load


@gluon.jit
def _bring_mixed(boxes, ring, wide, low, high, k, stage, BYTES: gl.constexpr, MIXED: gl.constexpr):
    """Bring a mixed tile; expect ``BYTES`` in all."""
    barrier = ring[3].index(stage)
    mbarrier.expect(barrier, BYTES)
    to = wide[1].index(stage)
    for z in gl.static_range(MIXED // 8):
        tma_load(boxes[2], [low + z * 8, k], barrier, to.slice(z * 16, 8))
        tma_load(boxes[2], [high + z * 8, k], barrier, to.slice(z * 16 + 8, 8))


@gluon.jit
def _produce_rows(
    boxes, rows, ring, wide, steps, low, high, BOXES: gl.constexpr, MIXED: gl.constexpr
):
    """Bring mixed tiles, and rows of x once these are there.

    Rows of a tile that no box brings are multiplied, but never stored.
    """
    _, x, _, full, free = ring
    STAGES: gl.constexpr = x.shape[0]
    BT: gl.constexpr = x.shape[1]
    BK: gl.constexpr = x.shape[2]
    BOX: gl.constexpr = rows.block_shape[0]
    BYTES: gl.constexpr = (BOXES * BOX + 2 * MIXED) * BK * (x.dtype.primitive_bitwidth // 8)
    ahead = gl.minimum(steps, STAGES)
    # a ring's worth of weights does not wait
    for step in range(ahead):
        _bring_mixed(boxes, ring, wide, low, high, step * BK, step, BYTES, MIXED)
    gdc_wait()
    for step in range(steps):
        stage = step % STAGES
        if step >= ahead:
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            _bring_mixed(boxes, ring, wide, low, high, step * BK, stage, BYTES, MIXED)
        barrier = full.index(stage)
        for z in gl.static_range(BOXES):
            if z * BOX < BT:
                to = x.index(stage).slice(z * BOX, BOX)
            else:
                to = wide[0].index(stage).slice(z * BOX - BT, BOX)
            tma_load(rows, [z * BOX, step * BK], barrier, to)


@gluon.jit
def _nothing(COLUMNS: gl.constexpr):
    """Return sums ``[64, COLUMNS]`` of nothing."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([64, COLUMNS], gl.float32, layout)


@gluon.jit
def _multiply(weights, ring, wide, stage, most, rest):
    """Begin to multiply a stage's rows of x by weights ``[64, BK]``."""
    most = warpgroup_mma(weights, ring[1].index(stage).permute((1, 0)), most, is_async=True)
    rest = warpgroup_mma(weights, wide[0].index(stage).permute((1, 0)), rest, is_async=True)
    return most, rest


@gluon.jit
def _store(to, gate, up, first, STEP: gl.constexpr, BT: gl.constexpr, FROM: gl.constexpr):
    """Store gated products ``[H, BT]`` of x's rows from ``FROM``."""
    LANES: gl.constexpr = gate.shape[0] // 4
    across: gl.constexpr = gl.BlockedLayout([4, 1], [LANES, 32 // LANES], [1, 4], [0, 1])
    store_tile(to, gate / (1.0 + gl.exp(-gate)) * up, first, STEP, BT, across, FROM)


@gluon.jit
def _consume(to, ring, wide, steps, first):
    """Multiply and gate 64 gates.

    While warps wait for a step's operands, the matrix units go on with the step before.
    """
    w, x, came, full, free = ring
    STAGES: gl.constexpr = x.shape[0]
    BT: gl.constexpr = x.shape[1]
    MORE: gl.constexpr = wide[0].shape[1]
    low, low_rest = _nothing(BT), _nothing(MORE)
    high, high_rest = _nothing(BT), _nothing(MORE)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(came.index(stage), (step // STAGES) & 1)
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        low, low_rest = _multiply(w.index(stage * 2), ring, wide, stage, low, low_rest)
        high, high_rest = _multiply(w.index(stage * 2 + 1), ring, wide, stage, high, high_rest)
        # all but this step's four
        low, low_rest, high, high_rest = warpgroup_mma_wait(
            4, deps=[low, low_rest, high, high_rest]
        )
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    low, low_rest, high, high_rest = warpgroup_mma_wait(0, deps=[low, low_rest, high, high_rest])
    _store(to, low, high, first, 64, BT, 0)
    _store(to, low_rest, high_rest, first, 64, MORE, BT)


@gluon.jit
def _parted(sums):
    """Part a mixed tile's sums ``[64, T]``, by row of weights.

    Returns those of gates and those that they gate, ``[32, T]``.
    """
    COLUMNS: gl.constexpr = sums.shape[1]
    gate, up = gl.split(sums.reshape([4, 2, 8, COLUMNS]).permute((0, 2, 3, 1)))
    return gate.reshape([32, COLUMNS]), up.reshape([32, COLUMNS])


@gluon.jit
def _consume_mixed(to, ring, wide, steps, first, MIXED: gl.constexpr):
    """Multiply and gate mixed tiles, which come with the rows of x."""
    _, x, _, full, free = ring
    STAGES: gl.constexpr = x.shape[0]
    BT: gl.constexpr = x.shape[1]
    MORE: gl.constexpr = wide[0].shape[1]
    most, rest = _nothing(BT), _nothing(MORE)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        most, rest = _multiply(wide[1].index(stage), ring, wide, stage, most, rest)
        most, rest = warpgroup_mma_wait(0, deps=[most, rest])
        mbarrier.arrive(free.index(stage), count=1)
    gate, up = _parted(most)
    _store(to, gate, up, first, MIXED, BT, 0)
    gate, up = _parted(rest)
    _store(to, gate, up, first, MIXED, MORE, BT)


@gluon.jit(do_not_specialize=["tokens"])
def gluon_wide_gated_kernel(
    w32,
    w16,
    w8,  # descriptors of the weights [2 N, K], boxes of so many rows by BK
    rows,  # descriptor of [T, K], boxes [BOX, BK]
    out,  # [T, N]
    tokens,
    width,
    steps,
    stride_row,
    MIXED: gl.constexpr,
    BT: gl.constexpr,
    MORE: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
    PACE: gl.constexpr,
    SIDE_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Multiply x by 64 + ``MIXED`` gates, and what they gate."""
    gdc_launch_dependents()
    low = gl.program_id(0) * (64 + MIXED)
    high = low + width
    w = gl.allocate_shared_memory(w32.dtype, [STAGES * 2, 64, BK], w32.layout)
    mixed = gl.allocate_shared_memory(w32.dtype, [STAGES, 64, BK], w32.layout)
    x = gl.allocate_shared_memory(w32.dtype, [STAGES, BT, BK], rows.layout)
    more = gl.allocate_shared_memory(w32.dtype, [STAGES, MORE, BK], rows.layout)
    boxes, wide = (w32, w16, w8), (more, mixed)
    # both warpgroups read a stage
    ring = make_ring(w, x, 2, STAGES)
    for step in range(gl.minimum(steps, PACE)):
        bring(boxes, ring, low, high, step * BK, step, 64, BK, STAGES)
    to, share = (out, tokens, width, stride_row), (0, steps, 1)
    gl.warp_specialize(
        [
            (_consume, (to, ring, wide, steps, low)),
            (_consume_mixed, (to, ring, wide, steps, low + 64, MIXED)),
            (
                produce_weights,
                (boxes, ring, share, low, high, 0, 64, BK, STAGES, PACE, False),
            ),
            (_produce_rows, (boxes, rows, ring, wide, steps, low + 64, high + 64, BOXES, MIXED)),
        ],
        [4, 1, 1],
        [SIDE_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )
