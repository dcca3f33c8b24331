"""Recorded graphs are on the device before they are launched."""

from __future__ import annotations

import pytest
import torch

from specattn.cuda_graph import driver
from specattn.cuda_graph.recorder import Recorder, instantiate

pytestmark = pytest.mark.gpu


def test_a_recorded_graph_is_uploaded_before_its_first_launch(monkeypatch):
    number, calls, real = torch.zeros(3, device="cuda"), [], driver.call

    def call(name, *args):
        calls.append((name, *args))
        real(name, *args)

    monkeypatch.setattr(driver, "call", call)
    graph = Recorder().record(lambda: number.add_(1)).graph
    stream = torch.cuda.current_stream().cuda_stream
    assert calls[-1] == ("cuGraphUpload", graph.raw_cuda_graph_exec(), stream)
    before = number.clone()
    graph.replay()
    assert torch.equal(number, before + 1)


def test_a_graph_may_be_instantiated_again():
    number = torch.zeros(3, device="cuda")
    graph = Recorder().record(lambda: number.add_(1)).graph
    before = number.clone()
    for _ in range(2):
        instantiate(graph)
        graph.replay()
    assert torch.equal(number, before + 2)


def test_what_the_driver_refuses_is_raised_with_its_number():
    with pytest.raises(RuntimeError, match=r"^cuGraphUpload failed with CUDA error 1$"):
        driver.call("cuGraphUpload", 0, torch.cuda.current_stream().cuda_stream)


def test_calls_of_the_driver_are_known_by_name():
    assert driver.has("cuGraphUpload")
    assert not driver.has("cuGraphUnheardOf")
