"""Float8 targets and heads: what they hold and compute, how they are made, what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from specattn import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import ModelError
from specattn.kernels.fused.fp8 import scale_blocks, scale_channels, scale_rows
from specattn.models import FusedTarget, HFTarget, fuse, load_draft, load_lm_draft
from specattn.models.fused import scaled
from specattn.models.fused.block import GatedFeed
from specattn.models.fused.projection import Projection
from specattn.models.fused.readers import UnreadError, projection_of
from specattn.models.fused.scaled import FORMATS, ScaledLinear, ScaledProjection, quantise
from specattn.models.quantisation import quantise_model
from tests.implementations import using
from tests.models.heads import VD, eagle3_tensors, write
from tests.samples import half, on_cpu, sampled

if TYPE_CHECKING:
    from pathlib import Path

F8 = torch.float8_e4m3fn
PROMPTS = [[5, 17, 3, 99, 42, 8, 61], [23], [7, 7, 80, 12, 55, 31, 2, 64, 19, 28, 77]]
LENGTH = 7
# two blocks and a part of one; keys and values end inside a block
SHAPE = {"hidden_size": 144, "intermediate_size": 200, "num_hidden_layers": 4}
STATED = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]}
IN, OUT, TOKENS = 264, 300, 5


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def weight_of(one: ScaledProjection) -> torch.Tensor:
    """The numbers in float64, each scale looked up by its row and column."""
    rows, columns = torch.arange(len(one.weight)), torch.arange(one.weight.shape[1])
    groups = columns // 128 if one.scale.shape[1] > 1 else columns * 0
    return one.weight.double() * one.scale.double()[(rows // one.height)[:, None], groups[None]]


def quantised(x: torch.Tensor, one: ScaledProjection) -> torch.Tensor:
    """What a projection reads of rows ``[T, K]``, in float64."""
    found = []
    for tile in x.double().split(128 if one.scale.shape[1] > 1 else x.shape[1], dim=1):
        scale = tile.abs().amax(1, keepdim=True) / 448
        first = (tile / scale).to(F8).double()
        rest = ((tile / scale - first) * 16).to(F8).double() / 16
        found.append(scale * (first + (rest if one.terms == 2 else 0)))
    return torch.cat(found, dim=1)


@on_cpu(half, "path", "kind", "bias")
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_method_of_a_projection(kind, bias) -> None:
    plain = Projection(torch.randn(OUT, IN) / 16, torch.randn(OUT) if bias else None)
    one, x = quantise(plain, kind), torch.randn(TOKENS, IN)
    want = quantised(x, one) @ weight_of(one).T
    alone = want
    if bias:
        want = want + plain.bias.double()
    assert off(one.product(x), want) < 1e-6
    assert off(one.parts(x).sum(0), want) < 1e-6
    gate, up = want.chunk(2, dim=-1)
    assert off(one.gated(x), gate * gate.sigmoid() * up) < 1e-6
    for first, end in ((3, None), (2, 9), (128, 256)):
        assert off(one.rows(first, end).product(x), want[:, first:end]) < 1e-6
    assert off(one.without_bias().product(x), alone) < 1e-6
    # over blocks, and inside of them
    inside = torch.arange(OUT).view(-1, 4).flip(1).flatten()
    for order, height in ((torch.randperm(OUT), 1), (inside, one.height)):
        moved = one.reordered(order)
        assert (moved.height, off(moved.product(x), want[:, order]) < 1e-6) == (height, True)
    assert (one.in_features, one.out_features, one.dtype) == (IN, OUT, None)
    scales = {"fp8-channel": OUT}.get(kind, 3 * 3)
    assert one.nbytes == IN * OUT + 4 * scales
    both = Projection.stacked([one.rows(0, 150), one.rows(150)])
    assert type(both) is ScaledProjection
    assert off(both.product(x), want) < 1e-6
    # and it is near what it was made of; of quantised weights alone, nothing else is lost
    assert off(alone, x.double() @ plain.weight.double().T) < 6e-2
    lost = off(alone, x.double() @ weight_of(one).T)
    assert lost < 1e-3 if kind == "fp8-weights" else 1e-2 < lost < 6e-2


@on_cpu(half, "path", "kind", "plain_gates")
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("plain_gates", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_gates_quantise_for_the_product_that_follows(kind, plain_gates, monkeypatch) -> None:
    """No launch of its own quantises what a quantised projection reads."""
    gates, down = Projection(torch.randn(2 * OUT, IN) / 16), Projection(torch.randn(IN, OUT) / 16)
    feed = GatedFeed(
        gate_up=gates if plain_gates else quantise(gates, kind), down=quantise(down, kind)
    )
    x = torch.randn(TOKENS, IN)
    want = feed.down.parts(feed.gate_up.gated(x))
    rows = x if plain_gates else scale_rows(x, feed.rows_format)
    monkeypatch.setattr(scaled, "scale_rows", None)
    assert feed(rows).equal(want)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_large_weight_is_quantised_in_parts(kind) -> None:
    plain = Projection(torch.randn(2 * 64 * 128 + 200, 130), combine=torch.neg, size=7)
    one = quantise(plain, kind)
    scale = scale_channels if kind == "fp8-channel" else scale_blocks
    whole = scale(plain.weight)
    assert one.weight.view(torch.uint8).equal(whole.values.view(torch.uint8))
    assert one.scale.equal(whole.scale)
    assert (one.height, one.combine, one.size) == (whole.height, torch.neg, 7)


def test_what_is_lent_is_the_projections_own_memory() -> None:
    plain = [nn.Linear(IN, 40), nn.Linear(IN, 60)]
    modules = [ScaledLinear(quantise(projection_of(part), "fp8")) for part in plain]
    x = torch.randn(2, TOKENS, IN)
    want = [module(x) for module in modules]
    one = Projection.stacked([projection_of(module) for module in modules])
    one.lend(modules)
    for module, before in zip(modules, want, strict=True):
        assert module(x).equal(before)
        assert module.weight.untyped_storage().data_ptr() == one.weight.data_ptr()


def test_a_conversion_of_the_model_converts_no_numbers() -> None:
    module = ScaledLinear(quantise(projection_of(nn.Linear(IN, OUT)), "fp8"))
    x, before = torch.randn(TOKENS, IN), module.weight.view(torch.uint8).clone()
    want = module(x)
    model = nn.Sequential(module, nn.Linear(OUT, 3)).half()
    assert (module.bias.dtype, model[1].weight.dtype) == (torch.float16, torch.float16)
    assert (module.weight.dtype, module.scale.dtype) == (F8, torch.float32)
    assert module.weight.view(torch.uint8).equal(before)
    assert off(module(x.half()), want) < 1e-2
    meta = model.to("meta", torch.bfloat16)[0]
    assert (meta.weight.dtype, meta.scale.device.type) == (F8, "meta")


def fp8_folder(folder: Path, model: nn.Module, **changes: Any) -> Path:
    """Save a model as the FP8 checkpoints of Qwen and DeepSeek lie on the Hub."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith("proj.weight")]:
        scaled = scale_blocks(tensors[key])
        tensors |= {key: scaled.values, f"{key}_scale_inv": scaled.scale}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = STATED | changes
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def in_float64(model: nn.Module) -> nn.Module:
    """The model in float64, each float8 product by what it reads and holds."""

    class Exact(nn.Module):
        def __init__(self, one: ScaledProjection) -> None:
            super().__init__()
            self.one = one

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = quantised(x.flatten(0, -2), self.one) @ weight_of(self.one).T
            if self.one.bias is not None:
                found = found + self.one.bias.double()
            return found.unflatten(0, x.shape[:-1])

    for name, part in list(model.named_modules()):
        if isinstance(part, ScaledLinear):
            model.set_submodule(name, Exact(projection_of(part)))
    return model.double()


