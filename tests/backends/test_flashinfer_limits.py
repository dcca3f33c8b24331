"""What FlashInfer cannot serve is refused in words; what its plans need is known ahead."""

from __future__ import annotations

import itertools

import pytest
import torch

from specattn.backends import load_backend
from specattn.backends.flashinfer import FlashInferBackend
from specattn.backends.flashinfer_plan import MAX_TILING, Grid
from specattn.config import AttnConfig
from specattn.errors import UnsupportedError
from tests.backends import fake_flashinfer as fake
from tests.backends.flashinfer_cases import BF16, CUDA, DEVICE, Live, case_of
from tests.oracle import tolerances_of

REASONS = FlashInferBackend.reasons


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    fake.install(monkeypatch)


def test_lengths_on_the_host_are_needed_and_checked():
    live = Live(*case_of("tree"))
    with pytest.raises(UnsupportedError, match="needs seq_lens_cpu, got None"):
        live.bound.schedule(None)
    width = live.case.args["req_to_token"].shape[1]
    for lens, wrong in (
        ([1, 2], r"must be \[4\] on the host, got \[2\]"),
        ([1, 2, 3, -1], rf"0\.\.{width}, got -1\.\.3"),
        ([1, 2, 3, width + 1], rf"0\.\.{width}, got 1\.\.{width + 1}"),
    ):
        with pytest.raises(ValueError, match=wrong):
            live.bound.schedule(torch.tensor(lens, dtype=torch.int32))
    live.replay()  # and a good call works afterwards
    live.verdict()


def test_outputs_that_flashinfer_would_misread_are_refused():
    live = Live(*case_of("decode"))
    live.schedule()
    live.bound.fill()
    case = live.case
    wide = torch.empty(*case.out.shape[:-1], 2 * case.out.shape[-1], dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match="out must be contiguous"):
        live.bound.run(case.q, case.k_cache, case.v_cache, wide[..., ::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_rounded_weights_explain_the_lse(dtype):
    """What FA2 does to a row sum, on the CPU: it stays within the bound, and comes near it."""
    logits = torch.randn(40_000, 5, dtype=torch.float64)
    top = logits.amax(1, keepdim=True)
    weights = torch.exp(logits - top)
    off = (weights.to(dtype).double().sum(1).log() - weights.sum(1).log()).abs().max()
    assert off <= tolerances_of("flashinfer", dtype).lse
    assert off > tolerances_of("flashinfer", dtype).lse / 3


def test_reasons_name_the_limits():
    assert load_backend("flashinfer") is FlashInferBackend
    device = torch.device(DEVICE)
    odd = AttnConfig(4, 2, 80, v_head_dim=40, sm_scale=1e-5)
    found = "; ".join(REASONS(odd, device))
    for limit in (
        "dtype must be float16 or bfloat16",
        "head_dim must be 64, 128 or 256, got 80",
        "v_head_dim must equal head_dim 80, got 40",
        "sm_scale must be at least 0.001",
    ):
        assert limit in found
    if CUDA:
        assert not REASONS(AttnConfig(7, 1, 256, dtype=BF16), device)
    else:
        assert "FlashInfer needs a CUDA device, got cpu" in found


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("specattn.backends.paged.installed", lambda module: False)
    assert "flashinfer is not installed" in REASONS(None, torch.device("cpu"))[0]


def test_tiles_fit_the_uniform_q_len_and_workspaces_flashinfers_rules():
    """A batch of short requests is not planned with the tile of one long request."""
    for batch, q_len, heads, dim in itertools.product(
        (1, 3, 16, 64, 256), (1, 4, 9, 64), ((32, 8), (8, 8), (7, 1), (16, 1)), (64, 128, 256)
    ):
        config = AttnConfig(*heads, dim, dtype=BF16)
        grid = Grid.recorded(config, batch, q_len, fake.PROCESSORS)
        rows = [q_len] * batch + [0] * (grid.requests - batch)
        keys = [4096 + q_len] * batch + [0] * (grid.requests - batch)
        tile, floats, ints = fake.cut(rows, keys, batch * q_len, heads, dim, -1, graph=True)
        assert (tile, grid.tile) == (grid.tile, tile)
        assert floats <= grid.float_bytes
        assert ints <= grid.int_bytes
        if grid.float_bytes <= MAX_TILING and grid.requests > batch:
            assert tile == fake.tile_of(q_len * heads[0] // heads[1], dim)
    assert Grid.recorded(AttnConfig(32, 8, 128), 8, 4, fake.PROCESSORS).tile == 16
