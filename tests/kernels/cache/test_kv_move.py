"""commit_kv against a dictionary of slots."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specattn.kernels.cache import commit_kv, store_kv
from tests.caches import scattered
from tests.implementations import EXAMPLES, by_each
from tests.kernels.tree_oracle import DEVICE


def expected_pool(pool, tail_slots, accept_index):
    """Read everything, then write."""
    before, after = pool.clone(), pool.clone()
    for tail, path in zip(tail_slots, accept_index, strict=True):
        for rank, node in enumerate(path[: len(tail)]):
            if 0 <= node < len(tail) and min(tail[rank], tail[node]) >= 0:
                after[:, tail[rank]] = before[:, tail[node]]
    return after


def check(k_pool, v_pool, tail_slots, accept_index):
    expect = [expected_pool(pool, tail_slots, accept_index) for pool in (k_pool, v_pool)]
    commit_kv(
        k_pool,
        v_pool,
        torch.tensor(tail_slots, dtype=torch.int32, device=DEVICE),
        torch.tensor(accept_index, dtype=torch.int32, device=DEVICE),
    )
    for pool, want in zip((k_pool, v_pool), expect, strict=True):
        assert torch.equal(pool, want)


def pools(layers, slots, heads, k_dim, v_dim, dtype=torch.float32):
    return (
        torch.randn(layers, slots, heads, k_dim, device=DEVICE).to(dtype),
        torch.randn(layers, slots, heads, v_dim, device=DEVICE).to(dtype),
    )


FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def move(batch, n, length, layers, heads, widths, dtype, seed):
    """Any paths, within their trees and beyond them, of pools within others.

    Slots below 0 are neither read nor written, and those before the first are somebody's. The last
    request is padding, whose slots are all 0.
    """
    rng = random.Random(seed)
    k_dim, v_dim = widths
    shape = (layers, batch * n + 20, 3, heads, max(widths) + 2)
    storage = torch.randint(-99, 99, shape, device=DEVICE).to(dtype)
    slots = rng.sample(range(1, batch * n + 17), batch * n)
    slots = [slot if rng.random() < 0.9 else -1 for slot in slots]
    tails = [slots[b * n : (b + 1) * n] for b in range(batch)]
    if batch > 1:
        tails[-1] = [0] * n
    nodes = [*range(-1, n + 2)]
    paths = [[0, *rng.choices(nodes, k=length)] for _ in range(batch)]
    # ancestors first, as of trees
    paths[0][1:] = sorted(paths[0][1:], key=lambda node: (node < 0, node))
    want = storage.clone()
    wide = torch.full((batch, n + 2), 1, dtype=torch.int32, device=DEVICE)
    wide[:, :n] = torch.tensor(tails)

    def pools(whole):
        # behind three slots, and in the midst of other columns
        return whole[:, 3:, 0, :, :k_dim], whole[:, 3:, 2, :, 1 : 1 + v_dim]

    for pool in pools(want):
        pool.copy_(expected_pool(pool, tails, paths))
    commit_kv(*pools(storage), wide[:, :n], torch.tensor(paths, dtype=torch.int32, device=DEVICE))
    assert torch.equal(storage, want)


@settings(max_examples=EXAMPLES)
@given(
    batch=st.integers(1, 4),
    n=st.integers(1, 9) | st.just(33),
    length=st.integers(0, 7),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from([*FLOATS, torch.uint8]),
    seed=st.integers(0, 2**32),
)
@example(2, 70, 64, 1, 1, (20, 20), torch.float32, 0)
@by_each
def test_any_paths(batch, n, length, layers, heads, widths, dtype, seed):
    move(batch, n, length, layers, heads, widths, dtype, seed)


@pytest.mark.parametrize(
    "path", [[0, 2, 5], [0, 1, 2], [0, 3, 4], [0, 5, -1], [0, 2, 1], [0, -1, -1]]
)
def test_overlapping_path(implementation, path):
    """Slot 2 is read for rank 1 and written for rank 2; order must not matter."""
    check(*pools(3, 12, 2, 6, 4), [[7, 3, 11, 1, 9, 4]], [path])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("dense", [False, True])
def test_a_store_skips_slots_below_zero(implementation, dtype, stored, dense):
    """Engines pad with -1; what is not written keeps its NaN, before the first slot, too."""
    whole = torch.full((2, 14, 2, 8), torch.nan, device=DEVICE).to(stored)
    k_cache, v_cache = whole[0, 4:], whole[1, 4:, :, :5]
    wide = torch.tensor([[3, -1, 9, 0], [-2, 7, -1, 0]], dtype=dtype, device=DEVICE)
    slots = wide[:, :3].contiguous() if dense else wide[:, :3]
    # numbers that float8 has
    k, v = (torch.randint(-8, 9, (6, 2, size), device=DEVICE).float() for size in (8, 5))
    store_kv(k, v, k_cache, v_cache, slots)
    to, tokens = [3, 9, 7], [0, 2, 4]
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[to].float(), new[tokens])
    kept = [slot for slot in range(14) if slot - 4 not in to]
    assert whole.float()[:, kept].isnan().all()


def check_layers(k_pool, v_pool, **options):
    """Layers as tensors of their own, over a path whose slots are read and written."""
    tail, path = [[7, 3, 11, 1, 9, 4]], [[0, 2, 5]]
    expect = [[expected_pool(layer[None], tail, path)[0] for layer in p] for p in (k_pool, v_pool)]
    commit_kv(
        k_pool,
        v_pool,
        *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (tail, path)),
        **options,
    )
    for found, wanted in zip((k_pool, v_pool), expect, strict=True):
        for layer, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(layer, want, rtol=0, atol=0, equal_nan=True)


# elements that all offsets are multiples of, and the unit they are counted in
UNITS = [(1, 1), (2, 2), (2, 1), (16, 16), (16, 4), (24, 8)]


@pytest.mark.parametrize(("gap", "unit"), UNITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_layers_anywhere(implementation, dtype, gap, unit):
    """Also below the first, and no multiple of a vector apart."""
    caches = scattered(10, (12, 2, 8), dtype, DEVICE, gap)
    for number, cache in enumerate(caches):
        cache.copy_(torch.randn(12, 2, 8) if dtype.is_floating_point else torch.tensor(number))
        cache[7:] += 1
    pools = caches[:5], caches[5:]
    places = [[layer.data_ptr() - layers[0].data_ptr() for layer in layers] for layers in pools]
    assert min(places[0]) < 0
    offsets = torch.tensor(places, device=DEVICE) // (caches[0].element_size() * unit)
    check_layers(*pools, offsets=offsets, unit=unit)


def test_layers_of_allocations_of_their_own(implementation):
    """As an engine makes them; narrow values beside wide keys, heads that lie apart."""
    wide = [torch.randn(12, 3, 2, 16, device=DEVICE) for _ in range(4)]
    k_pool, v_pool = ([layer[:, at, :, :dim] for layer in wide] for at, dim in ((0, 16), (2, 5)))
    untouched = [layer[:, 1].clone() for layer in wide]
    places = [
        [layer.data_ptr() - layers[0].data_ptr() for layer in layers] for layers in (k_pool, v_pool)
    ]
    check_layers(k_pool, v_pool, offsets=torch.tensor(places, device=DEVICE) // 4)
    for layer, before in zip(wide, untouched, strict=True):
        assert torch.equal(layer[:, 1], before)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2]], ids=str)
def test_evenly_spaced_layers_of_their_own(implementation, order):
    stacked = torch.randn(4, 2, 12, 2, 8, device=DEVICE)
    check_layers([stacked[at, 0] for at in order], [stacked[at, 1] for at in order])


@pytest.mark.gpu
def test_pool_beyond_32_bit_offsets():
    """Elements past 2^31: a 32-bit product would wrap."""
    slots = 2**31 // 4096 + 64
    pool = torch.zeros(1, slots, 32, 128, dtype=torch.uint8, device="cuda")
    pool[0, -3] = 7
    tail = torch.tensor([[5, 6, slots - 3]], dtype=torch.int32, device="cuda")
    accept = torch.tensor([[0, 2]], dtype=torch.int32, device="cuda")
    commit_kv(pool, pool[..., :1], tail, accept)
    assert (pool[0, 6] == 7).all()


@pytest.mark.gpu
def test_layers_beyond_32_bit_offsets():
    """Offsets past 2^32 and below 0, of layers that are not evenly spaced."""
    arena = torch.zeros(2**32 + 2**31, dtype=torch.uint8, device="cuda")
    starts = [2**31 + 4096, 0, 2**32 + 8192 + 16]
    layers = [arena[start : start + 12 * 32].view(12, 2, 16) for start in starts]
    for number, layer in enumerate(layers):
        layer[4] = 7 + number
    offsets = torch.tensor([[start - starts[0] for start in starts]] * 2, device="cuda") // 16
    tail = torch.tensor([[5, 6, 4]], dtype=torch.int32, device="cuda")
    accept = torch.tensor([[0, 2]], dtype=torch.int32, device="cuda")
    values = [layer[..., :1] for layer in layers]
    commit_kv(layers, values, tail, accept, offsets=offsets, unit=16)
    for number, layer in enumerate(layers):
        assert (layer[[4, 6]] == 7 + number).all()
    # in parts: counting takes eight times the memory that is counted
    assert sum(int(part.count_nonzero()) for part in arena.split(2**28)) == 3 * 2 * 32