@on_cpu(half, "family", "kind", "path")
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in FORMATS),
        ("qwen2", "fp8"),
        ("qwen3", "fp8-weights"),
        ("gemma3_text", "fp8-channel"),
    ],
)
def test_fused_and_unfused_compute_the_quantised_model(tiny, dense, family, kind) -> None:
    model = tiny(family, **SHAPE | {"num_hidden_layers": 2})
    quantise_model(model, kind)
    source = HFTarget.from_model(model)
    target = FusedTarget.from_target(source)
    ids, positions = torch.randint(1, 101, (LENGTH,)), torch.arange(24, 24 + LENGTH)
    found = [
        one.forward(ids, positions, dense(one.layers).at(positions)).logits
        for one in (source, target)
    ]
    exact = in_float64(model)
    exact.set_attn_implementation("eager")
    with torch.no_grad():
        want = exact(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    for one in found:
        # of most tokens: a number between two of e4m3 may become the other one, a 16th away
        assert sorted(map(off, one, want))[LENGTH // 2] < 4e-3


@pytest.mark.parametrize("kind", FORMATS)
def test_norms_and_gates_are_quantised_in_their_launch(tiny, dense, kind, monkeypatch) -> None:
    """What attention leaves is quantised by a launch of its own, norms and gates by none."""
    seen = []
    scale_rows = scaled.scale_rows
    monkeypatch.setattr(scaled, "scale_rows", lambda x, how: seen.append(x) or scale_rows(x, how))
    model = tiny("llama", **SHAPE)
    quantise_model(model, kind)
    target = FusedTarget.from_target(HFTarget.from_model(model))
    seen.clear()
    ids, positions = torch.randint(1, 101, (LENGTH,)), torch.arange(LENGTH)
    target.forward(ids, positions, dense(target.layers).at(positions))
    assert [x.shape[1] for x in seen] == [4 * 24] * 4


def test_merges_quantise_for_the_product_that_follows(tiny, monkeypatch) -> None:
    """Heads of 128 in blocks: tokens that are decoded take no launch of their own."""
    seen = []
    scale_rows = scaled.scale_rows
    monkeypatch.setattr(
        scaled, "scale_rows", lambda x, how: seen.append(len(x)) or scale_rows(x, how)
    )
    model = tiny("llama", num_hidden_layers=1, head_dim=128)
    quantise_model(model, "fp8")
    target, config = fuse(HFTarget.from_model(model))[0], SpecConfig(0, 1, 1, max_context_len=32)

    def text(backend: str) -> Any:
        engine = Engine(target, None, config, backend=backend, buckets=[1], graphs=False)
        (result,) = engine.generate([Request(PROMPTS[0], 3, min_new_tokens=3)])
        return result.tokens

    want = text("torch_native")
    seen.clear()
    with using("triton"):
        assert text("triton") == want
    # the prompt alone
    assert seen == [len(PROMPTS[0])]


def generated(target: Any, draft: Any = None, *, steps: tuple[int, int, int] | None) -> list:
    config = SpecConfig(*(steps or (0, 1, 1)), max_context_len=64, max_num_reqs=4)
    if draft is not None:
        target = target.with_features(getattr(draft, "features", ()))
    how = {"backend": "torch_native", "buckets": [len(PROMPTS)], "graphs": False}
    engine = Engine(target, draft, config, **how)
    requests = [Request(p, 12, min_new_tokens=12) for p in PROMPTS]
    return [result.tokens for result in engine.generate(requests)]


@sampled(half, kind=list(FORMATS), steps={"tree": (3, 3, 9), "chain": (3, 1, 4)})
def test_speculation_generates_what_plain_decoding_does(tiny, tmp_path, kind, steps) -> None:
    """Also with a quantised head, and with the model itself as its draft."""
    model = tiny("qwen3", num_hidden_layers=4, hidden_size=64)
    quantise_model(model, kind)
    target = fuse(HFTarget.from_model(model))[0]
    assert type(target) is FusedTarget
    alone = generated(target, steps=None)
    write(tmp_path, eagle3_tensors(), draft_vocab_size=VD)
    for how in dict.fromkeys((None, "fp8", kind)):
        head = load_draft(tmp_path, target, quantization=how)
        kinds = {type(one) for one in (head.fc, head.lm_head, head.blocks[0].qkv)}
        assert kinds == {Projection if how is None else ScaledProjection}
        assert generated(target, head, steps=steps) == alone


def test_an_fp8_folder_is_what_is_stored(tiny, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    folder = fp8_folder(tmp_path / "fp8", tiny("qwen3", **SHAPE))
    stored = load_file(folder / "model.safetensors")
    source = HFTarget.from_pretrained(folder)
    before = {
        name: part for name, part in source.module.named_modules() if type(part) is ScaledLinear
    }
    assert len(before) == 4 * 7
    for name, part in before.items():
        assert part.weight.view(torch.uint8).equal(stored[f"{name}.weight"].view(torch.uint8))
        assert part.scale.equal(stored[f"{name}.weight_scale_inv"])
    assert source.dtype == torch.float32
    assert source.lm_head.weight.equal(stored["lm_head.weight"])
    target = fuse(source)[0]
    assert type(target) is FusedTarget
    assert not caplog.text
    assert generated(target, steps=None) == generated(source, steps=None)
    draft = load_lm_draft(folder, target)
    assert generated(target, draft, steps=(3, 1, 4)) == generated(target, steps=None)


def test_weights_alone_are_the_dequantised_model(tiny, tmp_path) -> None:
    pytest.importorskip("accelerate", reason="without it transformers reads no FP8 weights")
    # transformers dequantises whole blocks alone
    whole = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32, "num_key_value_heads": 4}
    folder = fp8_folder(tmp_path / "fp8", tiny("qwen3", **whole))
    # what it makes of them without a GPU
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert {part.weight.dtype for part in plain.modules() if isinstance(part, nn.Linear)} == {
        torch.float32
    }
    want = [
        plain.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    source = HFTarget.from_pretrained(folder, quantization="fp8-weights")
    assert projection_of(source.module.model.layers[0].mlp.up_proj).terms == 2
    assert generated(source, steps=None) == want
    assert generated(fuse(source)[0], steps=None) == want


def test_plain_weights_are_quantised_when_loaded(tiny, tmp_path) -> None:
    model = tiny("llama", **SHAPE)
    model.save_pretrained(tmp_path)
    target = HFTarget.from_pretrained(tmp_path, quantization="fp8-channel", dtype=torch.bfloat16)
    part = target.module.model.layers[1].self_attn.o_proj
    before = model.model.layers[1].self_attn.o_proj.weight.bfloat16()
    assert weight_of(projection_of(part)).shape == before.shape
    assert off(weight_of(projection_of(part)), before) < 4e-2
    assert part.scale.shape == (len(before), 1)
    assert type(target.lm_head) is nn.Linear
    assert target.dtype == torch.bfloat16
    held = sum(one.nbytes for one in target.module.model.layers.parameters())
    assert held < 0.55 * sum(one.nbytes for one in model.model.layers.bfloat16().parameters())


def test_what_cannot_be_quantised(tiny, tmp_path) -> None:
    model = tiny("llama", **SHAPE)
    with pytest.raises(ValueError, match="quantization must be fp8, fp8-channel, fp8-weights"):
        quantise_model(model, "int4")
    with pytest.raises(ModelError, match=r"has no nn\.Linear to quantise"):
        quantise_model(tiny("gpt2"), "fp8")
    quantise_model(model, "fp8")
    # it is so already, and what was left plain stays so
    model.model.layers[1].mlp.up_proj = nn.Linear(144, 200, bias=False)
    quantise_model(model, "fp8")
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear
    with pytest.raises(ModelError, match=r"'fp8-channel' is not how model.layers.0.* is quantised"):
        quantise_model(model, "fp8-channel")
    quantise_model(model, "fp8-weights")
    with pytest.raises(ModelError, match=r"'fp8' is not how model.layers.0.* is quantised"):
        quantise_model(model, "fp8")
    target = HFTarget.from_model(model)
    with pytest.raises(ValueError, match="quantization must be"):
        load_draft(tmp_path, target, quantization="int4")
    with pytest.raises(ValueError, match="quantization must be"):
        HFTarget.from_pretrained(tmp_path, quantization="int4")


def test_parts_that_are_quantised_in_another_way_are_not_packed(tiny) -> None:
    model = tiny("llama", **SHAPE)
    layer = model.model.layers[1]
    layer.self_attn.k_proj = ScaledLinear(quantise(projection_of(layer.self_attn.k_proj), "fp8"))
    layer.mlp.down_proj = ScaledLinear(quantise(projection_of(layer.mlp.down_proj), "fp8"))
    with pytest.raises(
        ModelError,
        match=r"1\.self_attn\.k_proj is not quantised as self_attn\.q_proj is$",
    ):
        FusedTarget.from_target(HFTarget.from_model(model))
    layer.self_attn.k_proj = nn.Linear(144, 48, bias=False)
    assert type(FusedTarget.from_target(HFTarget.from_model(model)).blocks[1].feed.down) is (
        ScaledProjection
    )


def fp8_linear(**changes: Any) -> nn.Module:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    settings: dict[str, Any] = {"block_size": (128, 128), "has_bias": True} | changes
    with torch.no_grad():
        module = FP8Linear(IN, OUT, **settings)
        module.bias.fill_(0.5)
        scaled = scale_blocks(torch.randn(OUT, IN))
        module.weight.copy_(scaled.values)
        if module.weight_scale_inv.shape == scaled.scale.shape:
            module.weight_scale_inv.copy_(scaled.scale)
    return module.requires_grad_(False)


def test_blocks_of_transformers_are_read() -> None:
    module = fp8_linear()
    one = projection_of(module)
    assert (one.height, one.terms, one.bias.tolist()) == (128, 1, [0.5] * OUT)
    assert one.weight.data_ptr() == module.weight.data_ptr()
    assert one.scale.equal(module.weight_scale_inv)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"activation_scheme": "static"},
            "of static activation scales; quantise the plain checkpoint",
        ),
        ({"block_size": (64, 128)}, r"of blocks \(64, 128\), not \[128, 128\]; quantise the plain"),
        ({"block_size": None}, "of blocks None"),
        ({"scale_fmt": "ue8m0"}, "of torch.float8_e8m0fnu scales, not float32"),
    ],
)
def test_blocks_that_are_not_read(tiny, changes, why) -> None:
    module = fp8_linear(**changes)
    with pytest.raises(UnreadError, match=f"an FP8Linear {why}"):
        projection_of(module)


