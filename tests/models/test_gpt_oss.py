"""gpt-oss: sinks in every layer, a window in every other one, experts, trees on top."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specattn import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import ModelError, UnsupportedError
from specattn.models import HFTarget, load_draft
from tests.models.heads import VD, eagle3_tensors, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OSS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
WINDOW = 128
# within the window, and past it, where full layers see what the others do not
LENGTHS = (5, 1, 150, 119)
SPECS = {
    "plain": SpecConfig(0, 1, 1, max_context_len=256, max_num_reqs=4),
    "chain": SpecConfig(3, 1, 4, max_context_len=256, max_num_reqs=4),
    "tree": SpecConfig(3, 3, 9, max_context_len=256, max_num_reqs=4),
}


def make(tiny: Callable[..., Any], window: int, **changes: Any) -> Any:
    model = tiny("gpt_oss", **OSS | changes, sliding_window=window)
    with torch.no_grad():
        for layer in model.model.layers:
            # sinks that weigh as much as some keys do
            layer.self_attn.sinks.add_(torch.randn(4) * 2 + 2)
    # every text is as long as asked for
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def oss(tiny: Callable[..., Any]) -> Any:
    return make(tiny, WINDOW)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = lengths or LENGTHS
    return [torch.randint(3, 101, (n,), generator=generator).tolist() for n in lengths]


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return text[0, len(prompt) :].tolist()


def engine_of(model: Any, tmp_path: Path, spec: SpecConfig, backend: str, **options: Any) -> Engine:
    target, head = HFTarget.from_model(model), None
    if spec.num_steps:
        head = load_draft(write(tmp_path, eagle3_tensors(), draft_vocab_size=VD), target)
        target = target.with_features(head.features)
    return Engine(target, head, spec, backend=backend, **options)


def texts(engine: Engine, count: int, *lengths: int) -> list[list[int]]:
    results = engine.generate([Request(p, count, ignore_eos=True) for p in prompts(*lengths)])
    return [result.tokens for result in results]


@pytest.mark.parametrize("name", SPECS)
def test_greedy_tokens_are_those_of_transformers(oss, tmp_path, name) -> None:
    want = [generated(oss, prompt, 24) for prompt in prompts()]
    engine = engine_of(oss, tmp_path, SPECS[name], "torch_native", graphs=False)
    assert texts(engine, 24) == want


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_write_the_same(tiny, tmp_path, deterministic) -> None:
    """In Triton's interpreter where there is no GPU, past a window of 6."""
    model = make(tiny, 6)
    # experts that read nothing on the host
    model.set_experts_implementation("batched_mm")
    model.to(DEVICE)
    want = [generated(model, prompt, 3) for prompt in prompts(11)]
    spec = SpecConfig(2, 2, 4, max_context_len=32, max_num_reqs=1)
    options = {"graphs": False, "deterministic": deterministic}
    assert texts(engine_of(model, tmp_path, spec, "triton", **options), 3, 11) == want


def test_the_sinks_matter(oss, tmp_path) -> None:
    """The texts above would differ without them."""
    want = [generated(oss, prompt, 24) for prompt in prompts()]
    with torch.no_grad():
        for layer in oss.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
    engine = engine_of(oss, tmp_path, SPECS["tree"], "torch_native", graphs=False)
    assert texts(engine, 24) != want


def test_a_backend_without_sinks_is_refused(oss) -> None:
    with pytest.raises(UnsupportedError, match=r"'flex' .*it has no attention sinks"):
        Engine(HFTarget.from_model(oss), None, SPECS["plain"], backend="flex")


def test_sinks_of_another_kind_are_refused(oss) -> None:
    attention = oss.model.layers[1].self_attn
    for sinks in (torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4, 2))):
        attention.sinks = sinks
        with pytest.raises(ModelError, match=r"layer 1 sinks \('s_aux'\) that are no parameter of"):
            HFTarget.from_model(oss)


#: What 4 bits stand for: a sign, two bits of exponent and one of mantissa (OCP MX, version 1.0).
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantise(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint's experts as random MXFP4; return what they stand for."""
    tensors, plain = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        nibbles = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = nibbles[..., ::2] | nibbles[..., 1::2] << 4
        tensors[f"{name}_scales"] = scales
        values = FP4[nibbles.int()] * torch.exp2(scales.float() - 127)[..., None]
        plain[name] = values.flatten(2).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    settings = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(settings))
    return plain


def test_mxfp4_checkpoints_are_loaded_as_plain_weights(oss, tmp_path) -> None:
    oss.save_pretrained(tmp_path / "oss")
    plain = quantise(tmp_path / "oss")
    target = HFTarget.from_pretrained(tmp_path / "oss", dtype=torch.float32)
    weights = dict(target.module.named_parameters())
    assert len(plain) == 8
    for name, values in plain.items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], values), name
    assert all(layer.sinks for layer in target.layers)
    result = Engine(target, None, SPECS["plain"], backend="torch_native").generate(
        [Request(prompts()[0], 3, ignore_eos=True)]
    )[0]
    assert len(result.tokens) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", ["triton", "torch_native"])
def test_greedy_tokens_on_a_gpu(oss, tmp_path, name, backend) -> None:
    """In float32; with CUDA graphs where the backend has them."""
    # experts that read nothing on the host
    oss.set_experts_implementation("batched_mm")
    oss.cuda()
    want = [generated(oss, prompt, 24) for prompt in prompts()]
    graphs = backend == "triton"
    engine = engine_of(oss, tmp_path, SPECS[name], backend, graphs=graphs)
    assert texts(engine, 24) == want


@pytest.mark.gpu
def test_bfloat16_heads_of_64_on_a_gpu(tiny, tmp_path) -> None:
    """The Gluon kernels, where there is a Hopper, alone in a batch: graphs change no token."""
    model = make(tiny, WINDOW, head_dim=64)
    model.set_experts_implementation("batched_mm")
    model.cuda().to(torch.bfloat16)
    found = [
        texts(engine_of(model, tmp_path, SPECS["tree"], "triton", graphs=graphs), 24, 150)
        for graphs in (False, True)
    ]
    assert found[0] == found[1]
