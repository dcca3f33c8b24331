"""Layers with sinks: who serves them, and what a model's layers take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.backends import available, backend_names, choose_backend, load_backend
from specattn.backends.by_phase import by_phase
from specattn.cache.kv_pool import KVPool
from specattn.config import AttnConfig
from specattn.errors import UnsupportedError
from specattn.testing.session import config_of, plan_of
from tests.oracle import check, make_tree_case

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = AttnConfig(4, 2, 32)
SINKS = replace(HEADS, sinks=True)
SERVING = {"triton", "triton_sharing", "torch_native"}


def test_sinks_are_refused_by_name_where_they_are_not_declared():
    for name in backend_names():
        declared = load_backend(name).capabilities.sinks
        assert declared == (name in SERVING), name
        refusal = "it has no attention sinks"
        assert (refusal in available(name, SINKS, CPU)) != declared
        assert refusal not in available(name, HEADS, CPU)
    assert choose_backend("auto", [HEADS, SINKS], CPU).name == "torch_native"
    with pytest.raises(UnsupportedError, match="prefill flex: it has no attention sinks"):
        choose_backend("flex,triton", [SINKS], CPU)
    with pytest.raises(ValueError, match="sinks must be True or False, got 1"):
        replace(HEADS, sinks=1)


def layered(case, backend, layers):
    """Layers over copies of a case's pool, bound to its plan."""
    caches = [[cache.clone() for _ in layers] for cache in (case.k_cache, case.v_cache)]
    pool = KVPool.from_external(layers, *caches)
    return LayeredBackend(backend, layers, pool, DEVICE).bind(plan_of(case))


@pytest.mark.parametrize(
    "backend",
    ["torch_native", "triton", by_phase(prefill="torch_native", decode="triton")],
    ids=lambda backend: getattr(backend, "name", backend),
)
def test_layers_take_their_own_sinks(backend):
    case = make_tree_case([33, 0, 70, 5], sinks=torch.float32, device=DEVICE)
    with_sinks = config_of(case)
    attend = layered(case, backend, [with_sinks, replace(with_sinks, sinks=False), with_sinks])
    attend.fill()
    slots = case.args["tail_slots"].flatten().long()
    k, v = case.k_cache[slots].clone(), case.v_cache[slots].clone()
    drawn = [case.sinks, None, case.sinks.flip(0).contiguous()]
    for layer, sinks in enumerate(drawn):
        case.sinks = sinks
        given = {} if sinks is None else {"sinks": sinks}
        case.out = attend(layer, case.q, k, v, **given)
        check(case, case.expected(), lse=False)


def test_a_layers_sinks_are_checked_before_anything_is_written():
    case = make_tree_case([33], sinks=torch.float32, device=DEVICE)
    config = config_of(case)
    attend = layered(case, "torch_native", [config, replace(config, sinks=False)])
    q, k = case.q, torch.zeros_like(case.k_cache[:4])
    before = attend.layers[0].pool.k[0].clone()
    for layer, sinks, message in (
        (0, None, r"sinks must be \[4\] floats in layer 0, got None"),
        (1, case.sinks, r"sinks must be None in layer 1, got \[4\]$"),
        (0, case.sinks[:3], r"sinks must be \[4\] float32"),
        (0, case.sinks.double(), "float16 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(layer, q, k, k, sinks)
    assert torch.equal(attend.layers[0].pool.k[0].nan_to_num(7), before.nan_to_num(7))
