"""Gates and columns in another order: kernels and twins against float64."""

from __future__ import annotations

import pytest
import torch

from specattn.kernels.fused.gates import gate_heads, gated_rms_norm, gather_columns
from tests.kernels.fused.test_fused import DEVICE, DTYPES, EPS, check, norm, random, random_partials


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.mark.parametrize(("split", "rows", "size"), [(1, 5, 700), (3, 5, 52), (1, 65, 2100)])
def test_columns_come_in_the_order_asked_for(implementation, dtype, split, rows, size) -> None:
    partials = random_partials(split, rows, size, dtype=dtype)
    for columns in (torch.randperm(size), torch.tensor([size - 1, 0, 0]), torch.arange(0)):
        columns = columns.to(DEVICE)
        found = gather_columns(partials, columns, dtype)
        want = partials.double().sum(0)[:, columns]
        assert found.shape == want.shape
        assert found.dtype == dtype
        if len(columns):
            check(found, want)


@pytest.mark.parametrize(("split", "heads", "size"), [(1, 3, 128), (3, 2, 24)])
def test_heads_are_normed_and_gated(implementation, dtype, split, heads, size) -> None:
    x = random(5, heads, size, dtype=dtype)
    gates = random_partials(split, 5, heads * size, dtype=dtype)
    weight = random(size, dtype=dtype)
    gate = gates.double().sum(0)
    want = norm(x, weight).flatten(1) * gate * gate.sigmoid()
    check(gated_rms_norm(x, gates, weight, EPS), want)
    assert gated_rms_norm(x[:0], gates[:, :0], weight, EPS).shape == (0, heads * size)


@pytest.mark.parametrize(("rows", "size"), [(5, 600), (5, 24), (65, 2100)])
def test_heads_are_gated(implementation, dtype, rows, size) -> None:
    x, gates = random(rows, size, dtype=dtype), random_partials(1, rows, size, dtype=dtype)[0]
    check(gate_heads(x, gates), x.double() * gates.double().sigmoid())
    assert gate_heads(x[:0], gates[:0]).shape == (0, size)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(2, 3, 8, device=DEVICE), torch.zeros(8, device=DEVICE)
    gates = torch.zeros(1, 2, 24, device=DEVICE)
    with pytest.raises(ValueError, match="gates must"):
        gated_rms_norm(x, gates[:, :1], weight, EPS)
    with pytest.raises(ValueError, match="weight must"):
        gated_rms_norm(x, gates, weight[:4], EPS)
    with pytest.raises(ValueError, match="gates must"):
        gate_heads(x.flatten(1), gates[0, :, :8])
    with pytest.raises(ValueError, match="columns must"):
        gather_columns(gates, torch.zeros(3, dtype=torch.int32, device=DEVICE), torch.float32)
