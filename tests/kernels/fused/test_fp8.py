"""Float8 weights: quantisers and products against float64 of the numbers they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import ScalingType
from torch.utils._python_dispatch import TorchDispatchMode

from specattn.kernels.fused import (
    add_partials,
    add_rms_norm,
    embed_norm_pair,
    fp8,
    stream_fp8,
)
from specattn.kernels.fused.fp8 import RowsFormat, ScaledRows, ScaledWeight
from specattn.kernels.fused.gates import gate_heads
from tests.samples import half, on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
F8 = torch.float8_e4m3fn
# every finite e4m3 number, ascending, once
NUMBERS = torch.arange(256, dtype=torch.uint8).view(F8).double()
NUMBERS = NUMBERS[NUMBERS.isfinite()].unique()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double().cpu() - want.cpu()).norm() / want.norm())


def numbers_of(one: ScaledRows | ScaledWeight) -> torch.Tensor:
    """What is held, in float64, each scale looked up by its row and column."""
    scale = one.scale.double().cpu()
    if isinstance(one, ScaledRows):
        terms = one.values[:, : len(scale)].double().cpu()
        numbers = terms[0] + (terms[1] / 16 if len(terms) == 2 else 0)
        height = 1
    else:
        numbers, height = one.values.double().cpu(), one.height
    rows, columns = torch.arange(len(numbers)), torch.arange(numbers.shape[1])
    groups = columns // 128 if scale.shape[1] > 1 else columns * 0
    return numbers * scale[(rows // height)[:, None], groups[None]]


def nearest(x: torch.Tensor) -> torch.Tensor:
    """How far the nearest e4m3 number is from each of ``x``."""
    above = torch.searchsorted(NUMBERS, x.double()).clamp(1, len(NUMBERS) - 1)
    return torch.minimum((x - NUMBERS[above - 1]).abs(), (x - NUMBERS[above]).abs())


def check_scales(scale: torch.Tensor, x: torch.Tensor, height: int, width: int) -> None:
    """The largest number of every tile becomes 448."""
    for i, row in enumerate(scale.cpu().tolist()):
        for j, found in enumerate(row):
            tile = x[i * height : (i + 1) * height, j * width : (j + 1) * width]
            want = max(float(tile.abs().max()), 1e-10) / 448
            assert abs(found - want) <= 1e-6 * want, (i, j)


def check_layout(found: ScaledRows, groups: int, terms: int) -> None:
    """A group's scales lie side by side; those of second terms are a 16th."""
    padded = -(-len(found) // 16) * 16
    assert found.scales.shape == (terms, padded, groups)
    assert found.scales.movedim(2, 0).is_contiguous()
    for term, scale in enumerate(found.scales):
        assert scale[: len(found)].equal(found.scale / 16**term)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of all sizes, some rows far larger than others, one all zeros."""
    x = torch.randn(*shape) * torch.logspace(-4, 3, shape[0])[:, None]
    if shape[0] > 1:
        x[shape[0] // 2] = 0
    return x.to(DEVICE, dtype)


SHAPES = [(1, 128), (5, 72), (3, 576), (17, 520), (2, 1024)]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (130, 300)])
def test_weights_are_the_nearest_numbers(shape, blocks) -> None:
    weight = drawn(*shape)
    found = (fp8.scale_blocks if blocks else fp8.scale_channels)(weight)
    height, width = (128, 128) if blocks else (1, shape[1])
    assert found.scale.shape == (-(-shape[0] // height), -(-shape[1] // width))
    assert (found.height, found.values.dtype, found.values.shape) == (height, F8, shape)
    check_scales(found.scale, weight.cpu(), height, width)
    assert found.restored().equal(numbers_of(found).float().to(DEVICE))
    spread = found.scale.cpu().repeat_interleave(height, 0)[: shape[0]]
    spread = spread.repeat_interleave(width, 1)[:, : shape[1]]
    scaled = weight.cpu().double() / spread.double()
    assert ((found.values.cpu().double() - scaled).abs() <= nearest(scaled) + 1e-4).all()


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("blocks", [False, True])
def test_rows_are_the_nearest_numbers(implementation, dtype, shape, blocks, terms) -> None:
    wide = torch.full((shape[0], shape[1] + 3), torch.nan, dtype=dtype, device=DEVICE)
    x = wide[:, : shape[1]].copy_(drawn(*shape, dtype=dtype))
    groups = -(-shape[1] // 128) if blocks else 1
    found = fp8.scale_rows(x, RowsFormat(groups, terms))
    check_layout(found, groups, terms)
    assert (len(found), found.dtype, len(found.values)) == (shape[0], dtype, terms)
    assert found.scale.shape == (shape[0], groups)
    check_scales(found.scale, x.cpu().double(), 1, 128 if groups > 1 else shape[1])
    assert off(found.restored(), numbers_of(found)) < 1e-6
    width = 128 if groups > 1 else shape[1]
    spread = found.scale.cpu().double().repeat_interleave(width, 1)[:, : shape[1]]
    scaled = x.cpu().double() / spread
    first = found.values[0, : shape[0]].cpu().double()
    assert ((first - scaled).abs() <= nearest(scaled) + 1e-4).all()
    if terms == 2:
        left = (scaled - first) * 16
        second = found.values[1, : shape[0]].cpu().double()
        assert ((second - left).abs() <= nearest(left) + 2e-3).all()
        assert off(found.restored(), x.cpu().double()) < 1.5e-3


def test_both_quantisers_make_the_same_bits(dtype) -> None:
    from tests.implementations import using

    x = drawn(9, 520, dtype=dtype)
    for groups, terms in ((1, 1), (5, 1), (5, 2)):
        found = []
        for kind in ("naive", "triton"):
            with using(kind):
                found.append(fp8.scale_rows(x, RowsFormat(groups, terms)))
        one, other = found
        assert one.scale.equal(other.scale)
        assert one.values[:, :9].view(torch.uint8).equal(other.values[:, :9].view(torch.uint8))


def test_no_number_is_lost(implementation) -> None:
    """NaN and infinities make the row's product NaN, and no other row's."""
    x = torch.ones(4, 256, device=DEVICE)
    x[1, 3], x[2, 200] = torch.nan, torch.inf
    for groups in (1, 2):
        found = fp8.scale_rows(x, RowsFormat(groups)).restored().sum(1)
        assert found.isfinite().tolist() == [True, False, False, True]


def test_no_rows(implementation) -> None:
    found = fp8.scale_rows(torch.ones(0, 256, device=DEVICE), RowsFormat(2))
    assert (len(found), found.scale.shape) == (0, (0, 2))


@pytest.mark.parametrize("sizes", [(256, 128, 70), (192, 64, 64), (72, 24, 24), (5, 3, 130)])
@pytest.mark.parametrize("blocks", [False, True])
def test_parts_are_stacked_and_cut(sizes, blocks) -> None:
    """Also where a part ends inside a block."""
    scale = fp8.scale_blocks if blocks else fp8.scale_channels
    parts = [scale(drawn(size, 300)) for size in sizes]
    whole = ScaledWeight.stacked(parts)
    want = torch.cat([numbers_of(part) for part in parts])
    assert numbers_of(whole).equal(want)
    for first, end in ((0, sizes[0]), (sizes[0], None), (1, 4), (sizes[0] - 1, sum(sizes))):
        assert numbers_of(whole.rows(first, end)).equal(want[first:end])
    assert whole.rows(sizes[0]).values.data_ptr() == whole.values[sizes[0] :].data_ptr()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider tensor whose other columns are NaN."""
    wide = torch.full((shape[0], shape[1] + 16), 0xFF, dtype=torch.uint8, device=DEVICE).view(F8)
    return wide[:, : shape[1]] if dtype == F8 else wide.to(dtype)[:, : shape[1]]


def weight_for(shape: tuple[int, int], blocks: bool, terms: int, parts: int = 1) -> ScaledWeight:
    """A weight, of several parts, amid NaN."""
    scale = fp8.scale_blocks if blocks else fp8.scale_channels
    sizes = [shape[0] // parts] * (parts - 1)
    sizes.append(shape[0] - sum(sizes))
    found = [scale(torch.randn(size, shape[1], device=DEVICE), terms=terms) for size in sizes]
    whole = ScaledWeight.stacked(found)
    values = poisoned(shape, F8)
    values.view(torch.uint8).copy_(whole.values.view(torch.uint8))
    return ScaledWeight(values, whole.scale, whole.height, terms)


@pytest.fixture
def empty_is_nan(monkeypatch) -> None:
    """What is not written is NaN."""
    monkeypatch.setattr(
        fp8.torch, "empty", lambda *shape, **how: torch.full(shape, torch.nan, **how)
    )


LINEAR = [
    (1, 192, 128, 1),
    (3, 100, 72, 1),
    (5, 70, 1100, 2),  # parts of 35 rows: a scale for each row
    (16, 384, 576, 3),
    (20, 192, 520, 3),  # parts of 64
    (40, 130, 2080, 1),
    (70, 150, 1040, 1),  # two tiles of rows
]


@on_cpu(half, "implementation", "dtype", "rows", "blocks", "terms")
@pytest.mark.usefixtures("empty_is_nan")
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "out", "inner", "parts"), LINEAR)
def test_products(implementation, dtype, rows, out, inner, parts, blocks, terms) -> None:
    weight = weight_for((out, inner), blocks, terms, parts)
    original = torch.randn(rows, inner, device=DEVICE).to(dtype)
    x = fp8.scale_rows(original, weight.rows_format)
    # no row
    x.values.view(torch.uint8)[:, rows:] = 0xFF
    found = fp8.scaled_linear(x, weight)
    assert found.shape[1:] == (rows, out)
    assert found.dtype == (dtype if len(found) == 1 else torch.float32)
    # of exactly the numbers that both hold; a GPU sums 128 columns with fewer bits
    limit = (1.5e-4 if terms == 1 else 7e-4) if DEVICE == "cuda" else 1e-6
    if len(found) == 1:
        limit += {torch.float16: 5e-4, torch.bfloat16: 4e-3}.get(dtype, 0)
    assert off(found.double().sum(0), numbers_of(x) @ numbers_of(weight).T) < limit
    if terms == 2:
        want = original.double().cpu() @ numbers_of(weight).T
        assert off(found.double().sum(0), want) < limit + 1e-3