def by_channel(kind: str) -> nn.Module:
    if kind == "CompressedTensorsFP8Linear":
        found = pytest.importorskip("transformers.integrations.compressed_tensors")
        make = getattr(found, kind, None) or pytest.skip(f"this transformers has no {kind}")
        module = make(IN, OUT, has_bias=False)
    else:
        from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear

        module = FbgemmFp8Linear(IN, OUT, bias=False)
        module.input_scale_ub.fill_(torch.inf)
    one = quantise(Projection(torch.randn(OUT, IN)), "fp8-channel")
    with torch.no_grad():
        module.weight.copy_(one.weight)
        module.weight_scale.copy_(one.scale.view_as(module.weight_scale))
    return module.requires_grad_(False)


@pytest.mark.parametrize("kind", ["CompressedTensorsFP8Linear", "FbgemmFp8Linear"])
def test_channels_of_transformers_are_read(kind) -> None:
    module = by_channel(kind)
    one = projection_of(module)
    assert (one.height, one.terms, one.bias) == (1, 1, None)
    assert one.scale.flatten().equal(module.weight_scale.flatten())
    module.weight_scale = nn.Parameter(module.weight_scale[:1, :1].clone(), requires_grad=False)
    with pytest.raises(UnreadError, match=rf"a {kind} of \[1, 1\] torch.float32 scales, not one"):
        projection_of(module)


