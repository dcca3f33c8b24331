"""Device code of prompt attention for Hopper: `extend_attention`, in Gluon.

A producer warpgroup and two consumers share the tiles of one block of rows; see `gluon_tile`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from specattn.kernels.attention.gluon_tile import (
    Factors,
    Pools,
    Tile,
    attend,
    convert,
    make_raw_ring,
    make_ring,
    produce,
    record,
    start,
)
from specattn.kernels.attention.triton_tile import LN2


@record
class ExtendConstants:
    """Constants of a launch besides those of its tiles."""

    GROUP: gl.constexpr
    Q_TOKEN: gl.constexpr
    Q_HEAD: gl.constexpr
    OUT_TOKEN: gl.constexpr
    OUT_HEAD: gl.constexpr
    HAS_LSE: gl.constexpr
    LSE_TOKEN: gl.constexpr
    LSE_HEAD: gl.constexpr


@record
class Place:
    """The CTA's block of rows, and the batch it is of."""

    head: gl.tensor
    req: gl.tensor
    block: gl.tensor
    qo_indptr: gl.tensor
    seq_lens: gl.tensor


@gluon.jit
def _block(place, c, t):
    """Return a request's first row and tokens, prefix, first and last position."""
    BM: gl.constexpr = t.GROUPS * 64
    q_begin = gl.load(place.qo_indptr + place.req)
    q_len = gl.load(place.qo_indptr + place.req + 1) - q_begin
    prefix = gl.load(place.seq_lens + place.req)
    first_pos = prefix + place.block * BM // c.GROUP
    last_pos = prefix + gl.minimum((place.block * BM + BM - 1) // c.GROUP, q_len - 1)
    return q_begin, q_len, prefix, first_pos, last_pos


@gluon.jit
def _key_range(place, q_len, first_pos, last_pos, c, t):
    """Return first visible key, first tile's key and tiles; 0 without rows."""
    first_key = 0
    if t.WINDOW >= 0:
        first_key = gl.maximum(first_pos - t.WINDOW, 0)
    begin = first_key // t.BN * t.BN
    has_rows = place.block * t.GROUPS * 64 < q_len * c.GROUP
    return first_key, begin, gl.where(has_rows, (last_pos - begin) // t.BN + 1, 0)


@gluon.jit
def _produce(ring, t, c, place, pools, table_row):
    _, q_len, _, first_pos, last_pos = _block(place, c, t)
    first_key, begin, count = _key_range(place, q_len, first_pos, last_pos, c, t)
    produce(
        ring,
        t,
        pools,
        place.head,
        table_row,
        table_row,
        begin,
        count,
        first_key,
        last_pos + 1,
        gl.to_tensor(0),
        gl.to_tensor(1),
    )
    async_copy.wait_group(0)


@gluon.jit
def _convert(raw, ring, raw_t, t, c, place, WARPS: gl.constexpr, VALUES: gl.constexpr):
    _, q_len, _, first_pos, last_pos = _block(place, c, t)
    _, _, count = _key_range(place, q_len, first_pos, last_pos, c, t)
    convert(raw, ring, raw_t, t, count, WARPS, VALUES)


@gluon.jit
def _consume(ring, t, c, place, q, out, lse, sinks, factors, WG: gl.constexpr):
    """Attend with 64 packed rows: (token, head of the group)."""
    HEAD_DIM: gl.constexpr = t.HEAD_DIM
    GROUP: gl.constexpr = c.GROUP
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, t.BN, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q_begin, q_len, prefix, first_pos, last_pos = _block(place, c, t)
    _, begin, count = _key_range(place, q_len, first_pos, last_pos, c, t)
    if count > 0:
        rows = q_len * GROUP
        row0 = place.block * t.GROUPS * 64 + WG * 64
        q_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, loads))  # [64], packed rows
        s_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
        o_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, values))
        q_col = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, loads))
        o_col = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, values))
        q_tile = ring.q.index(WG)
        at = (q_begin + q_row // GROUP).to(gl.int64) * c.Q_TOKEN
        at += (place.head * GROUP + q_row % GROUP) * c.Q_HEAD
        queries = gl.load(q + at[:, None] + q_col[None, :], mask=(q_row < rows)[:, None], other=0.0)
        q_tile.store(queries.to(q_tile.dtype))
        fence_async_shared()
        pos_q = prefix + gl.minimum(s_row // GROUP, q_len - 1)
        clear_from = 0
        if t.WINDOW >= 0:
            clear_from = last_pos - t.WINDOW
        top, total = start(sinks, place.head * GROUP + s_row % GROUP, True, factors, t)
        acc, _total, log2_sum, _, _ = attend(
            ring,
            t,
            q_tile,
            begin,
            last_pos + 1,
            count,
            clear_from,
            first_pos + 1,
            0,
            place.seq_lens,
            s_row < rows,
            place.seq_lens,
            pos_q,
            factors,
            top,
            total,
            gl.to_tensor(0),
            gl.to_tensor(0),
        )
        at = (q_begin + o_row // GROUP).to(gl.int64) * c.OUT_TOKEN
        at += (place.head * GROUP + o_row % GROUP) * c.OUT_HEAD
        gl.store(
            out + at[:, None] + o_col[None, :],
            acc.to(out.dtype.element_ty),
            mask=(o_row < rows)[:, None],
        )
        if c.HAS_LSE:
            # every row sees itself: the sum is above 0
            at = (q_begin + s_row // GROUP).to(gl.int64) * c.LSE_TOKEN
            at += (place.head * GROUP + s_row % GROUP) * c.LSE_HEAD
            gl.store(lse + at, log2_sum * LN2, mask=s_row < rows)


@gluon.jit(do_not_specialize=["stride_table", "batch"])
def gluon_extend_kernel(
    q,  # [T, Hq, HEAD_DIM]
    k_cache,  # [slots, NUM_KV, HEAD_DIM]
    v_cache,  # [slots, NUM_KV, HEAD_DIM]
    out,  # [T, Hq, HEAD_DIM], out
    lse,  # [T, Hq] float32, out, or anything without HAS_LSE
    qo_indptr,  # [B + 1] int32
    seq_lens,  # [B] int32
    req_pool_indices,  # [B] int64
    req_to_token,  # [rows, C] int32
    sinks,  # [Hq] natural logits, or None
    k_pages,  # descriptors of [slots, NUM_KV * HEAD_DIM] with PAGE > 1, or anything
    v_pages,
    base2,
    cap_in,
    cap_out,
    v_scale,
    stride_table,
    batch,
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
    WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_LSE: gl.constexpr,
    GROUP: gl.constexpr,
    NUM_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    GROUPS: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    PRODUCERS: gl.constexpr,
    RAW: gl.constexpr,
    CONVERTERS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    CONVERTER_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
):
    """One CTA per (block of packed rows, request, KV head)."""
    FLOAT8: gl.constexpr = RAW > 0
    t = Tile(0, 0, WINDOW, True, HAS_CAP, HEAD_DIM, GROUPS, BN, STAGES, PAGE, PRODUCERS, False, "")
    c = ExtendConstants(GROUP, Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, HAS_LSE, LSE_TOKEN, LSE_HEAD)
    pools = Pools(k_cache, v_cache, k_pages, v_pages, K_SLOT, K_HEAD, V_SLOT, V_HEAD)
    factors = Factors(base2, cap_in, cap_out, v_scale, FLOAT8)
    pid = gl.program_id(0)
    req = pid // NUM_KV % batch
    # the last blocks have most keys: they start first
    block = (gl.num_programs(0) - 1 - pid) // (NUM_KV * batch)
    place = Place(pid % NUM_KV, req, block, qo_indptr, seq_lens)
    table_row = req_to_token + gl.load(req_pool_indices + req) * stride_table
    if FLOAT8:
        # what the producer fills is another ring
        raw_t = Tile(
            0, 0, WINDOW, True, HAS_CAP, HEAD_DIM, GROUPS, BN, RAW, 1, PRODUCERS, False, ""
        )
        ring = make_ring(gl.float16, t, 1)
        raw = make_raw_ring(k_cache.dtype.element_ty, raw_t)
        gl.warp_specialize(
            [
                (_consume, (ring, t, c, place, q, out, lse, sinks, factors, 0)),
                (_consume, (ring, t, c, place, q, out, lse, sinks, factors, 1)),
                (_convert, (raw, ring, raw_t, t, c, place, CONVERTERS, False)),
                (_convert, (raw, ring, raw_t, t, c, place, CONVERTERS, True)),
                (_produce, (raw, raw_t, c, place, pools, table_row)),
            ],
            [4, CONVERTERS, CONVERTERS, PRODUCERS],
            [CONSUMER_REGS, CONVERTER_REGS, CONVERTER_REGS, PRODUCER_REGS],
        )
    else:
        ring = make_ring(k_cache.dtype.element_ty, t, PRODUCERS * 32 if PAGE == 1 else 1)
        gl.warp_specialize(
            [
                (_consume, (ring, t, c, place, q, out, lse, sinks, factors, 0)),
                (_consume, (ring, t, c, place, q, out, lse, sinks, factors, 1)),
                (_produce, (ring, t, c, place, pools, table_row)),
            ],
            [4, PRODUCERS],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