def as_on_hopper(*operands, output_dtype: torch.dtype) -> torch.Tensor:
    """What torch's product says of its operands, in float64."""
    x, weight, x_scale, x_kind, w_scale, w_kind = operands
    assert weight.stride(0) == 1
    assert x.is_contiguous()
    if x_kind is ScalingType.RowWise:
        assert w_kind is ScalingType.RowWise
        assert (x_scale.shape, w_scale.shape) == ((len(x), 1), (1, weight.shape[1]))
        assert x_scale.stride(1) == w_scale.stride(1) == 1
        spread = x_scale.double(), w_scale.double()
    else:
        kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        assert (x_kind, w_kind) == kinds
        assert x_scale.stride() == (1, len(x))
        assert len(x) % 4 == 0
        both = x_scale.double(), w_scale.double().repeat_interleave(128, 1)
        spread = both[0].repeat_interleave(128, 1), both[1].repeat_interleave(128, 0)
    product = (x.double() * spread[0]) @ (weight.double() * spread[1])
    return product.to(output_dtype)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [65, 80])
def test_many_rows_are_multiplied_by_torch(rows, blocks, terms, monkeypatch) -> None:
    monkeypatch.setattr(fp8, "scaled_mm", as_on_hopper)
    monkeypatch.setattr(fp8, "gluon_ok", lambda name, check, device: check(device) is None)
    scale = fp8.scale_blocks if blocks else fp8.scale_channels
    weight = scale(torch.randn(256, 512), terms=terms)
    x = fp8.scale_rows(torch.randn(rows, 512).bfloat16(), weight.rows_format)
    x.values.view(torch.uint8)[:, rows:] = 0xFF
    x.scales[:, rows:] = torch.nan
    assert fp8._suits_torch(x, weight)
    found = fp8._by_torch(x, weight)
    assert (found.shape, found.dtype) == ((terms, rows, 256), torch.bfloat16)
    assert off(found.double().sum(0), numbers_of(x) @ numbers_of(weight).T) < 4e-3
    # few rows are streamed; others are the Triton kernel's
    few = fp8.scale_rows(torch.randn(64, 512).bfloat16(), weight.rows_format)
    assert not fp8._suits_torch(few, weight)
    half = fp8.scale_rows(torch.randn(68, 512).half(), weight.rows_format)
    assert not fp8._suits_torch(half, weight)
    assert not fp8._suits_torch(x, weight.rows(0, 100))
    if blocks:
        assert not fp8._suits_torch(x, weight.of_height(64))
        odd = scale(torch.randn(256, 640), terms=terms)
        x = fp8.scale_rows(torch.randn(68, 640).bfloat16(), odd.rows_format)
        assert not fp8._suits_torch(x, odd)