def test_activations_that_are_cut_are_not_read() -> None:
    module = by_channel("FbgemmFp8Linear")
    module.input_scale_ub.fill_(1200)
    with pytest.raises(UnreadError, match="a FbgemmFp8Linear that cuts activations at 1200"):
        projection_of(module)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", FORMATS)
def test_on_the_gpu(tiny, tmp_path, kind, head_dim) -> None:
    """Streamed products, few rows and many, eager and recorded, against float64.

    Merges quantise heads of 128 in blocks.
    """
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4}
    shape["head_dim"] = head_dim
    model = tiny("qwen3", **shape).to("cuda", torch.bfloat16)
    quantise_model(model, kind)
    source = HFTarget.from_model(model)
    tensors = eagle3_tensors(256) | {"fc.weight": torch.randn(256, 3 * 256) / 28}
    write(tmp_path, tensors, draft_vocab_size=VD, hidden_size=256)
    head = load_draft(tmp_path, source, quantization=kind)
    target, draft = fuse(source.with_features(head.features), head)
    assert type(target) is FusedTarget
    # 9 nodes of 9 requests are more rows than a stream takes
    config = SpecConfig(num_steps=3, topk=3, num_draft_tokens=9, max_context_len=64, max_num_reqs=9)
    texts = []
    for graphs in (False, True):
        engine = Engine(target, draft, config, backend="triton", graphs=graphs)
        requests = [Request(p, max_new_tokens=12, ignore_eos=True) for p in PROMPTS * 3]
        texts.append([result.tokens for result in engine.generate(requests)])
    assert texts[0] == texts[1]
    exact = in_float64(model)
    exact.set_attn_implementation("eager")
    for prompt, tokens in zip(PROMPTS, texts[0], strict=False):
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.no_grad():
            logits = exact(ids).logits[0, len(prompt) - 1 : -1]
        lost = logits.max(-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # a sum that rounds otherwise may move a number of e4m3 to its neighbour
        assert float(lost.max()) < 0.5 * float(logits.std()), lost
