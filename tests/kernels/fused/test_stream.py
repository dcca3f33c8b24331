"""Streamed products against torch's, and where they are used."""

from __future__ import annotations

import weakref

import pytest
import torch

from specattn.kernels.fused import stream

BF16, HALF = torch.bfloat16, torch.float16


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_only_few_rows_of_16_bits_on_hopper() -> None:
    weight = torch.randn(8, 16, dtype=HALF)
    assert not stream.streams(torch.randn(3, 16, dtype=HALF), weight)
    assert not stream.streams(torch.randn(129, 16, dtype=HALF), weight)
    assert not stream.streams(torch.randn(160, 16, dtype=HALF), weight, gated=True)
    assert not stream.streams(torch.randn(3, 16), weight.float())


@pytest.mark.parametrize(
    ("rows", "steps", "split", "nbytes", "pace"),
    [
        (16, 32, 4, 2 << 24, 1),  # an output projection: 6 of a CTA's 8 tiles are there before x is
        (16, 32, 2, 3 << 24, 2),  # queries, keys and values: 6 of 16
        (64, 32, 4, 2 << 24, 2),  # the wider tile's ring holds 4 of 8
        (65, 32, 4, 2 << 24, 2),  # and the widest 3
        (128, 6, 1, 1 << 20, 3),
        (16, 6, 1, 1 << 20, 6),  # a small model's
    ],
)
def test_pace(rows, steps, split, nbytes, pace) -> None:
    assert stream._pace(stream.stream_tile(rows), steps, split, nbytes) == pace


@pytest.mark.parametrize(
    ("rows", "out", "inner", "gains"),
    [
        (128, 4096, 4096, True),
        (64, 6144, 4096, True),  # halves of 48 rows in two parts
        (65, 6144, 4096, False),
        (65, 24576, 4096, True),  # of 48 rows, too, in one part
        (128, 512, 192, True),
    ],
)
def test_what_is_streamed_beyond_64_rows(rows, out, inner, gains, monkeypatch) -> None:
    monkeypatch.setattr(stream, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(stream, "ready", lambda device: True)
    x, weight = torch.empty(rows, inner, dtype=BF16), torch.empty(out, inner, dtype=BF16)
    assert stream.streams(x, weight) is gains
    assert stream.streams(x, weight, gated=True)


@pytest.mark.parametrize(
    ("rows", "gated", "streamed"),
    [
        (128, False, True),
        (129, False, False),
        (129, True, True),
        (160, True, True),
        (161, True, False),
    ],
)
def test_more_rows_are_streamed_only_if_gated(rows, gated, streamed, monkeypatch) -> None:
    monkeypatch.setattr(stream, "multiprocessors", lambda device: 132)
    for name in ("ready", "ready_wide"):
        monkeypatch.setattr(stream, name, lambda device: True)
    x, weight = torch.empty(rows, 64, dtype=BF16), torch.empty(17920, 64, dtype=BF16)
    assert stream.streams(x, weight, gated=gated) is streamed


@pytest.mark.parametrize("wide", [False, True])
def test_each_kernel_is_asked_for_alone(wide, monkeypatch) -> None:
    """One may be wrong where the other is right."""
    monkeypatch.setattr(stream, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(stream, "ready", lambda device: not wide)
    monkeypatch.setattr(stream, "ready_wide", lambda device: wide)
    weight = torch.empty(17920, 64, dtype=BF16)
    for rows in (128, 129):
        x = torch.empty(rows, 64, dtype=BF16)
        assert stream.streams(x, weight, gated=True) is ((rows > 128) is wide)


@pytest.mark.parametrize(
    ("width", "mixed"),
    [
        (4864, 0),  # Qwen2.5-0.5B: no multiprocessor has 64 gates
        (8192, 0),  # Llama-3.2-1B: nor more than that
        (8960, 8),  # Qwen2.5-1.5B: 125 CTAs
        (11008, 24),
        (12672, 32),
        (12673, 0),
        (14336, 0),  # of 8B
    ],
)
def test_every_multiprocessor_takes_its_gates_at_once(width, mixed) -> None:
    assert stream.mixed_gates(width, 132) == mixed


@pytest.mark.parametrize(
    ("rows", "out", "inner", "step", "split"),
    [
        (16, 6144, 4096, 48, 2),  # of 8B: no weight of it is short
        (16, 4096, 14336, 64, 4),
        (16, 960, 576, 16, 1),  # SmolLM2-135M: 30 CTAs read it, not 8
        (64, 1152, 896, 16, 1),  # Qwen2.5-0.5B
        (16, 896, 4864, 48, 9),
        (16, 2048, 1536, 24, 3),  # Qwen2.5-1.5B: 129 CTAs, not 66
        (16, 151936, 1536, 64, 1),
    ],
)
def test_short_weights_have_short_tiles(rows, out, inner, step, split, monkeypatch) -> None:
    monkeypatch.setattr(stream, "multiprocessors", lambda device: 132)
    x, weight = torch.empty(rows, inner, dtype=BF16), torch.empty(out, inner, dtype=BF16)
    assert stream._splits(x, weight, stream.stream_tile(rows)) == (step, split)


def test_a_weight_is_described_once_where_it_lies() -> None:
    """The host took 50 us for every product; what is kept must not outlive the weight."""
    weight = torch.nn.Parameter(torch.randn(64, 128).to(HALF), requires_grad=False)
    boxes = stream.weight_boxes(weight, 128)
    assert [one.block_shape for one in boxes] == [[32, 128], [16, 128], [8, 128]]
    assert [one.base.data_ptr() for one in boxes] == [weight.data_ptr()] * 3
    assert stream.weight_boxes(weight, 128) is boxes
    weight.data = torch.randn(64, 128).to(HALF)
    moved = stream.weight_boxes(weight, 128)
    assert [one.base.data_ptr() for one in moved] == [weight.data_ptr()] * 3
    gone = weakref.ref(weight)
    narrow = stream.weight_boxes(weight, 64)
    assert [one.block_shape for one in narrow] == [[32, 64], [16, 64], [8, 64]]
    assert stream.weight_boxes(weight, 128) is moved
    del boxes, moved, narrow, weight
    assert gone() is None, "without a garbage collection"


@pytest.mark.parametrize("pace", [0, 7])
def test_the_pace_is_of_the_ring(pace) -> None:
    with pytest.raises(ValueError, match=r"pace must be 1\.\.6"):
        stream.StreamTile(16, 6, pace=pace)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "out", "inner", "dtype"),
    [
        (1, 6144, 1024, BF16),
        (16, 300, 72, HALF),
        (33, 1000, 4096, BF16),
        (64, 128, 8200, HALF),
        (5, 6144, 4096, BF16),
        (40, 6144, 4096, HALF),
        (20, 20000, 520, BF16),
        (65, 300, 72, HALF),
        (80, 4096, 4096, BF16),
        (97, 1000, 520, HALF),
        (128, 20000, 520, BF16),
        (4, 960, 576, BF16),
        (40, 2048, 1536, BF16),
        (100, 1152, 896, HALF),
    ],
)
def test_streamed_products(rows, out, inner, dtype) -> None:
    device = torch.device("cuda")
    if not stream.ready(device):
        pytest.skip("needs a Hopper GPU")
    # rows of both lie in wider tensors whose other columns are not theirs
    weight = torch.full((out, inner + 8), torch.nan, dtype=dtype, device=device)[:, :inner]
    weight.normal_(std=inner**-0.5)
    x = torch.randn(rows, inner, device=device).to(dtype)
    assert stream.streams(x, weight)
    exact = x.double() @ weight.double().T
    parts = stream.stream_linear(x, weight)
    limit = 1e-5 if len(parts) > 1 else 4e-3
    assert off(parts.double().sum(0), exact) < limit
    gate, up = exact.chunk(2, dim=1)
    assert off(stream.stream_gated(x, weight), gate * gate.sigmoid() * up) < 4e-3
    assert stream.stream_linear(x, weight).equal(parts)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "dtype"), [(129, BF16), (144, BF16), (150, HALF), (160, HALF)])
