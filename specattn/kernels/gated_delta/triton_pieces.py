"""Read prompts by chunks of tokens, with the state in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.gated_delta.triton_solve import (
    dot,
    halved,
    inverse_sizes,
    load_heads,
    split,
    wide_dot,
)
from specattn.kernels.pdl import enter


@triton.jit
def _dot_split(a, b, apart, total, SPLIT: tl.constexpr):
    """Return ``total + a b`` for ``b`` as `store_split` leaves it."""
    if SPLIT == 1:
        total = dot(a, tl.load(b), total, "tf32x3")
    else:
        high, low = split(a, tl.bfloat16)
        other = tl.load(b)
        total = dot(low, other, total, "")
        total = dot(high, tl.load(b + apart), total, "")
        total = dot(high, other, total, "")
    return total


@triton.jit(do_not_specialize=["apart"])
def read_chunks_kernel(
    states,  # [rows, HV, V, K], in place
    tokens,  # q, k [T, HK, K], v [T, HV, V], g [T, HV]
    rows,  # [pieces] int64
    qo_indptr,  # [pieces + 1] int32
    solved,  # [SPLIT, chunks, HV, N, N], as `solve_chunks_kernel` writes it
    reads,  # [SPLIT, chunks, HV, N, N], the same
    out,  # [T, HV, V], out
    apart,  # elements of ``solved`` from one part to the other
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    BV: tl.constexpr,
    P_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per V block and head, and piece.

    Tiles of values lie as ``[BV, N]``.
    """
    enter(PDL)
    q, k, v, g = tokens
    block, head = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    piece, near = tl.program_id(1), head // (HV // HK)
    row, start = tl.load(rows + piece), tl.load(qo_indptr + piece)
    length = tl.load(qo_indptr + piece + 1) - start
    before = tl.arange(0, P_BLOCK)  # [P_BLOCK]
    earlier = before < piece
    counts = tl.load(qo_indptr + 1 + before, mask=earlier, other=0)
    counts -= tl.load(qo_indptr + before, mask=earlier, other=0)
    chunk = tl.sum(tl.cdiv(counts, N), 0).to(tl.int64)
    at_v, at, at_k = block * BV + tl.arange(0, BV), tl.arange(0, N), tl.arange(0, K)
    tile = states + (row * HV + head) * (V * K) + at_v[:, None] * K + at_k[None, :]
    s = tl.load(tile).to(tl.float32)
    none = tl.zeros([BV, N], tl.float32)
    for begin in range(0, length, N):
        token, live = (start + begin + at).to(tl.int64), at < length - begin
        keys = load_heads(k, token, live, near, HK, K)
        queries = load_heads(q, token, live, near, HK, K)
        place = (token * HV + head)[None, :] * V + at_v[:, None]
        values = tl.load(v + place, mask=live[None, :], other=0.0).to(tl.float32)
        gates = tl.load(g + token * HV + head, mask=live, other=0.0)
        large, small = halved(gates)
        # from behind each token to the chunk's end
        left = tl.sum(large, 0) - tl.cumsum(large, 0) + (tl.sum(small, 0) - tl.cumsum(small, 0))
        here = (chunk * HV + head) * N * N + at[:, None] + at[None, :] * N  # transposed
        key_size, gate = inverse_sizes(keys), tl.exp(tl.cumsum(gates, 0))
        known = wide_dot(s, tl.trans(keys), none, SPLIT) * (gate * key_size)[None, :]
        u = _dot_split(values - known, solved + here, apart, none, SPLIT)
        found = wide_dot(s, tl.trans(queries), none, SPLIT)
        found *= (gate * inverse_sizes(queries) * scale)[None, :]
        found = _dot_split(u, reads + here, apart, found, SPLIT)
        tl.store(out + place, found.to(out.dtype.element_ty), mask=live[None, :])
        left = tl.exp(tl.minimum(left, 0.0)) * key_size
        s = wide_dot(u * left[None, :], keys, s * tl.exp(tl.sum(gates, 0)), SPLIT)
        chunk += 1
    tl.store(tile, s.to(states.dtype.element_ty), mask=(row > 0) & (length > 0))
