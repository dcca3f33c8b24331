"""Verify trees by one product with each state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.gated_delta.tiles import (
    commit_tile,
    parts_of,
    read_tile,
    solve_warps,
)
from specattn.kernels.gated_delta.triton_commit import fold, load_key, load_token
from specattn.kernels.gated_delta.triton_solve import dot, solve_nodes_kernel, solve_tree, split
from specattn.kernels.launch import launch_options, power_of_2
from specattn.kernels.pdl import follow

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.kernels.gated_delta.tokens import Tokens


@triton.jit
def _load_state(states, rows, request, head, at_v, HV: tl.constexpr, V: tl.constexpr,
                K: tl.constexpr):  # fmt: skip
    """Load ``[BV, K]`` of a request's head, as it is stored."""
    base = (tl.load(rows + request, cache_modifier=".cg") * HV + head) * (V * K)
    place = at_v[:, None] * K + tl.arange(0, K)[None, :]
    # past the L1 cache: `FOLLOWS` reads before it waits
    return tl.load(states + base + place, cache_modifier=".cg")


@triton.jit
def _read_exactly(s, read, values, mix, N: tl.constexpr):
    """Return ``s read + values mix``, multiplied as float32."""
    total = dot(s.to(tl.float32), read, tl.zeros([s.shape[0], N], tl.float32), "tf32x3")
    return dot(values.to(tl.float32), mix, total, "tf32x3")


@triton.jit
def _read_by_parts(s, read_high, read_low, values, mix_high, mix_low, N: tl.constexpr):
    """Return the same by bfloat16 parts, of 16 bits together."""
    high, low = split(s.to(tl.float32), tl.bfloat16)
    total = dot(high, read_low, tl.zeros([s.shape[0], N], tl.float32), "")
    if s.dtype == tl.float32:
        total = dot(low, read_high, total, "")
    total = dot(high, read_high, total, "")
    total = dot(values, mix_low, total, "")
    return dot(values, mix_high, total, "")


@triton.jit(do_not_specialize=["n"])
def read_states_kernel(
    states,  # [rows, HV, V, K]
    rows,  # [B] int64
    v,  # [B n, HV, V]
    mixing,  # [SPLIT, B, HV, N, N], as `solve_nodes_kernel` writes it
    reading,  # [SPLIT, B, HV, N, K], the same
    out,  # [B n, HV, V], out
    n,
    HV: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BV: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLLOWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per V block, head, and request.

    Tiles of values lie as ``[BV, N]``.
    """
    follow(PDL and not FOLLOWS)
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at_v, at = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, N)
    s = _load_state(states, rows, request, head, at_v, HV, V, K)
    follow(PDL and FOLLOWS)
    place = ((request * n + at) * HV + head)[None, :] * V + at_v[:, None]
    live = (at < n)[None, :]
    values = tl.load(v + place, mask=live, other=0.0)
    which, apart = request * HV + head, tl.num_programs(2).to(tl.int64) * HV * N
    mix = mixing + which * N * N + at[:, None] + at[None, :] * N  # [N, N], transposed
    read = reading + which * N * K + tl.arange(0, K)[:, None] + at[None, :] * K  # [K, N]
    if SPLIT == 1:
        found = _read_exactly(s, tl.load(read), values, tl.load(mix), N)
    else:
        reads = tl.load(read), tl.load(read + apart * K)
        mixes = tl.load(mix), tl.load(mix + apart * N)
        found = _read_by_parts(s, reads[0], reads[1], values, mixes[0], mixes[1], N)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["n"])
def read_trees_kernel(
    states,  # [rows, HV, V, K]
    tokens,  # q, k [B n, HK, K], g and beta [B n, HV]
    words,  # [B, n] int64
    rows,  # [B] int64
    v,  # [B n, HV, V]
    out,  # [B n, HV, V], out
    n,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    BV: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLLOWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per V block, head, and request, which solves by itself.

    It saves a launch where programs are few: a state arrives while its tree is solved.
    """
    follow(PDL and not FOLLOWS)
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at_v, at = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, N)
    s = _load_state(states, rows, request, head, at_v, HV, V, K)
    follow(PDL and FOLLOWS)
    place = ((request * n + at) * HV + head)[None, :] * V + at_v[:, None]
    live = (at < n)[None, :]
    values = tl.load(v + place, mask=live, other=0.0)
    mix, read = solve_tree(tokens, words, request, head, n, scale, HK, HV, K, N, SPLIT)
    if SPLIT == 1:
        found = _read_exactly(s, tl.trans(read), values, tl.trans(mix), N)
    else:
        read_high, read_low = split(tl.trans(read), tl.bfloat16)
        mix_high, mix_low = split(tl.trans(mix), tl.bfloat16)
        found = _read_by_parts(s, read_high, read_low, values, mix_high, mix_low, N)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=live)


