"""Merges of attention results over disjoint keys."""

from __future__ import annotations

import math

import pytest
import torch

from specattn.kernels.attention import merge_lse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INT = {"dtype": torch.int32, "device": DEVICE}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("implementation")
def test_it_weighs_by_lse_and_reads_no_empty_result(dtype: torch.dtype, in_place: bool) -> None:
    batch, q_len, heads, dim = 4, 3, 5, 20
    prefix_keys = torch.tensor([0, 7, 0, 1], **INT)
    tail_keys = torch.tensor([[1, 0, 3], [1, 2, 0], [2, 0, 0], [0, 1, 1]], **INT)
    partials = torch.randn(2, batch, q_len, heads, dim, device=DEVICE).to(dtype)
    # FA3's layout, heads before queries
    lse = (20 * torch.randn(2, batch, heads, q_len, device=DEVICE)).transpose(2, 3)
    seen = torch.stack([(prefix_keys > 0)[:, None].expand(batch, q_len), tail_keys > 0])
    partials[~seen] = math.nan
    lse[~seen] = math.nan
    weights = lse.double().masked_fill(~seen[..., None], -math.inf)
    total = torch.logsumexp(weights, 0)
    weights = (weights - total.masked_fill(total == -math.inf, 0)).exp()[..., None]
    want = (weights * partials.double().masked_fill(~seen[..., None, None], 0)).sum(0)
    out = partials[0] if in_place else torch.full_like(partials[0], math.nan)
    got = torch.full((batch, q_len, heads), math.nan, device=DEVICE)
    merge_lse(partials[0], lse[0], prefix_keys, partials[1], lse[1], tail_keys, out, got)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.double(), total, rtol=1e-5, atol=1e-5)
    blind = ~seen.any(0)
    assert blind.any()
    assert not out[blind].any()
    if not in_place:
        again = torch.full_like(out, math.nan)
        merge_lse(partials[0], lse[0], prefix_keys, partials[1], lse[1], tail_keys, again, None)
        assert torch.equal(again, out)
        found, log2 = torch.full_like(got, math.nan), lse / math.log(2)
        merge_lse(
            partials[0],
            log2[0],
            prefix_keys,
            partials[1],
            log2[1],
            tail_keys,
            again,
            found,
            base2=True,
        )
        torch.testing.assert_close(again.double(), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found.double(), total, rtol=1e-5, atol=1e-5)
