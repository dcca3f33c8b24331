"""A whole `sglang.Engine` over tiny targets with EAGLE and MTP (NEXTN) heads, on a CPU.

``python -m tests.integrations.sglang.heads FOLDER HEAD ALGORITHM STEPS TOPK NODES`` prints a line
of JSON: each prompt's tokens, and how many verify forwards they took. ``stubs/`` has what a CPU
needs. Heads and targets are random but for one thing: what follows a token is mostly a matter of
its embedding, so that a head that reads the right states is right often enough to be seen.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

NEW = 24
#: The last comes in two pieces.
PROMPTS = ([5, 9, 33], [7, 7, 8, 20, 41, 2], [3, 3, *range(10, 40)])
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    # the one rotation that SGLang has on a CPU for such models
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
#: What SGLang reads of such a folder, and transformers does not write.
OF_SGLANG = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 1,
}


def random_model(config: Any) -> Any:
    """Return a model whose layers add less than the embeddings have."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                one.normal_()
            elif one.dim() > 1 and "gate.weight" not in name:
                one.normal_(std=one.shape[-1] ** -0.5)
                one.mul_(0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
    return model


def texts(model: Any) -> list[list[int]]:
    """Return transformers' greedy texts."""
    import torch

    found = []
    for prompt in PROMPTS:
        # past all ends: no token has this number
        ends = {"eos_token_id": -1, "pad_token_id": 0}
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **ends)
        found.append(out[0, len(prompt) :].tolist())
    return found


def beside(own: int, states: float) -> Tensor:
    """Return ``[own, 2 own]``: what adds a share of the states to the embeddings."""
    import torch

    return torch.cat([torch.eye(own), states * torch.eye(own)], 1)


def store(folder: Path, weights: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Write a model's folder."""
    from safetensors.torch import save_file

    folder.mkdir()
    kept = {name: one.detach().clone().contiguous() for name, one in weights.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))


def latent(folder: Path) -> list[list[int]]:
    """Write a DeepSeek-V3 with an MTP layer behind its own; return the target's texts."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**SIZES, **ENDS, **LATENT, num_hidden_layers=3)
    weights = dict(random_model(config).state_dict())
    # the third layer predicts the token after the next
    config.num_hidden_layers = 2
    mtp = "model.layers.2."
    own = {name: one for name, one in weights.items() if not name.startswith(mtp)}
    target = DeepseekV3ForCausalLM(config).float().eval()
    target.load_state_dict(own)
    weights |= {
        mtp + "enorm.weight": torch.ones(64),
        mtp + "hnorm.weight": torch.ones(64),
        mtp + "eh_proj.weight": beside(64, 0.3),
        mtp + "shared_head.norm.weight": torch.ones(64),
        mtp + "shared_head.head.weight": own["lm_head.weight"],
        mtp + "embed_tokens.weight": own["model.embed_tokens.weight"],
    }
    named = config.to_dict() | OF_SGLANG | {"architectures": ["DeepseekV3ForCausalLM"]}
    store(folder, dict(_experts(weights)), named)
    return texts(target)


def _experts(weights: dict[str, Tensor]) -> Any:
    """Yield weights as checkpoints name them: transformers has all experts in one tensor."""
    for name, one in weights.items():
        room, _, kind = name.rpartition(".")
        if not room.endswith("experts") or kind not in ("gate_up_proj", "down_proj"):
            yield name, one
            continue
        for at, expert in enumerate(one):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, called in zip(parts, kinds, strict=True):
                yield f"{room}.{at}.{called}.weight", part


def eagle(folder: Path, head: Path) -> list[list[int]]:
    """Write a Llama and an EAGLE head for it; return the target's texts."""
    import torch
    from transformers import LlamaConfig

    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **ENDS, num_hidden_layers=2)
    model = random_model(config)
    model.save_pretrained(folder)
    weights = {
        name.removeprefix("model."): one
        for name, one in model.state_dict().items()
        if ".1." in name and "input_layernorm" not in name
    }
    weights = {name.replace(".1.", ".0."): one for name, one in weights.items()}
    weights |= {"fc.weight": beside(64, 0.3), "fc.bias": torch.zeros(64)}
    named = config.to_dict() | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    store(head, weights, named)
    return texts(model)


def main(folder: str, head: str, algorithm: str, *tree: str) -> None:
    """Run all prompts at once."""
    import sglang

    # SGLang wants a core named for each rank where they share a memory node
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0"
    steps, topk, nodes = map(int, tree)
    engine = sglang.Engine(
        model_path=folder,
        device="cpu",
        dtype="float32",
        attention_backend="specattn",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        grammar_backend="none",
        sampling_backend="pytorch",
        max_total_tokens=2048,
        max_running_requests=3,
        chunked_prefill_size=32,
        skip_server_warmup=True,
        log_level="error",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=head or None,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        outputs = engine.generate(input_ids=[*map(list, PROMPTS)], sampling_params=sampling)
    finally:
        engine.shutdown()
    found = [(one["output_ids"], one["meta_info"]["spec_verify_ct"]) for one in outputs]
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
