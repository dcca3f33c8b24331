"""Fused forwards over SGLang's float8 weights, as they lie after loading on Hopper.

SGLang multiplies them on GPUs alone. Here its modules multiply in float64 what they would: rows
that are quantised as they come, and weights by the scales of SGLang's parameters.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import MethodType
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bench.engines.cells import QUANTISED
from bench.engines.sglang_side import PLUGIN
from specattn.config import FLOAT8
from specattn.errors import UnsupportedError
from tests.integrations.sglang import INSTALLED

if INSTALLED:
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.utils import convert_to_channelwise
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config

    from specattn.integrations.sglang.fused import fused_head, fused_target
    from specattn.models.fused.projection import Projection
    from specattn.models.fused.scaled import FORMATS, ScaledProjection, quantise
    from tests.integrations.sglang.modules import build, geometry, run, start
    from tests.integrations.sglang.test_fused import off, weights_of
    from tests.models.conftest import DenseAttend
    from tests.ranks import SIZE, on_ranks

pytestmark = [pytest.mark.sglang]

IDS = torch.tensor([5, 17, 3, 99, 42, 8, 61, 5, 5])
POSITIONS = torch.arange(40, 49)
# in 16 bits, what rounds otherwise moves numbers of e4m3 to the next one, a 16th away
CLOSE = 3e-6
# whole blocks of every part, as SGLang asks for
WHOLE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}


def stated(strategy: str, *, dynamic: bool = True) -> dict[str, Any]:
    """What compressed-tensors writes into a checkpoint's configuration."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = common | {"strategy": strategy, "dynamic": False}
    rows = common | {"strategy": "token", "dynamic": dynamic}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        rows |= {"strategy": "group", "group_size": 128}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {"config_groups": {"0": group}, "format": "float-quantized", "ignore": ["lm_head"]}


def config_of(kind: str) -> Any:
    """SGLang's configuration of a checkpoint."""
    if kind.startswith("compressed"):
        of_gpu = CompressedTensorsConfig.from_config(stated(kind.split()[1]))
        of_gpu._check_scheme_supported = lambda *_, **__: True
        return of_gpu
    if kind == "w8a8_fp8":
        return W8A8Fp8Config(is_checkpoint_fp8_serialized=True)
    block = [128, 128] if kind == "blocks" else None
    return Fp8Config(kind != "at load", "dynamic", weight_block_size=block)


def loaded(model: Any, kind: str) -> None:
    """Leave what loading leaves on Hopper.

    Of blocks, `Fp8LinearMethod.process_weights_after_loading` changes nothing there; of others it
    quantises by a kernel, or gives each row the scale of its part. The rest is SGLang's own code.
    """
    for part in model.modules():
        if not isinstance(part, LinearBase) or kind == "blocks":
            continue
        if kind == "at load":
            scale = part.weight.float().abs().amax(1, keepdim=True) / 448
            left = (part.weight / scale).to(FLOAT8).t(), scale.t().contiguous()
        elif kind == "scales of parts":
            left = part.weight.t(), convert_to_channelwise(part.weight_scale, part.logical_widths)
        else:
            part.quant_method.process_weights_after_loading(part)
            continue
        part.weight, part.weight_scale = (Parameter(one, requires_grad=False) for one in left)
        part.input_scale = None


