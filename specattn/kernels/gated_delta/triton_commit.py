"""Fold accepted paths into states and windows of all layers."""

from __future__ import annotations

import triton
import triton.language as tl

from specattn.kernels.pdl import enter


@triton.jit
def load_key(base, K: tl.constexpr):
    """Return a key or query of a token, normalised: ``[K]`` float32."""
    x = tl.load(base + tl.arange(0, K)).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def fold(s, k, v, g, beta):
    """Return a state tile ``[BV, K]`` after one token: the recurrence."""
    s = s * tl.exp(g)
    delta = (v - tl.sum(s * k[None, :], 1)) * beta
    return s + delta[:, None] * k[None, :]


@triton.jit
def load_token(nodes, at, head, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
               V: tl.constexpr, at_v):  # fmt: skip
    """Return a head's key, values, gate and beta of a token."""
    k, v, g, beta = nodes
    key = load_key(k + (at * HK + head // (HV // HK)) * K, K)
    values = tl.load(v + (at * HV + head) * V + at_v).to(tl.float32)
    return key, values, tl.load(g + at * HV + head), tl.load(beta + at * HV + head)


# more than the nodes of a path
_PATH = tl.constexpr(128)


@triton.jit
def path_length(path, n, width):
    """Return how many nodes a path has."""
    rank = tl.arange(0, _PATH)  # [_PATH]
    node = tl.load(path + rank, mask=rank < width, other=-1)
    return tl.min(tl.where((node >= 0) & (node < n), _PATH, rank), 0)


# one compilation for paths of any length, trees of any size, and halves of any batch: one binary
# gives the same bits
@triton.jit(
    do_not_specialize=["n", "width", "stride_layer", "state_rows"],
    do_not_specialize_on_alignment=["rows", "into", "accept_index"],
)
def commit_states_kernel(
    states,  # [L, state_rows, HV, V, K], in place
    nodes,  # k [L, B, n, HK, K], v [L, B, n, HV, V], g and beta [L, B, n, HV]
    rows,  # [B] int64
    into,  # [B] int64, the rows that are written
    accept_index,  # [B, width] int32
    n,
    width,
    stride_layer,  # nodes from a layer to the next
    state_rows,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per V block and head, request, and layer."""
    enter(PDL)
    block, head = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    request, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, to = tl.load(rows + request), tl.load(into + request)
    path = accept_index + request * width
    length = path_length(path, n, width)
    if (row > 0) & (to > 0) & (length > 0):
        at_v, at_k = block * BV + tl.arange(0, BV), tl.arange(0, K)
        base = ((layer * state_rows + row) * HV + head) * (V * K)
        own = at_v[:, None] * K + at_k[None, :]
        tile = states + base + own
        s = tl.load(tile).to(tl.float32)
        at = layer * stride_layer + request * n + tl.load(path)
        key, values, g, beta = load_token(nodes, at, head, HK, HV, K, V, at_v)
        for rank in range(length):
            # the next node's inputs arrive while this one is folded in
            at = (
                layer * stride_layer
                + request * n
                + tl.load(path + tl.minimum(rank + 1, length - 1))
            )
            after = load_token(nodes, at, head, HK, HV, K, V, at_v)
            # as it is stored, so that any number of nodes gives the same bits
            s = fold(s, key, values, g, beta).to(states.dtype.element_ty).to(tl.float32)
            key, values, g, beta = after
        base = ((layer * state_rows + to) * HV + head) * (V * K)
        tl.store(states + base + own, s.to(states.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "width", "stride_layer", "window_rows"])
def commit_windows_kernel(
    windows,  # [L, window_rows, C, WIDTH - 1], in place
    inputs,  # [L, B, n, C]
    rows,  # [B] int64
    into,  # [B] int64, the rows that are written
    accept_index,  # [B, width] int32
    n,
    width,
    stride_layer,  # nodes from a layer to the next
    window_rows,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    W_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per block of channels, request, and layer."""
    enter(PDL)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    request, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, to = tl.load(rows + request), tl.load(into + request)
    path = accept_index + request * width
    length = path_length(path, n, width)
    place = tl.arange(0, W_BLOCK)  # [W_BLOCK]
    # which input of (window, path) comes to a place; what is below 0 lies in the window
    source = place + length - (WIDTH - 1)
    kept = (place < WIDTH - 1)[:, None] & (column < C)[None, :] & (row > 0) & (to > 0)
    known = (source >= 0) & (source < length)
    chosen = tl.load(path + source, mask=known, other=0).to(tl.int64)
    at = layer * stride_layer + request * n + chosen  # [W_BLOCK]
    new = kept & known[:, None]
    x = tl.load(inputs + at[:, None] * C + column[None, :], mask=new, other=0)
    window = windows + ((layer * window_rows + row) * C + column[None, :]) * (WIDTH - 1)
    old = kept & (source < 0)[:, None]
    before = tl.load(window + source[:, None] + WIDTH - 1, mask=old, other=0)
    # places are read before any is written
    tl.debug_barrier()
    window = windows + ((layer * window_rows + to) * C + column[None, :]) * (WIDTH - 1)
    tl.store(window + place[:, None], tl.where(old, before, x), mask=kept & (length > 0))