@triton.jit
def read_token_kernel(
    states,  # [rows, HV, V, K]
    tokens,  # q, k [B, HK, K], v [B, HV, V], g and beta [B, HV]
    rows,  # [B] int64
    out,  # [B, HV, V], out
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    FOLLOWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per V block and head, and request, for one token."""
    follow(PDL and not FOLLOWS)
    q, k, v, g, beta = tokens
    block, head = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    request, at_v = tl.program_id(1).to(tl.int64), block * BV + tl.arange(0, BV)
    s = _load_state(states, rows, request, head, at_v, HV, V, K).to(tl.float32)
    follow(PDL and FOLLOWS)
    key, values, gate, share = load_token((k, v, g, beta), request, head, HK, HV, K, V, at_v)
    query = load_key(q + (request * HK + head // (HV // HK)) * K, K) * scale
    s = fold(s, key, values, gate, share)
    found = tl.sum(s * query[None, :], 1)
    tl.store(out + (request * HV + head) * V + at_v, found.to(out.dtype.element_ty))


def verify(
    *,
    tokens: Tokens,
    states: Tensor,
    rows: Tensor,
    words: Tensor,
    follows: bool,
    out: Tensor,
) -> Tensor:
    """Launch what reads trees, and write ``out``; see `verify_nodes`."""
    (batch, n), (heads, v_dim), (k_heads, k_dim) = (
        words.shape[:2],
        tokens.v.shape[1:],
        tokens.k.shape[1:],
    )
    sizes = {"HK": k_heads, "HV": heads, "K": k_dim}
    options, scale = launch_options(out.device), k_dim**-0.5
    if n == 1:
        tile = commit_tile(v_dim)
        read_token_kernel[v_dim // tile.values * heads, batch](
            states,
            (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta),
            rows,
            out,
            scale,
            V=v_dim,
            BV=tile.values,
            FOLLOWS=follows,
            num_warps=tile.warps,
            **sizes,
            **options,
        )
        return out
    nodes, parts = max(16, power_of_2(n)), parts_of(out.dtype)
    solving = (tokens.q, tokens.k, tokens.g, tokens.beta), words
    sizes |= {"N": nodes, "SPLIT": parts}
    tile = read_tile(v_dim, nodes, batch * heads, out.dtype)
    if tile.solves:
        read_trees_kernel[v_dim // tile.values, heads, batch](
            states,
            *solving,
            rows,
            tokens.v,
            out,
            n,
            scale,
            V=v_dim,
            BV=tile.values,
            FOLLOWS=follows,
            num_warps=tile.warps,
            **sizes,
            **options,
        )
        return out
    like = out if parts > 1 else tokens.g
    mixing = like.new_empty(parts, batch, heads, nodes, nodes)
    reading = like.new_empty(parts, batch, heads, nodes, k_dim)
    solve_nodes_kernel[heads, batch](
        *solving,
        mixing,
        reading,
        n,
        scale,
        num_warps=solve_warps(nodes, out.dtype),
        **sizes,
        **options,
    )
    del sizes["HK"]
    read_states_kernel[v_dim // tile.values, heads, batch](
        states,
        rows,
        tokens.v,
        mixing,
        reading,
        out,
        n,
        V=v_dim,
        BV=tile.values,
        FOLLOWS=follows,
        num_warps=tile.warps,
        **sizes,
        **options,
    )
    return out
