"""FlexAttention, through the conformance kit; and compiled, where torch can compile it."""

from __future__ import annotations

import logging
import shutil
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from specattn.backends import flex
from specattn.backends.flex import FlexBackend, eager_reason
from specattn.config import AttnConfig
from specattn.testing.plugin import backend_suite
from specattn.testing.session import config_of, plan_of
from tests.oracle import check, make_extend_case, make_tree_case
from tests.samples import half_of_kit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = torch.device(DEVICE)
# graphs are the same; their code for a CPU takes a quarter of a minute
INDUCTOR = pytest.param("inductor", marks=() if DEVICE == "cuda" else pytest.mark.whole)
COMPILERS = [INDUCTOR] if DEVICE == "cuda" else ["aot_eager", INDUCTOR]


class EagerFlex(FlexBackend):
    """What the kit runs: every geometry would be compiled anew.

    Masks read numbers without gradients in mind, which would take nine tenths of the time.
    """

    compiled = False

    def attend(self, *args, **named):
        reads = "torch._dynamo._trace_wrapped_higher_order_op.mod_index"
        with mock.patch(reads, torch.ops.aten.index):
            return super().attend(*args, **named)


test_flex = half_of_kit(backend_suite(EagerFlex, DEVICE, "quick", evicts=True))

FORM = {"head_dim": 64, "device": DEVICE}


def cases(**form):
    """Trees, chains and prompts, none of them shaped like another."""
    form = FORM | form
    yield make_tree_case([0, 300], q_len=7, seed=1, **form)
    yield make_tree_case([33, 5], mode="chain", q_len=1, seed=2, **form)
    yield make_tree_case([130, 7, 0, 64], mode="draft", q_len=4, tail_len=12, seed=3, **form)
    yield make_tree_case([9, 70], q_len=70, seed=4, **form)
    yield make_extend_case([(0, 17), (5, 1), (130, 40)], seed=6, **form)


def attend(case, *, lse: bool):
    backend = FlexBackend(config_of(case), HERE)
    assert backend.eager_because is None
    bound = backend.bind(plan_of(case))
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse if lse else None)
    assert backend.eager_because is None, backend.eager_because
    check(case, case.expected(), lse=lse)


@pytest.mark.slow
@pytest.mark.skipif(eager_reason(HERE) is not None, reason=str(eager_reason(HERE)))
@pytest.mark.parametrize("compiler", COMPILERS)
def test_one_compiled_kernel_serves_every_plan_and_length(compiler, monkeypatch):
    """And no window of its own: what differs is an input, not a constant."""
    compiled = torch.compile(flex._attention, dynamic=True, fullgraph=True, backend=compiler)
    monkeypatch.setattr(flex, "_compiled_attention", lambda: compiled)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for options in ({}, {"window_left": 9}):
        for case in cases(**options):
            attend(case, lse=DEVICE == "cuda")
    # Triton's kernel may be compiled anew where sizes begin to be divisible
    assert counters["stats"]["unique_graphs"] - before <= (3 if DEVICE == "cuda" else 1)


@pytest.mark.gpu
def test_caps_single_requests_and_groups_compile():
    for options in ({"logit_cap": 1.5}, {"heads": (6, 2)}):
        for case in list(cases(**options))[::2]:
            attend(case, lse=True)
    attend(make_tree_case([300], q_len=9, **FORM), lse=False)


def test_without_a_compiler_it_runs_eagerly_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.INFO, "specattn.backends.flex"):
        backend = FlexBackend(AttnConfig(4, 2, 64), HERE)
    assert "is found" in str(backend.eager_because)
    assert "runs eagerly" in caplog.text


@pytest.mark.skipif(DEVICE == "cuda", reason="is of CPUs")
def test_a_cpu_is_slow_and_says_so_once(caplog):
    flex._warn_of_cpus.cache_clear()
    case = make_tree_case([4], q_len=2, **FORM)
    bound = EagerFlex(config_of(case), HERE).bind(plan_of(case))
    assert not caplog.text, "a command may still refuse another argument, in one line"
    for _ in range(2):
        bound.run(case.q, case.k_cache, case.v_cache, case.out)
    assert caplog.text.count("FlexAttention runs on the CPU, which is slow") == 1


def test_what_does_not_compile_runs_eagerly_from_then_on(monkeypatch, caplog):
    def fails():
        def kernel(*args):
            raise torch._dynamo.exc.Unsupported("a graph break")

        return kernel

    monkeypatch.setattr("specattn.backends.flex._compiled_attention", fails)
    monkeypatch.setattr("specattn.backends.flex.eager_reason", lambda device: None)
    case = make_tree_case([40, 3], q_len=5, **FORM)
    backend = FlexBackend(config_of(case), HERE)
    for lse in (None, case.lse):
        backend.bind(plan_of(case)).run(case.q, case.k_cache, case.v_cache, case.out, lse)
    check(case, case.expected())
    assert backend.eager_because == "it does not compile: a graph break"
    assert caplog.text.count("runs eagerly from now on") == 1