@pytest.mark.parametrize(
    ("width", "inner", "mixed"),
    [
        (260, 72, 24),  # fewer steps than stages
        (403, 520, 8),
        (500, 1536, 32),
        (131, 2056, 16),
        (70, 200, 8),  # one CTA
    ],
)
def test_gated_products_of_more_rows(width, inner, mixed, rows, dtype) -> None:
    """Among NaN, twice with the same bits."""
    device = torch.device("cuda")
    if not stream.ready_wide(device):
        pytest.skip("needs a Hopper GPU")
    weight = torch.full((2 * width, inner + 8), torch.nan, dtype=dtype, device=device)[:, :inner]
    weight.normal_(std=inner**-0.5)
    x = torch.randn(rows, inner, device=device).to(dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    around = torch.full((2, rows + 8, width + 16), torch.nan, dtype=dtype, device=device)
    inside = around[:, :rows, :width]
    for out in inside:
        stream._launch_wide(x, weight, out, mixed)
        assert off(out, gate * gate.sigmoid() * up) < 4e-3
    assert inside[0].equal(inside[1])
    assert around.isnan().sum() == around.numel() - inside.numel()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "out", "inner"), [(129, 22016, 896), (150, 17920, 1536)])
def test_more_rows_are_streamed(rows, out, inner) -> None:
    device = torch.device("cuda")
    if not stream.ready_wide(device):
        pytest.skip("needs a Hopper GPU")
    weight = torch.randn(out, inner, dtype=BF16, device=device) * inner**-0.5
    x = torch.randn(rows, inner, dtype=BF16, device=device)
    assert stream.streams(x, weight, gated=True)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    assert off(stream.stream_gated(x, weight), gate * gate.sigmoid() * up) < 4e-3
