"""Make heads of random weights with vLLM's speculators, and what it computes with them.

It runs in an environment of its own; the library's is not needed:

    pip install torch==2.13.0 transformers==5.19.0 speculators==0.9.0
    python tests/models/make_speculators.py tests/models/speculators

Each case is a folder: the checkpoint as speculators saves it, and ``vectors.safetensors`` with the
target's ends, a text with features, and the logits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

VOCAB, TOKENS, FEATURES = 61, 18, (0, 2, 3)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SLIDING = {"sliding_window": 5, "use_sliding_window": True}
ANCHORS = [0, 1, 4, 8, 11]

DFLASH = {
    "dflash": (Qwen3Config(**SHAPE, num_hidden_layers=2), {"block_size": 6}),
    "dflash_mixed": (
        Qwen3Config(
            **SHAPE,
            **SLIDING,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        ),
        {"block_size": 5, "draft_vocab_size": 37},
    ),
    "dflash_both_ways": (
        Qwen3Config(
            **SHAPE,
            **SLIDING,
            num_hidden_layers=1,
            layer_types=["sliding_attention"],
            attention_bias=True,
        ),
        {"block_size": 4, "sliding_window_non_causal": True, "sample_from_anchor": True},
    ),
}
EAGLE3 = {
    "eagle3_llama": (LlamaConfig(**SHAPE, num_hidden_layers=1), {"draft_vocab_size": 37}),
    "eagle3_qwen3": (
        Qwen3Config(**SHAPE, num_hidden_layers=1),
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    ),
}


def common(algorithm: str, layer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    layer._attn_implementation = "eager"
    return {
        "transformer_layer_config": layer,
        "draft_vocab_size": VOCAB,
        "speculators_config": SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    } | settings


def randomise(model: Any) -> dict[str, torch.Tensor]:
    """Draw all weights; return the embedding and the output projection of the target."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.3)
            else:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
    head = torch.randn(VOCAB, 32) * 32**-0.5
    if model.use_draft_vocab:
        chosen = torch.randperm(VOCAB)[: model.draft_vocab_size].sort().values
        kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, value=True)
        model.load_vocab_mappings(kept, chosen - torch.arange(len(chosen)))
    else:
        model.lm_head.weight.data.copy_(head)
    return {"embed_tokens": model.embed_tokens.weight.data.clone(), "lm_head": head}


def heard(model: Any) -> list[torch.Tensor]:
    """Return a list that gets the logits of every call of the output projection."""
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0].detach().clone()))
    return logits


def dflash(layer: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    more = {"aux_hidden_state_layer_ids": list(FEATURES), "mask_token_id": VOCAB - 1}
    config = DFlashSpeculatorConfig(**common("dflash", layer, settings | more))
    model = DFlashDraftModel(config).eval()
    ends, logits = randomise(model), heard(model)
    ids, features = torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS, 3 * 32)
    wanted = torch.zeros(1, TOKENS).index_fill(1, torch.tensor(ANCHORS), 1)
    with torch.no_grad():
        model._backbone_forward(
            features[None],
            ids[None],
            wanted,
            torch.zeros(1, TOKENS, 32),
            torch.zeros(1, TOKENS, dtype=torch.long),
            max_anchors=len(ANCHORS),
        )
    vectors = {"ids": ids, "features": features, "anchors": torch.tensor(ANCHORS)}
    return model, ends | vectors | {"logits": logits[0].unflatten(0, (len(ANCHORS), -1))}


def eagle3(layer: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    more = {"eagle_aux_hidden_state_layer_ids": list(FEATURES)}
    config = Eagle3SpeculatorConfig(**common("eagle3", layer, settings | more))
    model = Eagle3DraftModel(config).eval()
    ends, logits = randomise(model), heard(model)
    ids, features = torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS, 3 * 32)
    with torch.no_grad():
        model(features[None], ids[None], torch.zeros(1, TOKENS, dtype=torch.long), ttt_steps=2)
    # the second step continues each row's own hidden state, with the text's next token
    return model, ends | {"ids": ids, "features": features, "logits": torch.stack(logits)}


def main() -> None:
    out = Path(sys.argv[1])
    for make, cases in ((dflash, DFLASH), (eagle3, EAGLE3)):
        for seed, (name, (layer, settings)) in enumerate(cases.items()):
            torch.manual_seed(seed)
            model, vectors = make(layer, settings)
            model.save_pretrained(out / name)
            # a copy of the class of its settings, which nobody reads
            (out / name / "config.py").unlink()
            save_file(vectors, out / name / "vectors.safetensors")
            assert vectors["logits"].isfinite().all(), name


if __name__ == "__main__":
    main()
