"""Pools over caches that an engine allocated."""

from __future__ import annotations

import pytest
import torch

from specattn import KVPool
from specattn.batch import AcceptResult
from specattn.cache import kv_pool
from specattn.cache.external import as_slots, block_stride
from specattn.config import FLOAT8, AttnConfig, KVScales
from tests.caches import HEADS, LAYOUTS, MAKES, PAGE, PAGES, layout_of, scattered
from tests.worlds import DEVICE


def path_of(*ranks: int) -> AcceptResult:
    path = torch.tensor([ranks], dtype=torch.int32, device=DEVICE)
    tokens = path.long()
    return AcceptResult(path, tokens, (path >= 0).sum(1, dtype=torch.int32), tokens[:, 0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_page_begins_a_stride_after_the_one_before(name):
    layout = layout_of(name, 3)
    expected = {"interleaved": 2, "heads_first": 4, "layers_in_pages": 6}.get(name, 1)
    assert layout.stride == PAGE * expected
    for at, both in enumerate(layout.pages):
        for slots, pages in zip((layout.k[at], layout.v[at]), both, strict=True):
            for p in range(PAGES):
                for i in range(PAGE):
                    slot, seen = slots[p * layout.stride + i], pages[p, i]
                    assert slot.data_ptr() == seen.data_ptr()
                    assert slot.stride() == seen.stride()
            assert len(slots) == (PAGES - 1) * layout.stride + PAGE


def test_pages_of_one_slot_and_single_pages_are_slots():
    wide = torch.arange(60.0).view(5, 1, 2, 6)[..., :4]
    assert block_stride(wide) == 1
    assert torch.equal(as_slots(wide), wide[:, 0])
    # the values of [pages, 2, 1, heads, dim]: pages have a stride of their own
    both = torch.arange(80.0).view(5, 2, 1, 2, 4)
    assert torch.equal(as_slots(both[:, 1]), both[:, 1, 0])
    one = torch.arange(24.0).view(1, 3, 2, 4)
    assert block_stride(one) == 3
    assert torch.equal(as_slots(one), one[0])


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_external_pool_does_what_one_of_ones_own_does(name, make):
    """Stores and moves reach the same tokens in every layer, and nothing beside them."""
    layers = [HEADS] * 3
    layout = layout_of(name, 3, make)
    own, external = (
        KVPool(layers, PAGES * PAGE, DEVICE),
        KVPool.from_external(layers, layout.k, layout.v),
    )
    own.k.fill_(float("nan"))
    own.v.fill_(float("nan"))
    assert external.num_slots == len(layout.k[0])
    tokens = torch.tensor([[9, 21, 6, 14, 7, 20]], dtype=torch.int32, device=DEVICE)
    places = tokens // PAGE * layout.stride + tokens % PAGE
    for layer in range(3):
        k, v = torch.randn(2, 6, 2, 8, device=DEVICE)
        own.store(layer, tokens, k, v)
        external.store(layer, places, k, v)
    # token 6 is read for rank 1 and written for rank 2
    for pool, tail in ((own, tokens), (external, places)):
        pool.commit(tail, path_of(0, 2, 5, -1))
    for at, (k, v) in enumerate(layout.pages):
        for found, want in ((k, own.k[at]), (v, own.v[at])):
            torch.testing.assert_close(found.flatten(0, 1), want, rtol=0, atol=0, equal_nan=True)


def test_a_stacked_tensor_is_kept_as_it_is():
    k, v = torch.randn(2, 3, 24, 2, 8, device=DEVICE)
    pool = KVPool.from_external([HEADS] * 3, k, v)
    assert pool.k is k
    assert pool.v is v
    assert (pool.num_slots, pool.device) == (24, k.device)


def test_external_latents_are_moved_once():
    latent = AttnConfig(4, 1, 10, v_head_dim=6, sm_scale=0.3, latent=True)
    caches = scattered(3, (12, 1, 10), device=DEVICE)
    pool = KVPool.from_external([latent] * 3, caches)
    slots = torch.tensor([[7, 3, 11, 1, 9, 4]], dtype=torch.int32, device=DEVICE)
    rows = torch.randn(3, 6, 1, 10, device=DEVICE)
    for layer, new in enumerate(rows):
        pool.store(layer, slots, new, new[..., :6])
        assert pool.v[layer].data_ptr() == caches[layer].data_ptr()
    pool.commit(slots, path_of(0, 2, 5, -1))
    for cache, new in zip(caches, rows, strict=True):
        want = torch.full_like(cache, float("nan"))
        want[slots[0].long()] = new
        want[slots[0, 1]], want[slots[0, 2]] = new[2], new[5]
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)


def test_external_float8_stores_what_a_pool_of_ones_own_does():
    scales = [KVScales(0.5, 2.0), KVScales(3.0, 0.1), KVScales()]
    caches = [cache.view(FLOAT8) for cache in scattered(6, (12, 2, 8), torch.uint8, DEVICE)]
    external = KVPool.from_external([HEADS] * 3, caches[:3], caches[3:], scales=scales)
    own = KVPool([HEADS] * 3, 12, DEVICE, kv_dtype=FLOAT8, scales=scales)
    assert external.layers == own.layers
    slots = torch.tensor([[7, 3, 11, 1, 9, 4]], dtype=torch.int32, device=DEVICE)
    for layer in range(3):
        k, v = 100 * torch.randn(2, 6, 2, 8, device=DEVICE)
        for pool in (own, external):
            pool.store(layer, slots, k, v)
    for pool in (own, external):
        pool.commit(slots, path_of(0, 2, 5, -1))
    at = slots[0].long()
    for layer in range(3):
        for found, want in ((external.k, own.k), (external.v, own.v)):
            assert torch.equal(found[layer].float()[at], want[layer].float()[at])


@pytest.fixture
def handed(monkeypatch):
    """What pools hand the operation that moves, call by call."""
    calls, move = [], kv_pool.commit_kv

    def spy(*args, **options):
        calls.append(options)
        move(*args, **options)

    monkeypatch.setattr(kv_pool, "commit_kv", spy)
    return calls


@pytest.mark.parametrize(("gap", "unit"), [(8, 8), (1, 1), (6, 2), (48, 16)])
def test_offsets_lead_to_every_layer(handed, gap, unit):
    """In units as large as all of them are multiples of, up to 16 elements."""
    caches = scattered(8, (16, 2, 8), torch.float16, DEVICE, gap)
    pool = KVPool.from_external(
        [AttnConfig(4, 2, 8, dtype=torch.float16)] * 4, caches[:4], caches[4:]
    )
    pool.commit(torch.ones(1, 3, dtype=torch.int32, device=DEVICE), path_of(0, 2, -1))
    (options,) = handed
    assert options["unit"] == unit
    assert options["offsets"].dtype == torch.int64
    for layers, offsets in zip((pool.k, pool.v), options["offsets"].tolist(), strict=True):
        assert min(offsets) < 0 or layers is pool.v
        for layer, offset in zip(layers, offsets, strict=True):
            assert layers[0].data_ptr() + 2 * unit * offset == layer.data_ptr()


@pytest.mark.parametrize("backwards", [False, True])
def test_evenly_spaced_layers_need_no_offsets(handed, backwards):
    k, v = torch.randn(2, 4, 9, 2, 8, device=DEVICE)
    order = range(4)[::-1] if backwards else range(4)
    pool = KVPool.from_external([HEADS] * 4, [k[at] for at in order], [v[at] for at in order])
    want = k.clone()
    want[:, 5] = k[:, 7]
    pool.commit(torch.tensor([[3, 5, 7]], dtype=torch.int32, device=DEVICE), path_of(0, 2, -1))
    assert handed[0]["offsets"] is None
    assert torch.equal(k, want)


def test_a_pool_of_ones_own_needs_no_offsets(handed):
    pool = KVPool([HEADS] * 4, 9, DEVICE)
    pool.commit(torch.ones(1, 3, dtype=torch.int32, device=DEVICE), path_of(0, 2, -1))
    assert handed[0]["offsets"] is None
