"""Norms, activation, rotation and store: kernels and twins against float64."""

from __future__ import annotations

import pytest
import torch

from specattn.kernels.cache import store_kv
from specattn.kernels.fused import (
    Rotation,
    add_partials,
    add_rms_norm,
    embed_norm_pair,
    qk_norm_rope_store_kv,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
EPS = 1e-5


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def random_partials(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """One partial as a product leaves it; several in float32, with NaN behind each row."""
    count, rows, size = shape
    partials = torch.full((count, rows, size + 3), torch.nan, device=DEVICE)[..., :size]
    partials.copy_(torch.randn(*shape, device=DEVICE))
    return partials if count > 1 else partials.to(dtype)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    error = float((got.double() - want).norm() / want.norm())
    assert error < CLOSE[got.dtype], error


@pytest.mark.parametrize(("split", "size"), [(1, 192), (3, 52)])
def test_adding_to_the_stream_and_norming_it(implementation, dtype, split, size) -> None:
    partials, stream = random_partials(split, 5, size, dtype=dtype), random(5, size, dtype=dtype)
    weight = random(size, dtype=dtype)
    rows = torch.tensor([4, 0, 4], device=DEVICE)
    wide = torch.full((3, 3 * size), torch.nan, dtype=dtype, device=DEVICE)
    views = {"residual_out": wide[:, :size], "out": wide[:, -size:]}
    for wanted, where in ((None, {}), (rows, views)):
        normed, total = add_rms_norm(partials, stream, weight, EPS, rows=wanted, **where)
        chosen = slice(None) if wanted is None else wanted
        check(total, (partials.double().sum(0) + stream.double())[chosen])
        check(normed, norm(total, weight))
    assert wide[:, size : 2 * size].isnan().all()
    # the product has a norm of its own, of float32 weights, and results have their own dtype
    added = random(size, dtype=torch.float32)
    for stream_or_none in (stream, None):
        normed, total = add_rms_norm(
            partials, stream_or_none, added, EPS, added_weight=weight, dtype=dtype
        )
        assert normed.dtype == total.dtype == dtype
        want = norm(partials.double().sum(0), weight)
        check(total, want if stream_or_none is None else want + stream.double())
        check(normed, norm(total, added))


def test_embeddings_and_their_norms(implementation, dtype) -> None:
    table, weight = random(11, 40, dtype=dtype), random(40, dtype=dtype)
    ids = torch.tensor([3, 10, 0, 3, 7, 1], device=DEVICE)
    wide = torch.full((6, 90), torch.nan, dtype=dtype, device=DEVICE)
    where = {"rows": ids, "residual_out": wide[:, 50:]}
    normed, embedded = add_rms_norm(table[None], None, weight, EPS, **where)
    assert embedded.equal(table[ids])
    assert wide[:, :50].isnan().all()
    check(normed, norm(table[ids], weight))


def test_embeddings_beside_states_and_their_norms(implementation, dtype) -> None:
    table, hidden = random(11, 40, dtype=dtype), random(6, 40, dtype=dtype)
    ids = torch.tensor([3, 10, 0, 3, 7, 1], device=DEVICE)
    weights = random(2, 40, dtype=dtype)
    few = hidden[:3]
    for rows, normed in ((None, hidden), ([2, 0, 2, 1, 1, 0], few)):
        index = None if rows is None else torch.tensor(rows, device=DEVICE)
        both, stream = embed_norm_pair(ids, table, normed, weights[0], weights[1], EPS, rows=index)
        want = normed if rows is None else normed[rows]
        assert stream.equal(want)
        check(both, torch.cat([norm(table[ids], weights[0]), norm(want, weights[1])], dim=-1))
    # float32 weights, and norms of another dtype
    exact = random(2, 40, dtype=torch.float32)
    both, _ = embed_norm_pair(ids, table, hidden, exact[0], exact[1], EPS, dtype=dtype)
    assert both.dtype == dtype
    check(both, torch.cat([norm(table[ids], exact[0]), norm(hidden, exact[1])], dim=-1))


@pytest.mark.parametrize(("split", "rows", "size"), [(1, 3, 700), (2, 3, 700), (2, 65, 2100)])
def test_activation(implementation, dtype, split, rows, size) -> None:
    partials = random_partials(split, rows, 2 * size, dtype=dtype)
    gate, up = partials.double().sum(0).chunk(2, dim=-1)
    check(add_partials(partials, dtype, gated=True), gate * gate.sigmoid() * up)


@pytest.mark.parametrize(("rows", "size"), [(4, 700), (65, 2100)])
def test_partials_add_up(implementation, dtype, rows, size) -> None:
    partials = random_partials(3, rows, size, dtype=dtype)
    got = add_partials(partials, dtype)
    assert got.dtype == dtype
    check(got, partials.double().sum(0))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "split", "normed", "biased", "paged", "prefetch"),
    [
        (4, 2, 24, 1, True, False, True, True),
        (6, 1, 64, 3, False, False, True, False),
        (8, 4, 16, 2, True, True, False, True),
        (9, 3, 64, 1, False, True, True, True),
        (0, 2, 40, 2, False, True, True, False),  # keys and values alone
    ],
)
def test_rotation_and_store(
    implementation, dtype, heads, kv_heads, dim, split, normed, biased, paged, prefetch
) -> None:
    count = 6
    partials = random_partials(split, count, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.rand(50, dim // 2, device=DEVICE) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 49, 7, 7, 60, 1], device=DEVICE)  # 60: past the end
    norms = (random(dim, dtype=dtype), random(dim, dtype=dtype)) if normed else None
    places = torch.tensor([[9, 2, 5], [0, 7, 3]], device=DEVICE) if paged else None
    to = torch.arange(count, device=DEVICE) if places is None else places.flatten()
    slots = None
    if places is not None:
        slots = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)[:, 2:5]
        slots.copy_(places)
    q = torch.full((count, heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    caches = torch.full((2, 10, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    bias = random((heads + 2 * kv_heads) * dim, dtype=dtype) if biased else None
    rotation = Rotation(table, norms, EPS, bias)
    qk_norm_rope_store_kv(
        partials, positions, rotation, q, caches[0], caches[1], slots, prefetch=prefetch
    )
    want = partials.double().sum(0) + (0 if bias is None else bias.double())
    want = want.unflatten(-1, (-1, dim))
    want_q, want_k, want_v = want.split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        want_q, want_k = norm(want_q, norms[0]), norm(want_k, norms[1])
    turn = torch.polar(torch.ones_like(angles.double()), angles.double())
    turn = turn[positions.clamp(max=49)][:, None]
    for got, heads_of in ((q, want_q), (caches[0, to], want_k)):
        pairs = torch.complex(*heads_of.chunk(2, dim=-1)) * turn
        if heads_of.numel():
            check(got, torch.cat([pairs.real, pairs.imag], dim=-1))
    check(caches[1, to], want_v)
    kept = [slot for slot in range(10) if slot not in to.tolist()]
    assert caches[:, kept].isnan().all()


def test_slots_below_zero_are_skipped(implementation) -> None:
    """Their queries are computed all the same."""
    partials = random_partials(1, 4, (2 + 2 * 2) * 16, dtype=torch.float32)
    table = torch.cat([torch.ones(1, 8), torch.zeros(1, 8)], dim=-1).to(DEVICE)  # turns nothing
    positions = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slots = torch.tensor([[3, -1], [-1, 1]], device=DEVICE)
    q = torch.full((4, 2, 16), torch.nan, device=DEVICE)
    whole = torch.full((2, 9, 2, 16), torch.nan, device=DEVICE)
    k_cache, v_cache = whole[0, 4:], whole[1, 4:]
    qk_norm_rope_store_kv(partials, positions, Rotation(table), q, k_cache, v_cache, slots)
    want_q, want_k, want_v = partials[0].unflatten(-1, (6, 16)).split(2, dim=1)
    assert torch.equal(q, want_q)
    assert torch.equal(k_cache[[3, 1]], want_k[[0, 3]])
    assert torch.equal(v_cache[[3, 1]], want_v[[0, 3]])
    assert whole[:, [0, 1, 2, 3, 4, 6, 8]].isnan().all()


def test_a_float8_pool_gets_what_the_store_kernel_writes(implementation) -> None:
    half = torch.float16
    partials = random_partials(1, 4, (2 + 2) * 16, dtype=half)
    table = torch.cat([torch.ones(1, 8), torch.zeros(1, 8)], dim=-1).to(DEVICE)  # turns nothing
    positions = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slots = torch.tensor([[1], [4], [0], [2]], dtype=torch.int32, device=DEVICE)
    q = torch.empty(4, 2, 16, dtype=half, device=DEVICE)
    pools = torch.zeros(4, 5, 1, 16, device=DEVICE).to(torch.float8_e4m3fn)
    qk_norm_rope_store_kv(
        partials,
        positions,
        Rotation(table),
        q,
        pools[0],
        pools[1],
        slots,
        k_scale=0.5,
        v_scale=2.0,
    )
    # the interpreter rounds to float8 in its own way
    _, k, v = partials[0].unflatten(-1, (4, 16)).split([2, 1, 1], dim=1)
    store_kv(k, v, pools[2], pools[3], slots, k_scale=0.5, v_scale=2.0)
    assert pools[0].view(torch.uint8).equal(pools[2].view(torch.uint8))
    assert pools[1].view(torch.uint8).equal(pools[3].view(torch.uint8))
    assert pools[0].float().abs().sum() > 0
