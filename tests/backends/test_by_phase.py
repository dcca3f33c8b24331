"""A backend per phase: each phase binds its own, and the results are those of one backend."""

from __future__ import annotations

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.backends import available
from specattn.backends.base import Capabilities
from specattn.backends.by_phase import by_phase
from specattn.backends.torch_native import TorchNativeBackend
from specattn.backends.triton import TritonBackend
from specattn.batch import ForwardMode
from specattn.cache.kv_pool import KVPool
from specattn.config import AttnConfig, SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.plan import AttnInputs, AttnPlan, ExtendPlan
from tests.backends.spies import spy
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import CONFIG, MODES, inputs, part_of, world

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = AttnConfig(4, 2, 64)
TREE = SpecConfig(3, 2, 6, max_context_len=64, max_num_reqs=2)


def layered(backend) -> LayeredBackend:
    return LayeredBackend(backend, [HEADS], KVPool([HEADS], 64, DEVICE), DEVICE)


def plan_of(mode: ForwardMode, batch: int = 2) -> AttnPlan:
    layout = CONFIG.layout(mode)
    table = torch.zeros(3, 256, dtype=torch.int32, device=DEVICE)
    if mode is not ForwardMode.DRAFT_DECODE:
        return AttnPlan.over(layout, table, AttnInputs.alloc(batch, layout, DEVICE))
    args = AttnInputs.alloc(batch, layout, DEVICE).tensors()
    return AttnPlan(layout, table, tail_positions=args["positions"], **args)


def test_every_phase_binds_its_own_backend_and_no_other():
    """R02: capturing a forward touches exactly what its replays use."""
    prefill, decode, verify = spy("a"), spy("b"), spy("c")
    composite = by_phase(prefill=prefill, decode=decode, verify=verify)
    assert composite.name == "a,b,c"
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    engine = Engine(target, draft, TREE, backend=composite)
    engine.generate([Request([3, 1, 4, 1, 5], max_new_tokens=4, ignore_eos=True)])
    assert set(prefill.binds) == {"prompt", "prefill"}
    assert set(decode.binds) <= {"draft", "decode"}
    assert "draft" in decode.binds
    assert set(verify.binds) == {"verify"}
    for one in (prefill, decode, verify):
        assert one.ran, one.name


def test_verification_follows_decoding_unless_told_otherwise():
    one, other = spy("a"), spy("b")
    composite = by_phase(prefill=one, decode=other)
    assert composite.name == "a,b"
    layers = layered(composite)
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE, ForwardMode.DRAFT_DECODE):
        layers.bind(plan_of(mode))
    assert (one.binds, other.binds) == ([], ["verify", "decode", "draft"])


def test_a_backend_given_twice_is_made_once():
    composite = by_phase(prefill="torch_native", decode="triton", verify="torch_native")
    layer = composite(HEADS, DEVICE)
    served = [layer.serving(plan_of(mode)) for mode in (*MODES, ForwardMode.DECODE)]
    assert len({id(backend) for backend in served}) == 2


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("parts", [("torch_native", "triton"), ("triton", "torch_native")])
def test_a_composite_gives_what_its_parts_give(parts, mode):
    lens = [5, 0, 70]
    values = inputs(mode, lens, 1)
    results = []
    for backend in ("torch_native", ",".join(parts)):
        one = world(backend, [4])
        one.poison(lens)
        results.append(one.run(mode, lens, values))
    first, second = results
    for name, value in first.items():
        assert not second[name].isnan().any(), name
        torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", ["fa3,flashinfer", "flashinfer,triton,fa3"])
