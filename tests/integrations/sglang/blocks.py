"""A whole `sglang.Engine` over tiny targets with DFlash heads, on a CPU, as a program.

``python -m tests.integrations.sglang.blocks SETTING FOLDER HEAD`` prints a line of JSON: what each
prompt of each part got. ``stubs/`` has what a CPU needs. Heads and targets are random. So few
tokens are known that heads are right often enough to be seen, and what they draft follows from all
that they have read.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.integrations.sglang.heads import ENDS, NEW, random_model, store

if TYPE_CHECKING:
    from pathlib import Path

VOCAB, MASK, BLOCK, LAYERS = 13, 12, 5, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
#: What a target of experts has besides, in every layer.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
#: What a Gemma 3 has: windows that most prompts are longer than, and rotations of two bases.
GEMMA3: dict[str, Any] = {
    "head_dim": 256,
    "query_pre_attn_scalar": 200,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
OF_TARGETS = {"qwen3_moe": EXPERTS, "gemma3_text": GEMMA3}
#: Without token 0, which transformers takes for padding.
LONG = [1 + (3 * at * at + at) % 11 for at in range(44)]
#: The third comes in two pieces.
PROMPTS = ([5, 9, 3], [7, 7, 8, 10, 4, 2], LONG, [1, 2, 3, 4, 5, 6, 7], LONG[:21])
#: Prompts after those, of which the radix cache has the most: whole, longer, and another's end.
AGAIN = (LONG, [*LONG, 4, 9], [*LONG[:40], 1, 1, 2], PROMPTS[1])
#: How requests draw.
DRAWN = ({"temperature": 1.0, "top_k": 6, "seed": 7}, {"temperature": 0.7, "seed": 11})
#: A layer of the head sees what comes before, in a window; the other one all of a block.
WINDOWS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
}


@dataclass(frozen=True)
class Setting:
    """Steps, topk and nodes, or none of them, options of SGLang's, and what the models are.

    ``fused`` is the variable that says which forwards are fused, ``trees`` that of larger batches,
    and ``head`` changes the head's settings.
    """

    tree: tuple[int, int, int] | None
    options: dict[str, Any] = field(default_factory=dict)
    target: str = "qwen3"
    fused: str = "1"
    trees: str = ""
    head: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    "tree": Setting((4, 6, 12), head={"logit_scale": 0.3} | WINDOWS),
    "module tree": Setting((4, 6, 12), fused="0", head={"logit_scale": 0.3} | WINDOWS),
    "chain": Setting(
        None,
        {
            "attention_backend": "specattn",
            "disable_overlap_schedule": True,
            "page_size": 16,
        },
        target="llama",
        fused="0",
        head={"causal": True},
    ),
    # all requests at once take a chain of a part of the block, fewer a tree
    "mixed": Setting((3, 8, 9), {"speculative_dflash_block_size": 4}, trees="3:2-1-3"),
    "ranks": Setting((4, 6, 12), {"tp_size": 2}, head={"logit_scale": 0.3}),
    # fused around SGLang's module of the experts
    "experts": Setting((4, 6, 12), target="qwen3_moe", head={"logit_scale": 0.3}),
    "gemma tree": Setting((4, 6, 12), target="gemma3_text"),
    "gemma chain": Setting(
        None, {"attention_backend": "specattn", "page_size": 16}, target="gemma3_text"
    ),
}


def write(setting: Setting, folder: Path, head: Path) -> Any:
    """Write a target and a head for it; return transformers' model of the target."""
    import torch
    from transformers import AutoConfig, Qwen3Config

    sizes = SIZES | ENDS | OF_TARGETS.get(setting.target, {})
    kind = AutoConfig.for_model(setting.target, **sizes, num_hidden_layers=LAYERS)
    model = random_model(kind)
    if setting.target == "gemma3_text":
        vary(model)
    model.save_pretrained(folder)
    config = Qwen3Config(**SIZES, **ENDS, num_hidden_layers=2)
    layers = random_model(config).model
    weights = {
        name: one
        for name, one in layers.state_dict().items()
        if name.startswith(("layers.", "norm."))
    }
    read = [0, 2]
    weights["fc.weight"] = torch.randn(64, 64 * len(read)) * (64 * len(read)) ** -0.5
    weights["hidden_norm.weight"] = torch.ones(64)
    named = {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": read},
    }
    store(head, weights, config.to_dict() | named | setting.head)
    return model


def vary(model: Any) -> None:
    """Have a random Gemma 3's norms differ, and its texts be a matter of more than one token."""
    import torch

    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.006)
        for name, one in model.named_parameters():
            if name.endswith("norm.weight"):
                one.normal_(std=0.2)


def options(setting: Setting, folder: str, head: str) -> dict[str, Any]:
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
        "chunked_prefill_size": 32,
        "skip_server_warmup": True,
        "log_level": "error",
        "speculative_algorithm": "SPECATTN",
        "speculative_draft_model_path": head,
        **dict(zip(names, setting.tree or (), strict=False)),
        **setting.options,
    }


def ask(engine: Any, prompts: Any, asked: Any) -> list[dict[str, Any]]:
    """Return what each prompt got."""
    usual = {"max_new_tokens": NEW, "ignore_eos": True}
    params = [
        usual | {"sampling_seed" if name == "seed" else name: one[name] for name in one}
        for one in asked
    ]
    outputs = engine.generate(input_ids=[list(one) for one in prompts], sampling_params=params)
    return [
        {
            "tokens": one["output_ids"],
            "verified": one["meta_info"]["spec_verify_ct"],
            "cached": one["meta_info"]["cached_tokens"],
        }
        for one in outputs
    ]


def main(name: str, folder: str, head: str) -> None:
    """Run all parts of a setting."""
    import sglang

    setting = SETTINGS[name]
    # SGLang wants a core named for each rank where they share a memory node
    ranks = range(setting.options.get("tp_size", 1))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, ranks))
    os.environ["SPECATTN_SGLANG_FUSED"] = setting.fused
    os.environ["SPECATTN_SGLANG_TREES"] = setting.trees
    engine = sglang.Engine(**options(setting, folder, head))
    greedy = {"temperature": 0}
    try:
        found = {
            "first": ask(engine, PROMPTS, [greedy] * len(PROMPTS)),
            "again": ask(engine, AGAIN, [greedy] * len(AGAIN)),
            "drawn": ask(engine, [LONG[:9]] * 3, [*DRAWN, greedy]),
        }
    finally:
        engine.shutdown()
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
