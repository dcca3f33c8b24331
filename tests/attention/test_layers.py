"""A model's layers over a plan: what they store, and what a model has stored itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.backends.by_phase import by_phase
from specattn.cache.hybrid_pool import HybridPool
from specattn.cache.kv_pool import KVPool
from specattn.config import FLOAT8, AttnConfig, KVScales, StateConfig
from specattn.errors import UnsupportedError
from specattn.testing.session import config_of, plan_of
from tests.oracle import check, make_tree_case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LATENT = AttnConfig(4, 1, 48, 32, sm_scale=0.2, latent=True)


def new_heads(config: AttnConfig, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    heads = config.num_kv_heads
    # numbers that float8 has, also with the scales
    k = torch.randint(-3, 4, (count, heads, config.head_dim), device=DEVICE).to(config.dtype)
    if config.latent:
        return k, k[..., : config.v_head_dim]
    v = torch.randint(-3, 4, (count, heads, config.v_head_dim), device=DEVICE)
    return k, v.to(config.dtype)


@pytest.mark.parametrize(
    "backend",
    ["torch_native", "triton", by_phase(prefill="torch_native", decode="triton")],
    ids=lambda backend: getattr(backend, "name", backend),
)
def test_what_a_model_has_stored_itself_is_read(backend):
    """Against float64, of layers that store and of layers that do not, in one forward."""
    case = make_tree_case([33, 0, 70, 5], device=DEVICE)
    config = config_of(case)
    caches = [[cache.clone() for _ in range(3)] for cache in (case.k_cache, case.v_cache)]
    pool = KVPool.from_external([config] * 3, *caches)
    attend = LayeredBackend(backend, [config] * 3, pool, DEVICE).bind(plan_of(case))
    attend.fill()
    slots = attend.slots.flatten().long()
    assert slots.tolist() == case.args["tail_slots"].flatten().tolist()
    for layer, stores in enumerate((False, True, False)):
        new = new_heads(config, len(slots), layer)
        for cache, rows in zip((case.k_cache, case.v_cache), new, strict=True):
            cache[slots] = rows
        if not stores:
            pool.k[layer][slots], pool.v[layer][slots] = new
        case.out = attend(layer, case.q, *(new if stores else ()))
        check(case, case.expected(), lse=False)


@pytest.mark.parametrize(
    "config",
    [AttnConfig(4, 2, 32, dtype=torch.float16, kv_dtype=FLOAT8), LATENT],
    ids=["float8", "latent"],
)
def test_storing_apart_gives_the_same(config):
    case = make_tree_case([33, 0, 70], device=DEVICE)
    scales = [KVScales(0.5, 2.0), KVScales(2.0, 0.25)] if config.kv_dtype else None
    pools = [KVPool([config] * 2, len(case.k_cache), DEVICE, scales=scales) for _ in range(2)]
    plan = plan_of(case)
    whole, apart = (
        LayeredBackend("torch_native", pool.layers, pool, DEVICE).bind(plan) for pool in pools
    )
    q = torch.randn(plan.out_slots.numel(), 4, config.head_dim, device=DEVICE).to(config.dtype)
    for layer in range(2):
        k, v = new_heads(config, len(q), layer)
        pools[1].store(layer, apart.slots, k, v)
        assert torch.equal(whole(layer, q, k, v), apart(layer, q))
        assert torch.equal(pools[0].k[layer].float(), pools[1].k[layer].float())


def test_half_of_what_is_to_be_stored_is_refused():
    case = make_tree_case([33], device=DEVICE)
    config = replace(config_of(case), sm_scale=1.0)
    pool = KVPool([config], len(case.k_cache), DEVICE)
    attend = LayeredBackend("torch_native", [config], pool, DEVICE).bind(plan_of(case))
    k, v = new_heads(config, len(case.q), 0)
    for given in ({"k": k}, {"v": v}):
        with pytest.raises(ValueError, match="k and v must be a tensor each"):
            attend(0, case.q, **given)
    assert not pool.k[0].any()


def test_a_layer_of_one_kind_is_not_called_as_the_other():
    """A model's layers attend or mix, each over its part of the memory."""
    case = make_tree_case([3, 5], device=DEVICE)
    config, states = config_of(case), StateConfig(2, 4, 16, 16)
    pool = HybridPool([states, config, states], len(case.k_cache), DEVICE, rows=9)
    layers = LayeredBackend.of("torch_native", [states, config, states], pool)
    assert [layer.index for layer in layers.layers] == [0, 0, 1]
    assert [layer.pool for layer in layers.layers] == [pool.states, pool.kv, pool.states]
    attend = layers.bind(plan_of(case))
    with pytest.raises(ValueError, match="layer must attend, layer 2 has a state"):
        attend(2, case.q)
    parts, weights = None, None
    with pytest.raises(ValueError, match="layer must have a state, layer 1 attends"):
        attend.mix(1, parts, weights)
    with pytest.raises(ValueError, match="nodes must be given"):
        attend.mix(0, parts, weights)
    with pytest.raises(ValueError, match=r"pool.layers\[0\] must be the model's"):
        LayeredBackend.of("torch_native", [config, config, states], pool)
    with pytest.raises(UnsupportedError, match="deterministic layers with states"):
        LayeredBackend.of("torch_native", pool.layers, pool, deterministic=True)
    with pytest.raises(ValueError, match="pool must be a KVPool or a HybridPool, got a list"):
        LayeredBackend.of("torch_native", [config], [])
