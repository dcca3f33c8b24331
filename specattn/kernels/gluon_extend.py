"""Device code of prompt attention for Hopper, in Gluon: the contract of `extend_attention`.

A producer warpgroup and two consumers share the tiles of one block of rows; see `gluon_tile`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from specattn.kernels.attention_tile import LN2
from specattn.kernels.gluon_tile import Tile, attend, make_ring, produce


@gluon.jit
def _block(qo_indptr, seq_lens, req, block, GROUP: gl.constexpr, BM: gl.constexpr):
    """First query row and tokens of the request; prefix, first and last position of the block."""
    q_begin = gl.load(qo_indptr + req)
    q_len = gl.load(qo_indptr + req + 1) - q_begin
    prefix = gl.load(seq_lens + req)
    first_pos = prefix + block * BM // GROUP
    last_pos = prefix + gl.minimum((block * BM + BM - 1) // GROUP, q_len - 1)
    return q_begin, q_len, prefix, first_pos, last_pos


@gluon.jit
def _key_range(first_pos, last_pos, t):
    """First visible key, first tile's key and number of tiles of a block of rows."""
    first_key = 0
    if t.WINDOW >= 0:
        first_key = gl.maximum(first_pos - t.WINDOW, 0)
    begin = first_key // t.BN * t.BN
    return first_key, begin, (last_pos - begin) // t.BN + 1


@gluon.jit
def _produce(
    ring, t, k_cache, v_cache, k_pages, v_pages, qo_indptr, seq_lens, table_row, head, req, block,
    K_SLOT: gl.constexpr, K_HEAD: gl.constexpr, V_SLOT: gl.constexpr, V_HEAD: gl.constexpr,
    GROUP: gl.constexpr,
):
    BM: gl.constexpr = t.GROUPS * 64
    _, q_len, _, first_pos, last_pos = _block(qo_indptr, seq_lens, req, block, GROUP, BM)
    if block * BM < q_len * GROUP:
        first_key, begin, count = _key_range(first_pos, last_pos, t)
        produce(
            ring, t, k_cache, v_cache, k_pages, v_pages, head, table_row, table_row, begin, count,
            first_key, last_pos + 1, gl.to_tensor(0), gl.to_tensor(1), K_SLOT, K_HEAD, V_SLOT,
            V_HEAD,
        )
    async_copy.wait_group(0)


