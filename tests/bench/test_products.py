"""The comparison of products: its flow, without a GPU."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from bench import products

draw = torch.randn


@pytest.fixture(autouse=True)
def _small(monkeypatch) -> None:
    small = {"qkv": (384, 256, False), "gate_up": (512, 256, True)}
    monkeypatch.setattr(products, "PRODUCTS", small)
    monkeypatch.setattr(products, "READ", 3e5)
    monkeypatch.setattr(products.torch, "randn", lambda *shape, device: draw(*shape))

    def record(calls, count):
        calls()
        return SimpleNamespace(median=2.0 * count)

    monkeypatch.setattr(products, "record", record)
    monkeypatch.setattr(products, "replay_in_turn", lambda *_: None)


@pytest.mark.parametrize("name", ["qkv", "gate_up"])
def test_every_way_is_compared_and_timed(name) -> None:
    cells = products.measured(name, 16, Namespace(whole=True, rounds=1))
    found = {cell["way"] for cell in cells}
    ours = {"fp8", "fp8-channel", "fp8-weights"}
    assert found >= {"bf16"} | ours | {f"{one}, rows too" for one in ours}
    assert {(cell["product"], cell["rows"]) for cell in cells} == {(name, 16)}


def test_a_wrong_product_is_noticed(monkeypatch) -> None:
    call = products.call
    monkeypatch.setattr(products, "call", lambda *given, gated: 1.02 * call(*given, gated=gated))
    with pytest.raises(AssertionError, match=r"qkv, 16 rows, bf16: off by 2\.0e-02"):
        products.measured("qkv", 16, Namespace(whole=False, rounds=1))
