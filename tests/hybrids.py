"""Tiny random models of attention and Gated DeltaNet layers."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from specattn.speculative.proposers.host import HostProposer, HostTree

#: What tests change of `tests.models.conftest.TINY` for these models.
LAYERS = {
    "layer_types": [*["linear_attention", "full_attention"] * 2],
    "num_hidden_layers": 4,
    "head_dim": 32,
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
_ALL = {
    "qwen3_5_text": LAYERS,
    "qwen3_next": LAYERS | EXPERTS,
    "qwen3_5_moe_text": LAYERS | EXPERTS,
}
#: By model type, those that this release of transformers has.
KINDS = {kind: changes for kind, changes in _ALL.items() if kind in CONFIG_MAPPING}
VOCAB = 101


def hybrid(kind: str = "qwen3_5_text", **changes: object) -> torch.nn.Module:
    """A model of 4 layers, without any parameter left at 0 or 1."""
    if kind not in KINDS:
        pytest.skip(f"this release of transformers has no {kind}")
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(kind, **settings | KINDS[kind] | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@torch.no_grad()
def generated(model: torch.nn.Module, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What transformers alone writes, greedily."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(ids, max_new_tokens=count, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


class Guesses(HostProposer):
    """Knows how texts go on, and errs: some tokens are wrong, and trees have wrong branches.

    What is right comes last in a tree, so that accepted nodes do not lie at its front.
    """

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def draft(self, requests, config):
        return [self.tree(list(one.tokens), config) for one in requests]

    def tree(self, tokens, config):
        at, count = len(tokens), config.num_steps
        found = (text[at : at + count] for text in self.texts if text[:at] == tokens)
        right = next(found, [])
        if at % 5 == 2 or not right:
            return HostTree()
        if at % 3 == 1:
            right[-1] = (right[-1] + 1) % VOCAB
        room = config.num_draft_tokens - 1 - len(right)
        if config.topk == 1 or room < 1:
            return HostTree(right)
        # a wrong chain below the root, then the right one, off its end another wrong token
        wrong = [(token + 1) % VOCAB for token in right[: min(room, config.num_steps)]]
        chain = range(-1, len(wrong) - 1)
        first = len(wrong)
        return HostTree([*wrong, *right], [*chain, -1, *range(first, first + len(right) - 1)])