@gluon.jit
def _consume(
    ring, t, q, out, lse, qo_indptr, seq_lens, head, req, block, base2, cap_in, cap_out,
    v_scale, Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr, LSE_TOKEN: gl.constexpr, LSE_HEAD: gl.constexpr,
    HAS_LSE: gl.constexpr, GROUP: gl.constexpr, WG: gl.constexpr,
):
    """Attend with the 64 packed rows of warpgroup ``WG``; a row is (token, head of the group)."""
    HEAD_DIM: gl.constexpr = t.HEAD_DIM
    BM: gl.constexpr = t.GROUPS * 64
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, t.BN, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q_begin, q_len, prefix, first_pos, last_pos = _block(
        qo_indptr, seq_lens, req, block, GROUP, BM
    )
    rows = q_len * GROUP
    if block * BM < rows:
        row0 = block * BM + WG * 64
        q_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, loads))  # [64], packed rows
        s_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
        o_row = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, values))
        q_col = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, loads))
        o_col = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, values))
        q_tile = ring.q.index(WG)
        at = (q_begin + q_row // GROUP).to(gl.int64) * Q_TOKEN
        at += (head * GROUP + q_row % GROUP) * Q_HEAD
        queries = gl.load(
            q + at[:, None] + q_col[None, :], mask=(q_row < rows)[:, None], other=0.0
        )
        q_tile.store(queries.to(q_tile.dtype))
        fence_async_shared()
        pos_q = prefix + gl.minimum(s_row // GROUP, q_len - 1)
        _, begin, count = _key_range(first_pos, last_pos, t)
        clear_from = 0
        if t.WINDOW >= 0:
            clear_from = last_pos - t.WINDOW
        acc, _total, log2_sum, _, _ = attend(
            ring, t, q_tile, begin, last_pos + 1, count, clear_from, first_pos + 1, 0, seq_lens,
            s_row < rows, seq_lens, pos_q, base2, cap_in, cap_out, v_scale,
            gl.to_tensor(0), gl.to_tensor(0),
        )
        at = (q_begin + o_row // GROUP).to(gl.int64) * OUT_TOKEN
        at += (head * GROUP + o_row % GROUP) * OUT_HEAD
        gl.store(
            out + at[:, None] + o_col[None, :], acc.to(out.dtype.element_ty),
            mask=(o_row < rows)[:, None],
        )
        if HAS_LSE:
            # every row sees itself: the sum is above 0
            at = (q_begin + s_row // GROUP).to(gl.int64) * LSE_TOKEN
            at += (head * GROUP + s_row % GROUP) * LSE_HEAD
            gl.store(lse + at, log2_sum * LN2, mask=s_row < rows)


@gluon.jit(do_not_specialize=["stride_table", "batch"])
def gluon_extend_kernel(
    q,                 # [T, Hq, HEAD_DIM]
    k_cache,           # [slots, NUM_KV, HEAD_DIM]
    v_cache,           # [slots, NUM_KV, HEAD_DIM]
    out,               # [T, Hq, HEAD_DIM], out
    lse,               # [T, Hq] float32, out, or anything without HAS_LSE
    qo_indptr,         # [B + 1] int32
    seq_lens,          # [B] int32
    req_pool_indices,  # [B] int64
    req_to_token,      # [rows, C] int32
    k_pages,           # descriptors of [slots, NUM_KV * HEAD_DIM] with PAGE > 1, or anything
    v_pages,
    base2, cap_in, cap_out, v_scale, stride_table, batch,
    Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr, LSE_TOKEN: gl.constexpr, LSE_HEAD: gl.constexpr,
    K_SLOT: gl.constexpr, K_HEAD: gl.constexpr, V_SLOT: gl.constexpr, V_HEAD: gl.constexpr,
    WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, HAS_LSE: gl.constexpr, GROUP: gl.constexpr,
    NUM_KV: gl.constexpr, HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, PAGE: gl.constexpr, PRODUCERS: gl.constexpr,
    RAW: gl.constexpr, PRODUCER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):
    """One CTA per (block of packed rows, request, KV head)."""
    t = Tile(0, 0, WINDOW, True, HAS_CAP, HEAD_DIM, GROUPS, BN, STAGES, PAGE, PRODUCERS, RAW)
    ring = make_ring(k_cache, t)
    pid = gl.program_id(0)
    head = pid % NUM_KV
    req = pid // NUM_KV % batch
    # the last blocks have most keys: they start first
    block = (gl.num_programs(0) - 1 - pid) // (NUM_KV * batch)
    table_row = req_to_token + gl.load(req_pool_indices + req) * stride_table
    gl.warp_specialize([
        (_consume, (
            ring, t, q, out, lse, qo_indptr, seq_lens, head, req, block, base2, cap_in, cap_out,
            v_scale, Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, LSE_TOKEN, LSE_HEAD, HAS_LSE, GROUP, 0,
        )),
        (_consume, (
            ring, t, q, out, lse, qo_indptr, seq_lens, head, req, block, base2, cap_in, cap_out,
            v_scale, Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, LSE_TOKEN, LSE_HEAD, HAS_LSE, GROUP, 1,
        )),
        (_produce, (
            ring, t, k_cache, v_cache, k_pages, v_pages, qo_indptr, seq_lens, table_row, head, req,
            block, K_SLOT, K_HEAD, V_SLOT, V_HEAD, GROUP,
        )),
    ], [4, PRODUCERS], [CONSUMER_REGS, PRODUCER_REGS])