@pytest.mark.gpu
def test_libraries_by_phase(name, mode):
    reasons = available(name, AttnConfig(4, 2, 64, dtype=torch.bfloat16), DEVICE)
    if reasons:
        pytest.skip("; ".join(reasons))
    lens = [5, 0, 170]
    values, results = inputs(mode, lens, 1), []
    for backend in ("triton", name):
        one = world(backend, [4], dtype=torch.bfloat16, window=-1)
        one.poison(lens)
        results.append(one.run(mode, lens, values))
        assert one.decoder.runner.recorded(part_of(mode))
    for key, want in results[0].items():
        if want.is_floating_point() and want.numel():
            error = (results[1][key].float() - want.float()).norm() / want.float().norm()
            assert error < 2e-2, f"{key} is off by {error:.2e}"


def test_greedy_speculation_changes_no_token():
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    one, other = spy("a"), spy("b")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    for tbo in (False, True):
        backend = by_phase(prefill=one, decode=by_phase(prefill=other, decode=other))
        engine = Engine(target, draft, TREE, backend=backend, tbo=tbo)
        requests = [Request(prompt[:n], max_new_tokens=12, ignore_eos=True) for n in (8, 3)]
        for request, result in zip(requests, engine.generate(requests), strict=True):
            assert list(result.tokens) == dense_greedy(target, list(request.prompt), 12)


def test_a_phase_is_recorded_if_its_backend_can_be():
    """One part without graphs costs the others nothing."""
    layers = layered("torch_native,triton")
    found = {mode: layers.bind(plan_of(mode)).graphs for mode in (*MODES, ForwardMode.DECODE)}
    assert found == {
        ForwardMode.TARGET_VERIFY: True,
        ForwardMode.DRAFT_DECODE: True,
        ForwardMode.DRAFT_EXTEND: False,
        ForwardMode.DECODE: True,
    }
    assert layered("triton").bind(plan_of(ForwardMode.DRAFT_EXTEND)).graphs
    assert not layered("torch_native").bind(plan_of(ForwardMode.DECODE)).graphs
    nested = layered(by_phase(prefill="torch_native,triton", decode="torch_native,triton"))
    assert nested.bind(plan_of(ForwardMode.TARGET_VERIFY)).graphs
    assert not nested.bind(plan_of(ForwardMode.DRAFT_EXTEND)).graphs


@pytest.mark.parametrize(
    ("backend", "modes"),
    [
        ("torch_native", []),
        ("torch_native,triton", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE]),
        ("triton,torch_native,triton", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND]),
    ],
)
@pytest.mark.gpu
def test_exactly_the_phases_that_can_be_are_recorded(backend, modes):
    runner = world(backend, [2]).decoder.runner
    assert [mode for mode in MODES if runner.recorded(part_of(mode))] == modes


def test_a_composite_promises_what_holds_where_it_is_asked():
    half = (torch.float16, torch.bfloat16)
    prompts = spy("prompts", trees=False, lists=False, graphs=True)
    lists = spy("lists", extend=False, host_plan=True, window=False, graphs=True, dtypes=half)
    trees = spy("trees", extend=False, lists=False, graphs=True)
    found = by_phase(prefill=prompts, decode=lists, verify=trees).capabilities
    assert found == Capabilities(graphs=True, host_plan=True, window=False, dtypes=half)
    assert not by_phase(prefill=trees, decode=prompts).capabilities.trees


def test_a_backend_without_prompts_cannot_be_the_one_for_prompts():
    decoding = spy("decoding", extend=False)
    composite = by_phase(prefill=decoding, decode="torch_native")
    assert composite.reasons(HEADS, DEVICE) == ["prefill decoding: it serves no prompts"]
    assert not by_phase(prefill="torch_native", decode=decoding).reasons(HEADS, DEVICE)


def test_prompts_go_to_the_backend_for_prompts():
    one, other = spy("a"), spy("b")
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    indptr = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    plan = ExtendPlan(none[None], none.long(), none, indptr, none[None], 1, 1)
    layered(by_phase(prefill=one, decode=other)).bind(plan)
    assert (one.binds, other.binds) == (["prompt"], [])


def test_classes_are_backends():
    composite = by_phase(prefill=TorchNativeBackend, decode=TritonBackend)
    assert composite == by_phase(prefill="torch_native", decode="triton")
