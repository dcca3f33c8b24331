"""A whole `sglang.Engine` over tiny targets with Gated DeltaNet layers, on a CPU, as a program.

``python -m tests.integrations.sglang.hybrids SETTING FOLDER`` prints a line of JSON: what each
prompt of each part got. ``stubs/`` and `delta` have what a CPU needs. Targets are random, with an
MTP layer that is right often enough to be seen.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.integrations.sglang.heads import ENDS, NEW, SIZES, _experts, beside, random_model, store

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
ROTATION = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
#: SGLang makes the tower; nothing asks for it.
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
LONG = [2 + (3 * at * at + at) % 89 for at in range(44)]
#: The third comes in two pieces.
PROMPTS = ([5, 9, 33], [7, 7, 8, 20, 41, 2], LONG, [12, 2, 3, 4, 5, 6, 7], LONG[:21])
#: Prompts after those, of which the radix cache has the most: whole, longer, and another's end.
AGAIN = (LONG, [*LONG, 4, 9], [*LONG[:40], 1, 1, 2], PROMPTS[1])
#: One whose state is kept at the end of a chunk.
LONGEST = [3 + (5 * at * at + 7 * at) % 83 for at in range(90)]
CHUNKED = (LONGEST, [*LONGEST[:80], 5], LONGEST)


def longer(texts: list[list[int]]) -> list[list[int]]:
    """Return prompts that go on like texts of `PROMPTS`, and leave them before or at their end."""
    told = zip(PROMPTS, texts, (NEW, 13, NEW, 9, NEW), strict=True)
    return [[*prompt, *text[:count], 3] for prompt, text, count in told]


@dataclass(frozen=True)
class Setting:
    """Steps, topk and nodes, options of SGLang's, and the target's type."""

    tree: tuple[int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "qwen3_next"


#: States stay where a request has them, until it ends; steps wait for each other.
NO_BUFFER = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
SETTINGS = {
    "chain": Setting((3, 1, 4), NO_BUFFER),
    "tree": Setting((3, 3, 8), NO_BUFFER),
    "qwen3.5": Setting((3, 3, 8), NO_BUFFER | {"enable_multimodal": False}, kind="qwen3_5_text"),
    "ranks": Setting((3, 3, 8), NO_BUFFER | {"tp_size": 2}),
    "checkpoints": Setting(
        (3, 3, 8),
        {
            "mamba_radix_cache_strategy": "extra_buffer",
            "mamba_track_interval": 8,
            "chunked_prefill_size": 128,
            "max_mamba_cache_size": 32,
        },
    ),
}


def write(kind: str, folder: Path) -> Any:
    """Write a target with an MTP layer; return transformers' model of it."""
    import torch
    from transformers import AutoConfig

    sizes = SIZES | ENDS | LAYERS | {"rope_parameters": ROTATION}
    config = AutoConfig.for_model(kind, **sizes | (EXPERTS if kind == "qwen3_next" else {}))
    model = random_model(config)
    weights = dict(model.state_dict())
    last = "model.layers.3."
    weights |= {
        name.replace(last, "mtp.layers.0."): one
        for name, one in weights.items()
        if name.startswith(last)
    }
    weights |= {
        "mtp.fc.weight": beside(64, 0.3),
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(64),
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(64),
        "mtp.norm.weight": torch.zeros(64),
    }
    settings = config.to_dict() | {"full_attention_interval": 2, "partial_rotary_factor": 0.25}
    if kind == "qwen3_next":
        named = {"architectures": ["Qwen3NextForCausalLM"]}
        store(folder, dict(_experts(weights)), settings | named)
        return model
    named = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": settings,
        "vision_config": VISION,
    }
    weights = {
        name.replace("model.layers.", "model.language_model.layers."): one
        for name, one in weights.items()
    }
    for name in ("embed_tokens.weight", "norm.weight"):
        weights[f"model.language_model.{name}"] = weights.pop(f"model.{name}")
    store(folder, weights, named | {"tie_word_embeddings": False})
    return model


def options(setting: Setting, folder: str) -> dict[str, Any]:
    """Return what `sglang.Engine` takes."""
    names = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
    return {
        "model_path": folder,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "max_total_tokens": 2048,
        "max_running_requests": 3,
        "max_mamba_cache_size": 16,
        "chunked_prefill_size": 32,
        "skip_server_warmup": True,
        "log_level": "error",
        "speculative_algorithm": "SPECATTN",
        **dict(zip(names, setting.tree, strict=True)),
        **setting.options,
    }


def ask(engine: Any, prompts: Any, **asked: Any) -> list[dict[str, Any]]:
    """Return what each prompt got."""
    params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True} | asked
    outputs = engine.generate(input_ids=[list(one) for one in prompts], sampling_params=params)
    return [
        {
            "tokens": one["output_ids"],
            "verified": one["meta_info"].get("spec_verify_ct"),
            "cached": one["meta_info"]["cached_tokens"],
        }
        for one in outputs
    ]


def main(name: str, folder: str) -> None:
    """Run all parts of a setting."""
    import sglang

    setting = SETTINGS[name]
    # SGLang wants a core named for each rank where they share a memory node
    ranks = range(setting.options.get("tp_size", 1))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, ranks))
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    engine = sglang.Engine(**options(setting, folder))
    try:
        found = {"first": ask(engine, PROMPTS), "again": ask(engine, AGAIN)}
        texts = [one["tokens"] for one in found["first"]]
        found["longer"] = ask(engine, longer(texts))
        # a request at a time
        found["chunked"] = [ask(engine, [one])[0] for one in CHUNKED]
    finally:
        engine.shutdown()
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
