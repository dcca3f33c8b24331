"""Checkpoints of heads, in the layouts of others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from .layers import Mixed

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import LlamaConfig

LAYOUTS = ("sglang", "speculators")
_LAYER = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "hidden_act", "vocab_size", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters",
)  # fmt: skip


def plain(config: LlamaConfig, architecture: str, model_type: str) -> dict[str, Any]:
    """Return what ``config.json`` has where the layers' settings are not nested."""
    found = {name: getattr(config, name) for name in _LAYER}
    # older readers look for it here
    found["rope_theta"] = config.rope_parameters["rope_theta"]
    return found | {
        "architectures": [architecture], "model_type": model_type, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


def speculators(config: LlamaConfig, kind: str, target: str, drafted: int) -> dict[str, Any]:
    """Return what heads of all kinds have in ``config.json`` of vLLM's speculators 0.9."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": drafted, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    layer = {name: getattr(config, name) for name in _LAYER}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [], "name_or_path": target},
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": layer
        | {"model_type": {"eagle3": "llama", "dflash": "qwen3"}[kind]},
    }


def save(head: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Write a head in bfloat16, with its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = head.state_dict()
    for name, module in head.named_modules():
        if isinstance(module, Mixed):
            tensors[f"{name}.weight"] = module.weight_as_read.detach()
    for name, tensor in tensors.items():
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.to(dtype).contiguous().cpu()
    partial = folder / "model.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