class Launches(TorchDispatchMode):
    """The operations that would be launches: neither views nor new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [65, 256])
def test_torch_multiplies_many_rows_in_one_launch(rows, blocks, terms, monkeypatch) -> None:
    """What quantisers write is what its product reads: no copy is between them."""

    def multiply(x, weight, *_, output_dtype):
        return torch.empty(len(x), weight.shape[1], dtype=output_dtype)

    monkeypatch.setattr(fp8, "scaled_mm", multiply)
    weight = (fp8.scale_blocks if blocks else fp8.scale_channels)(torch.randn(256, 512))
    weight = replace(weight, terms=terms)
    x = fp8.scale_rows(torch.randn(rows, 512).bfloat16(), weight.rows_format)
    with Launches() as launches:
        fp8._by_torch(x, weight)
    assert launches.names == []


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [65, 300, 1024])
def test_products_of_many_rows(rows, blocks, terms) -> None:
    scale = fp8.scale_blocks if blocks else fp8.scale_channels
    weight = scale(torch.randn(6144, 4096, device="cuda"), terms=terms)
    x = fp8.scale_rows(torch.randn(rows, 4096, device="cuda").bfloat16(), weight.rows_format)
    found = fp8.scaled_linear(x, weight).double().sum(0)
    assert off(found, numbers_of(x) @ numbers_of(weight).T) < 6e-3


@pytest.mark.parametrize("how", [RowsFormat(1), RowsFormat(3), RowsFormat(3, 2)])
def test_norms_are_quantised_as_they_are_rounded(implementation, dtype, how) -> None:
    """To the bit what two launches make of them."""
    partials = torch.randn(3, 5, 270, device=DEVICE)
    stream, weight, added = (
        torch.randn(*size, device=DEVICE).to(dtype) for size in ((5, 270), (270,), (270,))
    )
    rows = torch.tensor([4, 0, 4], device=DEVICE)
    for residual, options in (
        (stream, {}),
        (stream, {"rows": rows, "added_weight": added}),
        (None, {"dtype": dtype}),
    ):
        where = {
            "residual_out": torch.full_like(stream[: 3 if "rows" in options else 5], torch.nan)
        }
        plain, total = add_rms_norm(partials, residual, weight, 1e-5, **options)
        want = fp8.scale_rows(plain, how)
        found, stream_out = fp8.add_norm_scaled(
            partials, residual, weight, 1e-5, how, **options, **where
        )
        assert stream_out is where["residual_out"]
        assert stream_out.equal(total)
        assert (found.dtype, len(found)) == (dtype, len(want))
        check_layout(found, *how)
        assert found.scale.equal(want.scale)
        assert found.restored().equal(want.restored())
    none = fp8.add_norm_scaled(partials[:, :0], stream[:0], weight, 1e-5, how)
    assert [len(one) for one in none] == [0, 0]


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize(
    ("count", "size", "blocks"), [(5, 384, True), (3, 128, True), (2, 72, False)]
)
def test_pairs_of_norms_are_quantised_as_they_are_rounded(
    implementation, dtype, count, size, blocks, chosen, terms, monkeypatch
) -> None:
    """To the bit what two launches make of them; groups of both halves are whole."""
    how = RowsFormat(2 * size // 128 if blocks else 1, terms)
    ids = torch.randint(0, 50, (count,), device=DEVICE)
    table, hidden = (drawn(n, size, dtype=dtype) for n in (50, 7 if chosen else count))
    rows = torch.randint(0, 7, (count,), device=DEVICE) if chosen else None
    weights = [torch.randn(size, device=DEVICE).to(dtype) for _ in range(2)]
    args = ids, table, hidden, *weights, 1e-5
    both, states = embed_norm_pair(*args, rows=rows)
    want = fp8.scale_rows(both, how)
    if implementation == "triton" and blocks:
        monkeypatch.setattr(fp8, "scale_rows", None)
        monkeypatch.setattr(fp8, "embed_norm_pair", None)
    found, given = fp8.embed_norm_pair_scaled(*args, how=how, rows=rows)
    assert given.equal(states)
    assert (found.dtype, found.values.shape) == (dtype, want.values.shape)
    check_layout(found, *how)
    assert found.scale.equal(want.scale)
    bits, same = (one.values[:, :count].view(torch.uint8) for one in (found, want))
    assert bits.equal(same)
    parts = table[ids], hidden if rows is None else hidden[rows]
    exact = [
        one.double() / (one.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
        for one, weight in zip(parts, weights, strict=True)
    ]
    assert off(numbers_of(found), torch.cat(exact, dim=1)) < (4e-2 if terms == 1 else 2.5e-3)


def test_no_pairs_of_norms(implementation) -> None:
    ids, table = torch.ones(0, dtype=torch.int64, device=DEVICE), torch.ones(3, 256, device=DEVICE)
    found, _ = fp8.embed_norm_pair_scaled(
        ids, table, table[:0], table[0], table[1], 1e-5, how=RowsFormat(4)
    )
    assert (len(found), found.values.shape) == (0, (1, 0, 512))


GATED = [(1, 128, 1), (5, 72, 1), (3, 576, 2), (17, 520, 3), (2, 1100, 1), (65, 2100, 1)]


@on_cpu(half, "implementation", "dtype", "rows", "blocks", "terms")
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "size", "split"), GATED)
def test_gated_rows_are_quantised_as_they_are_rounded(
    implementation, dtype, rows, size, split, blocks, terms, monkeypatch
) -> None:
    """To the bit what two launches make of them, and what float64 makes of them."""
    wide = torch.full((split, rows, 2 * size + 5), torch.nan, device=DEVICE)
    # a largest number passes over NaN
    wide[..., 2 * size] = 1e30
    partials = wide[:, :, : 2 * size]
    partials.copy_(torch.randn(split, rows, 2 * size) * 4)
    how = RowsFormat(-(-size // 128) if blocks else 1, terms)
    want = fp8.scale_rows(add_partials(partials, dtype, gated=True), how)
    if implementation == "triton":
        # one launch, of a kernel that reads nothing that a first one wrote
        monkeypatch.setattr(fp8, "scale_rows", None)
        monkeypatch.setattr(fp8, "add_partials", None)
    found = fp8.gated_scaled(partials, how, dtype)
    assert (found.dtype, found.values.shape) == (dtype, want.values.shape)
    check_layout(found, *how)
    assert found.scale.equal(want.scale)
    bits, same = (one.values[:, :rows].view(torch.uint8) for one in (found, want))
    assert bits.equal(same)
    gate, up = partials.double().cpu().sum(0).chunk(2, dim=1)
    check_scales(found.scale, (gate * gate.sigmoid() * up).to(dtype), 1, 128 if blocks else size)
    # one term: half a step of e4m3's three bits, at most
    limit = 4e-2 if terms == 1 else 2.5e-3
    assert off(numbers_of(found), gate * gate.sigmoid() * up) < limit


def test_no_gated_rows(implementation) -> None:
    found = fp8.gated_scaled(torch.ones(2, 0, 256, device=DEVICE), RowsFormat(1), torch.float32)
    assert (len(found), found.scale.shape) == (0, (0, 1))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_no_gated_number_is_lost(implementation, number) -> None:
    partials = torch.ones(1, 3, 512, device=DEVICE)
    partials[0, 1, 300] = number
    for groups in (1, 2):
        found = fp8.gated_scaled(partials, RowsFormat(groups), torch.float32)
        assert found.restored().sum(1).isfinite().tolist() == [True, False, True]


@on_cpu(half, "implementation", "dtype", "rows", "blocks", "terms")
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 128), (5, 72), (17, 520), (2, 1100), (65, 2100)])
def test_gated_heads_are_quantised_as_they_are_rounded(
    implementation, dtype, rows, size, blocks, terms, monkeypatch
) -> None:
    """To the bit what two launches make of them, and what float64 makes of them."""
    x = drawn(rows, size, dtype=dtype)
    wide = torch.full((rows, size + 7), torch.nan, dtype=dtype, device=DEVICE)
    gates = wide[:, :size].copy_(torch.randn(rows, size) * 3)
    how = RowsFormat(-(-size // 128) if blocks else 1, terms)
    want = fp8.scale_rows(gate_heads(x, gates), how)
    if implementation == "triton":
        monkeypatch.setattr(fp8, "scale_rows", None)
        monkeypatch.setattr(fp8, "gate_heads", None)
    found = fp8.gate_heads_scaled(x, gates, how)
    assert (found.dtype, found.values.shape) == (dtype, want.values.shape)
    check_layout(found, *how)
    assert found.scale.equal(want.scale)
    bits, same = (one.values[:, :rows].view(torch.uint8) for one in (found, want))
    assert bits.equal(same)
    exact = x.double().cpu() * gates.double().cpu().sigmoid()
    assert off(numbers_of(found), exact) < (4e-2 if terms == 1 else 2.5e-3)
    assert len(fp8.gate_heads_scaled(x[:0], gates[:0], how)) == 0
    with pytest.raises(ValueError, match="gates"):
        fp8.gate_heads_scaled(x, gates[:, 1:], how)


def shapes(rows: int, out: int, inner: int, *, blocks: bool, terms: int, height: int = 128):
    """Rows and a weight of which only the shapes matter."""
    groups = -(-inner // 128) if blocks else 1
    values, scale = torch.empty(out, inner, dtype=F8), torch.empty(-(-out // height), groups)
    weight = ScaledWeight(values, scale, height if blocks else 1, terms)
    padded = -(-rows // 16) * 16
    room = torch.empty(terms, padded, inner, dtype=F8)
    scales = torch.empty(groups, terms, padded).movedim(0, 2)
    return ScaledRows(room, scales, rows, torch.bfloat16), weight


def test_only_few_rows_of_what_tma_copies_are_streamed(monkeypatch) -> None:
    plain = {"blocks": True, "terms": 1}
    assert not stream_fp8.streams_scaled(*shapes(3, 256, 256, **plain))
    monkeypatch.setattr(stream_fp8, "ready", lambda device: True)
    assert stream_fp8.streams_scaled(*shapes(64, 256, 256, **plain))
    assert not stream_fp8.streams_scaled(*shapes(65, 256, 256, **plain))
    assert not stream_fp8.streams_scaled(*shapes(0, 256, 256, **plain))
    assert not stream_fp8.streams_scaled(*shapes(3, 256, 264, **plain))
    # scales of 32 rows; gates that end inside a block
    assert not stream_fp8.streams_scaled(*shapes(3, 256, 256, **plain, height=32))
    cut = shapes(3, 320, 256, **plain)
    assert stream_fp8.streams_scaled(*cut)
    assert not stream_fp8.streams_scaled(*cut, gated=True)
    assert stream_fp8.streams_scaled(*shapes(3, 320, 256, blocks=False, terms=1), gated=True)


@pytest.mark.parametrize(
    ("rows", "out", "inner", "terms", "gated", "want"),
    [
        # of 8B: rows of weights, shares, stages, tiles before the rows come, CTAs
        (16, 6144, 4096, 1, False, (64, 5, 5, 2, 2)),
        (64, 6144, 4096, 1, False, (48, 2, 8, 4, 1)),
        (5, 4096, 4096, 1, False, (64, 4, 11, 4, 1)),
        (32, 4096, 14336, 1, False, (64, 4, 10, 4, 1)),
        (1, 28672, 4096, 1, True, (56, 1, 5, 2, 2)),
        (64, 28672, 4096, 2, True, (56, 1, 6, 4, 1)),
        (17, 28672, 4096, 2, True, (56, 1, 8, 4, 1)),
        # a short weight is asked for at once
        (16, 1536, 1536, 1, False, (24, 3, 11, 11, 1)),
        # scales of all columns leave less for the ring
        (64, 28672, 57344, 1, True, (56, 1, 4, 4, 1)),
    ],
)
def test_tiles(rows, out, inner, terms, gated, want, monkeypatch) -> None:
    from specattn.kernels.fused import stream

    monkeypatch.setattr(stream, "multiprocessors", lambda device: 132)
    both = shapes(rows, out, inner, blocks=True, terms=terms)
    tile, step, split = stream_fp8._tile(*both, gated=gated)
    assert (step, split, tile.stages, tile.pace, tile.ctas_per_sm) == want


STREAMED = [
    (1, 6144, 1024),
    (3, 384, 528),
    (16, 320, 4096),
    (17, 4096, 4096),
    (33, 1000, 2064),
    (63, 28672, 512),
    (64, 6144, 4096),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("empty_is_nan")
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("kind", ["blocks", "halves", "channels"])
@pytest.mark.parametrize(("rows", "out", "inner"), STREAMED)
def test_streamed_products(rows, out, inner, kind, terms) -> None:
    if not stream_fp8.ready(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    if kind == "halves" and out % 128:
        pytest.skip("no blocks of 64 rows")
    weight = weight_for((out, inner), kind != "channels", terms)
    if kind == "halves":
        weight = weight.of_height(64)
        weight = ScaledWeight(
            weight.values, weight.scale * torch.rand_like(weight.scale), 64, terms
        )
    x = fp8.scale_rows(torch.randn(rows, inner, device="cuda").bfloat16(), weight.rows_format)
    x.values.view(torch.uint8)[:, rows:] = 0xFF
    exact = numbers_of(x) @ numbers_of(weight).T
    limit = 1.5e-4 if terms == 1 else 7e-4
    assert stream_fp8.streams_scaled(x, weight)
    parts = stream_fp8.stream_scaled(x, weight)
    rounded = 4e-3 if len(parts) == 1 else 0
    assert off(parts.double().sum(0), exact) < limit + rounded
    assert stream_fp8.stream_scaled(x, weight).equal(parts)
    if stream_fp8.streams_scaled(x, weight, gated=True):
        gate, up = exact.chunk(2, dim=1)
        found = stream_fp8.stream_scaled_gated(x, weight)
        assert off(found, gate * gate.sigmoid() * up) < limit + 4e-3
