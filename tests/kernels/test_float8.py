"""Stores and moves of float8 (e4m3) pools."""

from __future__ import annotations

import pytest
import torch

from specattn.kernels.cache import commit_kv, store_kv
from tests.implementations import using

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16, F8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
NUMBERS = torch.arange(256, dtype=torch.uint8).view(F8).float()


@pytest.mark.parametrize("dtype", [F32, F16])
def test_stored_numbers_times_the_scale_are_the_numbers(
    implementation: str, dtype: torch.dtype
) -> None:
    """Every finite e4m3 number, and what lies beyond the largest."""
    finite = NUMBERS[NUMBERS.isfinite()].view(-1, 1, 2).to(DEVICE, dtype)
    k, v = finite * 4, torch.full_like(finite, -500.0)
    slots = torch.randperm(len(finite), device=DEVICE).to(torch.int32)[:, None]
    pools = [torch.zeros(len(finite), 1, 2, device=DEVICE).to(F8) for _ in range(2)]
    store_kv(k, v, *pools, slots, k_scale=4.0, v_scale=1.0)
    assert torch.equal(pools[0].float()[slots[:, 0].long()], finite.float())
    assert (pools[1].float() == -448).all()


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The e4m3 number that is nearest to each of ``x``, the even one of two."""
    ordered = NUMBERS[NUMBERS.isfinite()].unique().double()
    # zeros are one here; the rank of a positive number has the parity of its mantissa
    x = x.double().clamp(-448, 448)
    above = torch.searchsorted(ordered, x).clamp(1, len(ordered) - 1)
    low, high = ordered[above - 1], ordered[above]
    rank = above - len(ordered) // 2
    tie_up = rank % 2 == 0
    up = (x - low > high - x) | ((x - low == high - x) & tie_up)
    return torch.where(up, high, low)


@pytest.mark.parametrize(
    # the interpreter does not carry from the mantissa into the exponent
    "kind",
    ["naive", pytest.param("triton", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_rounding_is_to_nearest_even_and_nan_stays(kind: str, dtype: torch.dtype) -> None:
    k = (torch.randn(300, 2, 24) * 10 ** (torch.rand(300, 2, 24) * 7 - 4)).to(dtype)
    # halfway between two numbers, of either parity, and below the smallest one
    k[0, 0, :8] = torch.tensor([17, 19, -17, -19, 2**-10, 3 * 2**-10, 440, 1e4]).to(dtype)
    v = k[..., :10].clone()
    v[0] = float("nan")
    slots = torch.arange(300, dtype=torch.int32, device=DEVICE)[:, None]
    pools = [torch.zeros(300, 2, width, device=DEVICE).to(F8) for width in (24, 10)]
    with using(kind):
        store_kv(k.to(DEVICE), v.to(DEVICE), *pools, slots, k_scale=1.0, v_scale=0.25)
    assert torch.equal(pools[0].cpu().double(), nearest(k))
    got = pools[1].cpu().double()
    assert got[0].isnan().all()
    assert torch.equal(got[1:], nearest(v[1:].double() * 4))


def test_a_commit_copies_bytes(implementation: str) -> None:
    pools = [
        torch.randint(0, 256, (2, 20, 2, width), dtype=torch.uint8, device=DEVICE).view(F8)
        for width in (24, 10)
    ]
    want = [pool.view(torch.uint8).clone() for pool in pools]
    tail = torch.tensor([[7, 3, 11, 1, 9, 4]], dtype=torch.int32, device=DEVICE)
    for bits in want:
        bits[:, [3, 11]] = bits[:, [11, 4]]
    commit_kv(*pools, tail, torch.tensor([[0, 2, 5, -1]], dtype=torch.int32, device=DEVICE))
    for pool, bits in zip(pools, want, strict=True):
        assert torch.equal(pool.view(torch.uint8), bits)
