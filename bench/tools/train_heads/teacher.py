"""The frozen target, as training reads it: features and logits of whole rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from specattn.models import HFTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

# rope types that mean the same at every length
_ROPES = ("default", "linear", "llama3", "yarn")


def layers_for(target: HFTarget, layers: int, intermediate: int | None) -> LlamaConfig:
    """Return the configuration of a head's layers, which are as wide as its target's."""
    config, attention = target.config, target.layers[0]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in _ROPES:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return LlamaConfig(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate or config.intermediate_size,
        num_attention_heads=attention.num_qo_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        num_hidden_layers=layers,
        vocab_size=target.vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=target.max_context_len,
        rope_parameters=rope,
    )


def spread(layers: int, count: int) -> tuple[int, ...]:
    """Return hidden states to read, from the second to the third last; all but the ends of few.

    State ``i`` enters layer ``i``. Those of 28 layers are (2, 14, 25), as published heads have.
    """
    first, last = (2, layers - 3) if layers >= 8 else (1, layers - 1)
    gaps = max(1, count - 1)
    return tuple(sorted({round(first + at * (last - first) / gaps) for at in range(count)}))


class Teacher:
    """The target, without gradients, attending in its own way over padded rows.

    ``states`` are the hidden states that the head reads, in transformers' numbering.
    """

    def __init__(self, target: HFTarget, states: Sequence[int]) -> None:
        target.restore()
        self.name, self.layers, self.states = target.name, len(target.layers), tuple(states)
        self.module: Any = target.module.eval().requires_grad_(False)
        if self.module._supports_sdpa:
            self.module.set_attn_implementation("sdpa")
        self.embed, self.lm_head = target.embed_tokens, target.lm_head

    def target(self) -> HFTarget:
        """Return the target for the library's engine; the teacher is of no use after that."""
        return HFTarget.from_model(self.module, name=self.name)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, **options: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return features ``[B, T, F]``, normed last states ``[B, T, H]`` and logits.

        The logits are ``[B, T, V]``, or those that ``logits_to_keep`` of the model says.
        """
        output = self.module(tokens, use_cache=False, output_hidden_states=True, **options)
        states = output.hidden_states
        return torch.cat([states[at] for at in self.states], -1), states[-1], output.logits
