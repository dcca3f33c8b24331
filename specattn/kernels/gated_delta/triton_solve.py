"""Solve what of a tree, or of prompts, needs no state.

With A of the room's system, T the inverse of ``I + A`` times beta, and P what queries read of
updates: ``u = T (v - e^G k S)`` and ``o = e^G q S + P u``. So ``o = M v + (e^G q - M e^G k) S``
with ``M = P T``, and a tree reads its state by one product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter

# Triton's interpreter multiplies the bits of bfloat16 tiles
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# nodes of a block that is inverted node by node
_NEAR = tl.constexpr(8)


@triton.jit
def dot(a, b, total, HOW: tl.constexpr):
    """Return ``total + a b`` in float32, of tiles of one dtype."""
    tl.static_assert(a.dtype == b.dtype)
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    if a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision=HOW)
    return tl.dot(a, b, total)


@triton.jit
def split(values, DTYPE: tl.constexpr):
    """Return two shorter parts that add up to float32 values."""
    high = values.to(DTYPE)
    return high, (values - high.to(tl.float32)).to(DTYPE)


@triton.jit
def store_split(base, stride, values, SPLIT: tl.constexpr):
    """Store values, or two parts of them, ``stride`` apart."""
    if SPLIT == 1:
        tl.store(base, values)
    else:
        high, low = split(values, base.dtype.element_ty)
        tl.store(base, high)
        tl.store(base + stride, low)


@triton.jit
def wide_dot(a, b, total, SPLIT: tl.constexpr):
    """Return ``total + a b`` of float32 ``a``.

    ``b`` is of any dtype; with two parts, of bfloat16.
    """
    if SPLIT == 1:
        total = dot(a, b.to(tl.float32), total, "tf32x3")
    else:
        high, low = split(a, tl.bfloat16)
        total = dot(low, b, total, "")
        total = dot(high, b, total, "")
    return total


@triton.jit
def multiply(a, b, SPLIT: tl.constexpr):
    """Multiply float32 tiles, by as many bits as states are read."""
    none = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    if SPLIT == 1:
        total = dot(a, b, none, "tf32x3")
    else:
        a_high, a_low = split(a, tl.bfloat16)
        b_high, b_low = split(b, tl.bfloat16)
        total = dot(a_low, b_high, none, "")
        total = dot(a_high, b_low, total, "")
        total = dot(a_high, b_high, total, "")
    return total


@triton.jit
def halved(g):
    """Return gates as multiples of 2^-10, and what is left of each.

    Sums of multiples are exact, and so are differences of these: what two nodes have above both
    leaves no error between them.
    """
    large = tl.floor(g * 1024.0 + 0.5) / 1024.0
    return large, g - large


@triton.jit
def inverse_sizes(x):
    """Return one over the norm of each row of ``[N, K]``."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def invert(above, depth, N: tl.constexpr, SPLIT: tl.constexpr):
    """Return the inverse of ``I + above``.

    Its entries lie below the diagonal. Of A that is at most 7 deep the inverse is
    ``(I - A) (I + A^2) (I + A^4)``, where fewer products wait for one another than in substitution.
    What is deeper goes by blocks of 8 nodes: each is inverted so, then blocks are substituted, one
    at a time, for powers of all would grow.
    """
    at = tl.arange(0, N)  # [N]
    own = (at[:, None] == at[None, :]).to(tl.float32)
    within = (depth < _NEAR) | (at[:, None] // _NEAR == at[None, :] // _NEAR)
    near = tl.where(within, above, 0.0)
    found = own - near
    if depth > 1:
        square = multiply(near, near, SPLIT)
        found += multiply(found, square, SPLIT)
        if depth > 3:
            found += multiply(found, multiply(square, square, SPLIT), SPLIT)
    if depth >= _NEAR:
        far = tl.where(within, 0.0, above)
        far = multiply(found, far, SPLIT)
        blocks = found
        for _ in range(N // _NEAR - 1):
            found = blocks - multiply(far, found, SPLIT)
    return found


@triton.jit
def solve(q, k, g, beta, held, scale, N: tl.constexpr, SPLIT: tl.constexpr):
    """Return T and P, and what scales rows of keys and queries.

    The last is each node's gate from the root on. Parameters are queries and keys as the model has
    them, ``[N, K]``, g and beta ``[N]``, and which nodes are seen, ``[N, N]``; nodes past the last
    see nobody.
    """
    at = tl.arange(0, N)  # [N]
    key_size, query_size = inverse_sizes(k), inverse_sizes(q) * scale
    large, small = halved(g)
    large = tl.sum(tl.where(held, large[None, :], 0.0), 1)  # [N], from the root to a node
    small = tl.sum(tl.where(held, small[None, :], 0.0), 1)
    # masked before exp: other differences are of any size
    spans = large[:, None] - large[None, :] + (small[:, None] - small[None, :])
    spans = tl.where(held, spans, 0.0)
    decay = tl.where(held, tl.exp(tl.minimum(spans, 0.0)), 0.0) * key_size[None, :]
    none = tl.zeros([N, N], tl.float32)
    above = dot(k, tl.trans(k), none, "tf32x3") * decay * (beta * key_size)[:, None]
    above = tl.where(at[:, None] > at[None, :], above, 0.0)
    depth = tl.max(tl.sum(held.to(tl.int32), 1), 0) - 1
    solved = invert(above, depth, N, SPLIT) * beta[None, :]
    reads = dot(q, tl.trans(k), none, "tf32x3") * decay * query_size[:, None]
    return solved, reads, key_size, query_size, tl.exp(large + small)


@triton.jit
def load_heads(x, at, live, head, HEADS: tl.constexpr, D: tl.constexpr):
    """Load ``[N, D]`` of a head of tokens ``at``, which are int64."""
    place = (at * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(x + place, mask=live[:, None], other=0.0)


@triton.jit
def solve_tree(tokens, words, request, head, n, scale, HK: tl.constexpr, HV: tl.constexpr,
               K: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Return M, ``[N, N]``, and what multiplies a head's state, ``[N, K]``."""
    q, k, g, beta = tokens
    at = tl.arange(0, N)  # [N]
    token, live, near = request * n + at, at < n, head // (HV // HK)
    keys = load_heads(k, token, live, near, HK, K)
    queries = load_heads(q, token, live, near, HK, K)
    gates = tl.load(g + token * HV + head, mask=live, other=0.0)
    share = tl.load(beta + token * HV + head, mask=live, other=0.0)
    word = tl.load(words + token, mask=live, other=0)
    held = ((word[:, None] >> at[None, :].to(tl.int64)) & 1) != 0
    solved, reads, key_size, query_size, gate = solve(
        queries, keys, gates, share, held, scale, N, SPLIT
    )
    mix = multiply(reads, solved, SPLIT)
    read = queries.to(tl.float32) * (gate * query_size)[:, None]
    read -= wide_dot(mix * (gate * key_size)[None, :], keys, tl.zeros([N, K], tl.float32), SPLIT)
    return mix, read


@triton.jit(do_not_specialize=["n"])
def solve_nodes_kernel(
    tokens,  # q, k [B n, HK, K], g and beta [B n, HV]
    words,  # [B, n] int64
    mixing,  # [SPLIT, B, HV, N, N], out: M
    reading,  # [SPLIT, B, HV, N, K], out: what multiplies the state
    n,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per value head and request."""
    enter(PDL)
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    mix, read = solve_tree(tokens, words, request, head, n, scale, HK, HV, K, N, SPLIT)
    at, which = tl.arange(0, N), request * HV + head
    apart = tl.num_programs(1).to(tl.int64) * HV * N
    to = mixing + which * N * N + at[:, None] * N + at[None, :]
    store_split(to, apart * N, mix, SPLIT)
    to = reading + which * N * K + at[:, None] * K + tl.arange(0, K)[None, :]
    store_split(to, apart * K, read, SPLIT)


@triton.jit
def find_chunk(qo_indptr, pieces, chunk, P_BLOCK: tl.constexpr, N: tl.constexpr):
    """Return where a chunk's tokens begin, and how many it has."""
    piece = tl.arange(0, P_BLOCK)  # [P_BLOCK]
    start = tl.load(qo_indptr + piece, mask=piece < pieces, other=0)
    stop = tl.load(qo_indptr + 1 + piece, mask=piece < pieces, other=0)
    count = tl.cdiv(stop - start, N)
    after = tl.cumsum(count, 0)  # [P_BLOCK]
    own = (chunk < after) & (chunk >= after - count)
    first = tl.sum(tl.where(own, start + (chunk - after + count) * N, 0), 0)
    return first, tl.sum(tl.where(own, tl.minimum(stop - first, N), 0), 0)


@triton.jit(do_not_specialize=["pieces"])
def solve_chunks_kernel(
    tokens,  # q, k [T, HK, K], g and beta [T, HV]
    qo_indptr,  # [pieces + 1] int32
    solved_out,  # [SPLIT, chunks, HV, N, N], out: T
    reads_out,  # [SPLIT, chunks, HV, N, N], out: P
    pieces,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per value head and chunk of a piece."""
    enter(PDL)
    q, k, g, beta = tokens
    head, chunk = tl.program_id(0), tl.program_id(1)
    first, count = find_chunk(qo_indptr, pieces, chunk, P_BLOCK, N)
    if count > 0:
        at = tl.arange(0, N)  # [N]
        token, live, near = (first + at).to(tl.int64), at < count, head // (HV // HK)
        keys = load_heads(k, token, live, near, HK, K)
        queries = load_heads(q, token, live, near, HK, K)
        gates = tl.load(g + token * HV + head, mask=live, other=0.0)
        share = tl.load(beta + token * HV + head, mask=live, other=0.0)
        held = (at[:, None] >= at[None, :]) & live[:, None]
        solved, reads, _, _, _ = solve(queries, keys, gates, share, held, scale, N, SPLIT)
        to = (chunk.to(tl.int64) * HV + head) * N * N + at[:, None] * N + at[None, :]
        apart = tl.num_programs(1).to(tl.int64) * HV * N * N
        store_split(solved_out + to, apart, solved, SPLIT)
        store_split(reads_out + to, apart, reads, SPLIT)
