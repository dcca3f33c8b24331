"""Ring of latent tiles of `gluon`, its producer, and a split's segments."""

# no postponed annotations: aggregates read the types of their fields
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from specattn.kernels.attention.gluon_ring import advance, record
from specattn.kernels.attention.splits import load_request
from specattn.kernels.gluon_names import async_load

RANK = gl.constexpr(512)
ROPE = gl.constexpr(64)
# query rows and keys of a tile
BM = gl.constexpr(64)
BN = gl.constexpr(64)


@record
class LatentConstants:
    """Constants of a launch."""

    TAIL: gl.constexpr
    WORDS: gl.constexpr
    Q_LEN: gl.constexpr
    HEADS: gl.constexpr
    MT: gl.constexpr
    STAGES: gl.constexpr


@record
class Work:
    """The CTA's place, and the plan."""

    split: gl.tensor
    m_tile: gl.tensor
    requests: gl.tensor
    splits: gl.tensor


@record
class LatentRing:
    """Tiles in shared memory, their barriers, and what consumers tell each other."""

    latent: gl.shared_memory_descriptor  # [STAGES, BN, RANK]
    rotated: gl.shared_memory_descriptor  # [STAGES, BN, ROPE]
    full: gl.shared_memory_descriptor  # [STAGES, 1]
    empty: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor
    fades: gl.shared_memory_descriptor  # [STAGES, BM]
    totals: gl.shared_memory_descriptor
    q_latent: gl.shared_memory_descriptor  # [1, BM, RANK]
    q_rotated: gl.shared_memory_descriptor  # [1, BM, ROPE]
    q_full: gl.shared_memory_descriptor  # [1, 1]
    q_empty: gl.shared_memory_descriptor


@gluon.jit
def make_ring(dtype: gl.constexpr, t):
    """Allocate the ring and set its barriers up."""
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, RANK], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, ROPE], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = LatentRing(
        gl.allocate_shared_memory(dtype, [t.STAGES, BN, RANK], wide),
        gl.allocate_shared_memory(dtype, [t.STAGES, BN, ROPE], narrow),
        gl.allocate_shared_memory(gl.int64, [t.STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [t.STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [t.STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.float32, [t.STAGES, BM], plain),
        gl.allocate_shared_memory(gl.float32, [t.STAGES, BM], plain),
        gl.allocate_shared_memory(dtype, [1, BM, RANK], wide),
        gl.allocate_shared_memory(dtype, [1, BM, ROPE], narrow),
        gl.allocate_shared_memory(gl.int64, [1, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [1, 1], barrier),
    )
    for stage in gl.static_range(t.STAGES):
        mbarrier.init(ring.full.index(stage), count=128)
        mbarrier.init(ring.empty.index(stage), count=2)
        mbarrier.init(ring.scored.index(stage), count=1)
    mbarrier.init(ring.q_full.index(0), count=128)
    mbarrier.init(ring.q_empty.index(0), count=1)
    fence_async_shared()
    return ring


@gluon.jit
def first_segment(work):
    """Load a split's tiles and first segment: tile, request, its numbers."""
    entry = work.splits + work.split * 8
    left = gl.load(entry).to(gl.int32)
    tile = gl.load(entry + 1).to(gl.int32)
    req = gl.load(entry + 2).to(gl.int32)
    base, prefix_len, _, partials, merge_rank = load_request(entry + 3)
    return left, tile, req, base, prefix_len, partials, merge_rank


@gluon.jit
def bounds(tile, left, prefix_len, t):
    """Return a segment's first key, end of keys, and its 1+ tiles."""
    kv_len = prefix_len + t.TAIL
    stop = gl.minimum(gl.maximum((kv_len + BN - 1) // BN, 1), tile + left)
    return tile * BN, gl.minimum(kv_len, stop * BN), stop - tile


@gluon.jit
def _load_slots(index_row, tail_row, pos, prefix_len, t):
    """Load slots of key positions; those past the last repeat it."""
    pos = gl.minimum(pos, prefix_len + t.TAIL - 1)
    slots = gl.load(index_row + pos, mask=pos < prefix_len, other=0)
    return slots + gl.load(tail_row + (pos - prefix_len), mask=pos >= prefix_len, other=0)


@gluon.jit
def _copy_rows(rows, mask, latent, rotated, full):
    """Copy rows ``[n, 1]`` of 576 numbers, and tell the barrier."""
    layout: gl.constexpr = rows.type.layout
    d = gl.arange(0, RANK, layout=gl.SliceLayout(0, layout))[None, :]
    r = gl.arange(0, ROPE, layout=gl.SliceLayout(0, layout))[None, :]
    async_load(rotated, rows + RANK + r, mask=mask)
    async_load(latent, rows + d, mask=mask)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def produce(
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
    SLOT: gl.constexpr,
):
    """Gather the latent rows and queries of all the split's segments."""
    # a warp copies 128 contiguous bytes of 4 rows at a time: few addresses, no bank conflicts
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    packed = work.m_tile * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    left, tile, req, base, prefix_len, _parts, _rank = first_segment(work)
    stage = 0
    phase = 1
    q_phase = 1
    while left > 0:
        begin, end, count = bounds(tile, left, prefix_len, t)
        index_row = indices + base
        tail_row = tail_slots + req.to(gl.int64) * stride_tail
        if begin < end:
            slots = _load_slots(index_row, tail_row, begin + r, prefix_len, t)
            for start in range(begin, end, BN):
                rows = cache + (slots.to(gl.int64) * SLOT)[:, None]
                if start + BN < end:
                    slots = _load_slots(index_row, tail_row, start + BN + r, prefix_len, t)
                mbarrier.wait(ring.empty.index(stage), phase)
                _copy_rows(
                    rows,
                    None,
                    ring.latent.index(stage),
                    ring.rotated.index(stage),
                    ring.full.index(stage),
                )
                if start == begin:
                    # after a tile, which need not wait for the last segment's queries
                    at = (req * t.Q_LEN + packed // t.HEADS).to(gl.int64) * q_eighth
                    at = (at + (packed % t.HEADS) * q_head_eighth) * 8
                    mbarrier.wait(ring.q_empty.index(0), q_phase)
                    q_phase = q_phase ^ 1
                    _copy_rows(
                        q + at[:, None],
                        (packed < t.Q_LEN * t.HEADS)[:, None],
                        ring.q_latent.index(0),
                        ring.q_rotated.index(0),
                        ring.q_full.index(0),
                    )
                stage, phase = advance(stage, phase, t)
        left -= count
        tile = 0
        if left > 0:
            req += 1
            base, prefix_len, _first, _parts, _rank = load_request(work.requests + req * 8)
    async_copy.wait_group(0)
