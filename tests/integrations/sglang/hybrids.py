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
    """Steps, topk and nodes, options of SGLang's, ``fused`` as in `steps_engine`, and the target."""

    tree: tuple[int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    fused: str = "1"
    kind: str = "qwen3_next"


#: States stay where a request has them, until it ends; steps wait for each other.
NO_BUFFER = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
SETTINGS = {
    "chain": Setting((3, 1, 4), NO_BUFFER, fused="0"),
    "tree": Setting((3, 3, 8), NO_BUFFER),
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

    config = AutoConfig.for_model(kind, **SIZES | ENDS | LAYERS | EXPERTS)
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
    named = {"architectures": ["Qwen3NextForCausalLM"], "full_attention_interval": 2}
    named |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    store(folder, dict(_experts(weights)), config.to_dict() | named)
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
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0"
    os.environ["SPECATTN_SGLANG_FUSED"] = setting.fused
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
