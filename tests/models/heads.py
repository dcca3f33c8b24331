"""Checkpoints of small EAGLE heads, in the layouts that are published."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path


V, VD, HT, T = 101, 37, 64, 11  # target vocabulary and hidden size as in conftest; draft; tokens
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HT,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": V,
    "torch_dtype": "float32",
}
#: Settings that heads of vLLM's speculators are published with.
SPECULATORS_NORMS = [
    ["norm_before_residual"],
    ["norm_before_fc"],
    ["fc_norm"],
    ["norm_output"],
    ["norm_before_residual", "fc_norm", "norm_output"],
]
Tensors = dict[str, torch.Tensor]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)


def norm(size: int) -> torch.Tensor:
    return 1 + 0.3 * torch.randn(size)


def layer_tensors(prefix: str, hidden: int, *, wide: bool, biases: tuple[str, ...] = ()) -> Tensors:
    width = 2 * hidden if wide else hidden
    sizes = {
        "q": (4 * 24, width),
        "k": (2 * 24, width),
        "v": (2 * 24, width),
        "o": (hidden, 4 * 24),
    }
    tensors = {f"self_attn.{n}_proj.weight": rand(*size) for n, size in sizes.items()}
    tensors |= {f"self_attn.{n}_proj.bias": rand(sizes[n][0]) for n in biases}
    tensors |= {f"mlp.{n}_proj.weight": rand(80, hidden) for n in ("gate", "up")}
    tensors |= {"mlp.down_proj.weight": rand(hidden, 80)}
    tensors |= {"post_attention_layernorm.weight": norm(hidden)}
    return {prefix + key: tensor for key, tensor in tensors.items()}


def eagle_tensors(biases: tuple[str, ...] = ()) -> Tensors:
    torch.manual_seed(1)
    return {
        "embed_tokens.weight": rand(V, HT),
        "fc.weight": rand(HT, 2 * HT),
        "fc.bias": rand(HT),
    } | layer_tensors("layers.0.", HT, wide=False, biases=biases)


def eagle3_tensors(hidden: int = HT, features: int = 3, biases: tuple[str, ...] = ()) -> Tensors:
    torch.manual_seed(2)
    chosen = torch.randperm(V)[:VD].sort().values
    return {
        "fc.weight": rand(hidden, features * HT),
        "norm.weight": norm(hidden),
        "lm_head.weight": rand(VD, hidden),
        "d2t": chosen - torch.arange(VD),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, chosen, True),
        "midlayer.input_layernorm.weight": norm(hidden),
        "midlayer.hidden_norm.weight": norm(hidden),
    } | layer_tensors("midlayer.", hidden, wide=True, biases=biases)


def speculators_norms(settings: list[str], features: int = 3) -> Tensors:
    """The tensors that settings of vLLM's speculators add to a head."""
    found: Tensors = {}
    if "norm_before_fc" in settings:
        found["input_norm.weight"] = norm(features * HT)
    if "fc_norm" in settings:
        found |= {f"fc_norm.{at}.weight": norm(HT) for at in range(features)}
    return found


def write(folder: Path, tensors: Tensors, *, layout: str = "safetensors", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if layout == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif layout == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        names = sorted(tensors)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, keys in shards.items():
            save_file({key: tensors[key] for key in keys}, folder / file)
        where = {key: file for file, keys in shards.items() for key in keys}
        index = json.dumps({"metadata": {}, "weight_map": where})
        (folder / "model.safetensors.index.json").write_text(index)
    return folder
