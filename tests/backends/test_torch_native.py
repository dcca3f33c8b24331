"""Layers in torch share what their queries see, for one forward."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial, wraps

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.cache.kv_pool import KVPool
from specattn.config import FLOAT8, AttnConfig, KVScales
from specattn.kernels.attention import reference
from specattn.testing.cases import make_extend_case, make_lists_case, make_tree_case
from specattn.testing.session import config_of, plan_of
from tests.oracle import check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = {
    "tree": partial(make_tree_case, [33, 0, 70, 5]),
    "csr": partial(make_lists_case, [33, 0, 70], topk=2, step=2),
    "extend": partial(make_extend_case, [(33, 5), (0, 30), (70, 1)]),
}


def counted(monkeypatch, name: str) -> list[int]:
    """Note the window of every call of a function of `reference`."""
    windows: list[int] = []
    find = getattr(reference, name)

    @wraps(find)
    def noting(**options):
        windows.append(options["window_left"])
        return find(**options)

    monkeypatch.setattr(reference, name, noting)
    return windows


def attention(case, configs):
    """Layers over copies of a case's pool, bound to its plan."""
    pool = KVPool.from_external(
        configs, *([cache.clone() for _ in configs] for cache in (case.k_cache, case.v_cache))
    )
    return LayeredBackend("torch_native", configs, pool, DEVICE).bind(plan_of(case))


@pytest.mark.parametrize("kind", CASES)
def test_a_window_is_looked_at_once_per_forward(monkeypatch, kind) -> None:
    windows = counted(monkeypatch, f"{kind}_views")
    case = CASES[kind](device=DEVICE)
    config = config_of(case)
    local = replace(config, window_left=9)
    attend = attention(case, [config, local, local, config, config])
    for _ in range(2):
        windows.clear()
        attend.fill()
        for layer, own in enumerate([config, local, local, config, config]):
            case.out = attend(layer, case.q)
            case.window_left = own.window_left
            check(case, case.expected(), lse=False)
        assert windows == [-1, 9]


def test_layers_with_scales_and_sinks_share_it_too(monkeypatch) -> None:
    windows = counted(monkeypatch, "tree_views")
    case = make_tree_case([33, 0], device=DEVICE)
    config = AttnConfig(4, 2, 32, dtype=torch.float16, kv_dtype=FLOAT8, sinks=True)
    scales = [KVScales(0.5, 2.0), KVScales(2.0, 0.25)]
    pool = KVPool([config] * 2, len(case.k_cache), DEVICE, scales=scales)
    attend = LayeredBackend("torch_native", pool.layers, pool, DEVICE).bind(plan_of(case))
    attend.fill()
    q = torch.randn(len(case.q), 4, 32, device=DEVICE).half()
    for layer in range(2):
        attend(layer, q, sinks=torch.randn(4, device=DEVICE))
    assert windows == [-1]


def test_it_is_looked_at_after_a_draft_has_grown() -> None:
    """Words that are written after `fill` count, and the next `fill` brings new ones."""
    case = make_tree_case([33, 0, 70], device=DEVICE)
    words = case.args["tail_words"]
    full, alone = (
        words.clone(),
        torch.ones_like(words) << torch.arange(words.shape[1], device=DEVICE).view(1, -1, 1),
    )
    attend = attention(case, [config_of(case)] * 2)
    words.copy_(full)
    for before, after in ((alone, full), (full, alone)):
        words.copy_(before)
        attend.fill()
        words.copy_(after)
        for layer in range(2):
            case.out = attend(layer, case.q)
            check(case, case.expected(), lse=False)


def test_a_forward_that_nobody_filled_sees_its_own_lengths() -> None:
    """As where a wrapper keeps `fill` to itself."""
    case = make_tree_case([33, 70], device=DEVICE)
    attend = attention(case, [config_of(case)] * 2)
    lens = case.args["seq_lens"]
    for longer in ([33, 70], [20, 5], [33, 70]):
        lens.copy_(torch.tensor(longer))
        for layer in range(2):
            case.out = attend(layer, case.q)
            check(case, case.expected(), lse=False)


def test_plans_of_one_backend_see_their_own_keys() -> None:
    """As layers of a window pool do, which read another plan in the same forward."""
    cases = [make_tree_case([33, 70], device=DEVICE), make_tree_case([70, 33], device=DEVICE)]
    config = config_of(cases[0])
    pool = KVPool.from_external(
        [config] * 2, *([getattr(case, name) for case in cases] for name in ("k_cache", "v_cache"))
    )
    layered = LayeredBackend("torch_native", [config] * 2, pool, DEVICE)
    bound = [layered.bind(plan_of(case)) for case in cases]
    for layer, (attend, case) in enumerate(zip(bound, cases, strict=True)):
        case.out = attend(layer, case.q)
        check(case, case.expected(), lse=False)


def test_nothing_found_outlives_the_next_fill_or_forward() -> None:
    case = make_tree_case([33, 70], device=DEVICE)
    config = config_of(case)
    layered = LayeredBackend(
        "torch_native",
        [config],
        KVPool.from_external([config], [case.k_cache], [case.v_cache]),
        DEVICE,
    )
    one, other = layered.bind(plan_of(case)), layered.bind(plan_of(case))
    found = []
    for attend in (one, other, one):
        attend(0, case.q)
        assert all(view() is None for view in found)
        sight = attend.bounds[0].sight
        found = [weakref.ref(tensor) for view in sight.views for tensor in view[1:3]]
        assert len(found) == 2
    other.fill()
    assert all(view() is None for view in found)