def emulate(model: Any, *, blocks: bool) -> None:
    """Let SGLang's modules multiply in float64."""

    def apply(_: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        scale = getattr(layer, "weight_scale_inv", getattr(layer, "weight_scale", None)).double()
        weight = layer.weight.double()
        if blocks:
            rows, columns = (torch.arange(size) // 128 for size in weight.shape)
            weight = weight * scale[rows[:, None], columns]
        else:
            weight = weight.t() * scale.reshape(-1, 1)
        groups = x.double().unflatten(1, (-1, 128 if blocks else x.shape[1]))
        step = groups.abs().amax(2, keepdim=True).clamp(min=1e-10) / 448
        quantised = ((groups / step).to(FLOAT8).double() * step).flatten(1)
        out = quantised @ weight.t()
        return (out if bias is None else out + bias).to(x.dtype)

    for part in model.modules():
        if isinstance(part, LinearBase):
            part.quant_method.apply = MethodType(apply, part.quant_method)


def quantised_model(kind: str, family: str, **changes: Any) -> Any:
    changes = (WHOLE if "block" in kind else {}) | changes
    model = build(family, torch.float32, config_of(kind), **changes)
    loaded(model, kind)
    emulate(model, blocks="block" in kind)
    return model


KINDS = {
    "blocks": "qwen2",
    "compressed block": "qwen3",
    "compressed channel": "llama",
    "at load": "qwen2",
    # a scale for each part of a packed weight
    "scales of parts": "llama",
    "w8a8_fp8": "qwen3",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_is_sglangs_over_the_same_weights(kind) -> None:
    model = quantised_model(kind, KINDS[kind])
    layers = geometry(model, torch.float32)
    model.capture_aux_hidden_states, model.model.layers_to_capture = True, [2, 1]
    target = fused_target(model, layers, max_context_len=128)
    (first, *_) = target.blocks
    products = [first.qkv, first.o, first.feed.gate_up, first.feed.down]
    assert {type(one) for one in products} == {ScaledProjection}
    assert {one.terms for one in products} == {1}
    assert {one.height for one in products} == {128 if "block" in kind else 1}
    # what SGLang writes into its scales, the fused forward reads
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "weight_scale" in name:
                parameter.mul_(1.5)
    want, states = run(model, layers, IDS, POSITIONS)
    got = target.forward(IDS, POSITIONS, DenseAttend(layers).at(POSITIONS))
    assert off(got.logits, want) < CLOSE
    assert off(got.hidden_states, states) < CLOSE
    kept = {parameter.data_ptr() for parameter in model.parameters()}
    blocks = [weight for block in target.blocks for weight in weights_of(block)]
    scales = [one.scale for one in products]
    assert {one.data_ptr() for one in (*blocks, *scales)} <= kept
    assert all(one.weight.stride(1) == one.scale.stride(1) == 1 for one in products)


@pytest.mark.parametrize("kind", ["blocks", "compressed channel"])
def test_a_head_is_sglangs_over_the_same_weights(kind) -> None:
    model = quantised_model(kind, "eagle3", num_hidden_layers=1, draft_vocab_size=37)
    layers = geometry(model, torch.float32)
    head = fused_head(model, layers)
    assert type(head.blocks[0].qkv) is ScaledProjection
    features = torch.randn(len(IDS), head.feature_size)
    want, states = run(model, layers, IDS, POSITIONS, hidden_states=features)
    attend = DenseAttend(layers).at(POSITIONS)
    got = head.forward(IDS, head.combine(features), POSITIONS, attend)
    assert off(got.logits, want) < CLOSE
    assert off(got.hidden_states, states) < CLOSE


@pytest.mark.parametrize("kind", FORMATS if INSTALLED else [])
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
def test_a_plain_head_is_quantised_and_sglangs_stays(kind, own) -> None:
    changes = {"draft_vocab_size": 37} if own else {}
    model = build("eagle3", torch.float32, num_hidden_layers=1, **WHOLE, **changes)
    layers = geometry(model, torch.float32)
    before = [parameter.clone() for parameter in model.parameters()]
    plain = fused_head(model, layers)
    head = fused_head(model, layers, quantization=kind)
    for one, was in zip(products_of(head), products_of(plain), strict=True):
        expected = quantise(was, kind)
        assert type(one) is ScaledProjection
        assert one.weight.view(torch.uint8).equal(expected.weight.view(torch.uint8))
        assert (one.terms, one.height) == (expected.terms, expected.height)
        assert one.scale.equal(expected.scale)
    assert type(head.lm_head) is (ScaledProjection if own else Projection)
    features, found = torch.randn(len(IDS), head.feature_size), []
    for one in (plain, head):
        attend = DenseAttend(layers).at(POSITIONS)
        found.append(one.forward(IDS, one.combine(features), POSITIONS, attend).logits)
    assert 1e-3 < off(*found) < 0.15
    assert all(map(torch.equal, before, model.parameters()))


def test_float8_heads_stay_what_they_are() -> None:
    model = quantised_model("blocks", "eagle3", num_hidden_layers=1)
    layers = geometry(model, torch.float32)
    first = fused_head(model, layers, quantization="fp8").blocks[0]
    assert first.qkv.weight.data_ptr() == model.model.layers[0].self_attn.qkv_proj.weight.data_ptr()
    assert fused_head(model, layers, quantization="fp8-weights").blocks[0].o.terms == 2
    with pytest.raises(UnsupportedError, match="'fp8-channel' is not how it is quantised"):
        fused_head(model, layers, quantization="fp8-channel")


def products_of(head: Any) -> list[Any]:
    (block,) = head.blocks
    return [block.qkv, block.o, block.feed.gate_up, block.feed.down, head.fc]


def work(rank: int, folder: Any) -> dict[str, Any]:
    """Return how far a rank's fused target is from SGLang's on the same ranks."""
    # a torch for CUDA brings NCCL, which ranks on a CPU would start
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"
    start(rank, SIZE)
    found: dict[str, Any] = {}
    for kind in ("blocks", "compressed channel"):
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
        model = quantised_model(kind, "llama", attention_bias=True, **heads)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "weight_scale" in name:
                    parameter.mul_(1 + rank / 3)
        layers = geometry(model, torch.float32)
        target = fused_target(model, layers, max_context_len=128)
        want, states = run(model, layers, IDS, POSITIONS)
        got = target.forward(IDS, POSITIONS, DenseAttend(layers).at(POSITIONS))
        found[kind] = [off(got.logits, want), off(got.hidden_states, states)]
        block = target.blocks[0]
        found[f"{kind} held"] = [list(one.weight.shape) for one in (block.o, block.feed.down)]
    with pytest.raises(ValueError, match="is not divisible by weight quantization block") as caught:
        quantised_model("blocks", "llama")
    found["cut"] = str(caught.value)
    return found


def test_ranks_fuse_what_each_of_them_has(tmp_path) -> None:
    codes, found = on_ranks(work, tmp_path)
    assert codes == [0] * SIZE
    for kind, hidden in {"blocks": 256, "compressed channel": 64}.items():
        for one in found:
            assert max(one[kind]) < 4 * CLOSE
            width = hidden if kind == "blocks" else 64
            assert one[f"{kind} held"] == [[hidden, width], [hidden, 256]]
    # SGLang itself refuses blocks that a rank would have a part of
    assert "weight quantization block" in found[0]["cut"]


@pytest.mark.parametrize("weights", ["fp8", "fp8-channel"])
def test_what_the_bench_states_is_what_sglang_reads(weights) -> None:
    stated = QUANTISED[weights]
    of_bench = {"fp8": Fp8Config, "fp8-channel": CompressedTensorsConfig}[weights]
    config = of_bench.from_config(stated)
    config._check_scheme_supported = lambda *_, **__: True
    kind = {"fp8": "blocks", "fp8-channel": "compressed channel"}[weights]
    model = build("llama", torch.float32, config, **WHOLE)
    loaded(model, kind)
    target = fused_target(model, geometry(model, torch.float32), max_context_len=128)
    assert target.blocks[0].o.height == {"fp8": 128, "fp8-channel": 1}[weights]


def test_the_bench_draws_what_sglang_would_fill() -> None:
    program = (
        "import torch; from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.model_loader import loader; model = torch.nn.Module()\n"
        "one = torch.zeros(64, 64, dtype=torch.float8_e4m3fn)\n"
        "model.weight = torch.nn.Parameter(one, requires_grad=False)\n"
        "loader.initialize_dummy_weights(model); print('STD', float(model.weight.float().std()))"
    )
    paths = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("STD"))
    assert 95 < float(line.removeprefix("STD")) < 105


def marlin(part: Any) -> None:
    part.quant_method.use_marlin = True


def mxfp8(part: Any) -> None:
    part.quant_method.use_mxfp8 = True


def static(part: Any) -> None:
    part.input_scale = Parameter(torch.ones(()), requires_grad=False)


def packed(part: Any) -> None:
    part.weight_scale_inv = Parameter(part.weight_scale_inv.int(), requires_grad=False)


def powers(part: Any) -> None:
    part.weight_scale_inv.format_ue8m0 = True


def rows_by_powers(part: Any) -> None:
    part.quant_method.quant_config.scale_fmt = "ue8m0"


def other_blocks(part: Any) -> None:
    part.quant_method.quant_config.weight_block_size = [64, 128]
    part.quant_method.weight_block_size = [64, 128]


def one_scale(part: Any) -> None:
    part.weight_scale = Parameter(torch.ones(1), requires_grad=False)


def alone(part: Any) -> None:
    part.scheme = type("CompressedTensorsW8A16Fp8", (), {})()


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (marlin, "blocks", "FP8 weights in Marlin's order"),
        (mxfp8, "blocks", "MXFP8 weights"),
        (static, "blocks", "FP8 weights of static activation scales"),
        (static, "compressed channel", "FP8 weights of static activation scales"),
        (packed, "blocks", "weights of torch.float8_e4m3fn with torch.int32 scales"),
        (powers, "blocks", "FP8 weights of ue8m0 scales"),
        (rows_by_powers, "blocks", "FP8 weights of ue8m0 activation scales"),
        (other_blocks, "blocks", r"FP8 weights in blocks \[64, 128\], not \[128, 128\]"),
        (one_scale, "compressed channel", r"FP8 weights of \[1\] scales, not one per row"),
        (one_scale, "at load", r"FP8 weights of \[1\] scales, not one per row"),
        (alone, "compressed channel", "weights of CompressedTensorsW8A16Fp8"),
    ],
)
def test_weights_of_another_kind_are_refused_by_name(change, kind, reason) -> None:
    model = quantised_model(kind, "llama")
    change(model.model.layers[1].mlp.gate_up_proj)
    with pytest.raises(UnsupportedError, match=f"gate_up_proj has {reason}"):
        fused_target(model, geometry(model, torch.float32), max_context_len=128)
