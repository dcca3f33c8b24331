"""A Gluon kernel is used once it has proven itself, and only on a Hopper GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context

import pytest
import torch

from specattn.kernels.ahead import _Compiler
from specattn.kernels.attention import gluon
from specattn.kernels.gluon_guard import gluon_ok


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


@pytest.mark.usefixtures("on_hopper")
def test_the_first_call_on_a_device_decides(caplog: pytest.LogCaptureFixture) -> None:
    checked: list[torch.device] = []

    def fails(device: torch.device) -> None:
        checked.append(device)
        raise RuntimeError("no such instruction")

    one, two = torch.device("cuda:1"), torch.device("cuda:2")
    assert [gluon_ok("a", checked.append, one) for _ in range(2)] == [True] * 2
    assert [gluon_ok("b", fails, one) for _ in range(2)] == [False] * 2
    assert gluon_ok("a", checked.append, two)
    assert checked == [one, one, two]
    assert [r.message for r in caplog.records] == [
        "b does not work on a GPU, a Triton kernel takes its place: "
        "RuntimeError: no such instruction"
    ]


@pytest.mark.usefixtures("on_hopper")
def test_the_tree_kernel_is_replaced_where_its_check_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def off(device: torch.device) -> None:
        raise ArithmeticError("relative error 5.0e-01")

    monkeypatch.setattr(gluon, "check_gluon_tree", off)
    assert not gluon.serves(128, 128, torch.bfloat16, torch.device("cuda:0"))
    assert "gluon_tree does not work" in caplog.text
    assert "relative error 5.0e-01" in caplog.text


@pytest.mark.usefixtures("on_hopper")
def test_a_check_is_launched_where_launches_are_only_compiled() -> None:
    found: list[object] = []

    def step() -> None:
        _Compiler.active.set(_Compiler(ThreadPoolExecutor()))
        gluon_ok("c", lambda device: found.append(_Compiler.active.get()), torch.device("cuda:0"))

    copy_context().run(step)
    assert found == [None]


def test_no_other_device_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not gluon_ok("a", tried.append, torch.device("cuda:1"))
    assert not gluon_ok("a", tried.append, torch.device("cpu"))
    assert not tried
