"""Tiny targets with MTP layers, stored as published checkpoints are, and their oracle."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

SIZE, VOCAB = 64, 101
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    # far from what other norms have
    "rms_norm_eps": 1e-3,
}
GATED = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MANY = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.8,
    "mscale_all_dim": 0.9,
}
#: Settings by name; a name begins with its model type.
TARGETS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
    "deepseek_v3 queries as they are, yarn, halves": {
        **LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN,
        "rope_interleave": False,
    },
    "glm4_moe_lite": LATENT,
    "qwen3_next": {**GATED, **MANY},
    "qwen3_5_text": GATED,
    "qwen3_5_moe_text": {**GATED, **MANY},
}


@dataclass
class Mtp:
    """A target of transformers, and an MTP layer of its own classes.

    ``norms`` are those of embeddings, of states, and before the output.
    """

    model: Any
    layer: Any
    norms: list[Any]
    fc: Tensor

    @classmethod
    def of(cls, name: str, *, share: float = 0.0, **changes: Any) -> Mtp:
        """Draw one; with a ``share`` of the states, its layer continues what tokens suggest."""
        torch.manual_seed(0)
        kind, *_ = name.split()
        config = AutoConfig.for_model(kind, **COMMON | TARGETS[name] | changes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        classes = vars(sys.modules[type(model).__module__])
        prefix = type(model).__name__.removesuffix("ForCausalLM")
        if "experts" in repr(model):
            # others know no float64
            model.set_experts_implementation("eager")
        # that of one layer more
        own = deepcopy(model.config)
        for key, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
            if getattr(own, key, None):
                getattr(own, key).append(kind)
        layer = classes[f"{prefix}DecoderLayer"](own, config.num_hidden_layers)
        norms = [classes[f"{prefix}RMSNorm"](SIZE, eps=own.rms_norm_eps) for _ in range(3)]
        fc = torch.randn(SIZE, 2 * SIZE) * (2 * SIZE) ** -0.5
        if share:
            fc = 0.1 * fc + torch.cat([torch.eye(SIZE), share * torch.eye(SIZE)], 1)
        with torch.no_grad():
            for part in (model, layer, *norms):
                _draw(part, small=bool(share))
        return cls(model, layer.eval(), norms, fc)

    @property
    def config(self) -> Any:
        return self.model.config

    def tensors(self) -> dict[str, Tensor]:
        """The MTP layer's weights under the names that its family publishes."""
        behind = "nextn" if "qwen" not in self.config.model_type else ""
        count = self.config.num_hidden_layers
        first = f"model.layers.{count}." if behind else "mtp."
        keys = ("enorm", "hnorm", "shared_head.norm") if behind else _APART
        found = {
            f"{first}{key}.weight": norm.weight for key, norm in zip(keys, self.norms, strict=True)
        }
        found[f"{first}{'eh_proj' if behind else 'fc'}.weight"] = self.fc
        inside = first if behind else "mtp.layers.0."
        found |= {f"{inside}{key}": one for key, one in self.layer.state_dict().items()}
        if behind:
            found[f"{first}embed_tokens.weight"] = self.model.get_input_embeddings().weight
            found[f"{first}shared_head.head.weight"] = self.model.lm_head.weight
        return found

    def store(self, folder: Path, *, alone: bool = False, **changes: Tensor | None) -> Path:
        """Write the target's folder, with changed tensors; None leaves one out.

        The target ``alone`` has no MTP layer.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = self.model.state_dict() | ({} if alone else self.tensors())
        if self.config.model_type != "qwen3_5_moe_text":
            tensors = dict(by_expert(tensors))
        tensors |= changes
        kept = {
            key: one.detach().clone().contiguous()
            for key, one in tensors.items()
            if one is not None
        }
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        named = {"architectures": [type(self.model).__name__], "dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(self.config.to_dict() | named))
        return folder


_APART = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def _draw(part: Any, *, small: bool) -> None:
    """Leave no parameter at 0 or 1; where it is ``small``, layers add less than embeddings have."""
    for name, one in part.named_parameters():
        if one.dim() == 1:
            one.add_(torch.randn_like(one) * (0.1 if small else 0.3))
        elif not small:
            # transformers leaves the experts of a lone layer as they are
            one.normal_(std=0.15)
        elif "embed_tokens" in name or "lm_head" in name:
            one.normal_()
        else:
            one.normal_(std=one.shape[-1] ** -0.5)
            adds = any(part in name for part in ("o_proj", "down_proj", "out_proj"))
            one.mul_(0.3 if adds else 1.0)
    for name, one in part.named_buffers():
        if name.endswith("e_score_correction_bias"):
            one.normal_(std=0.2)


def by_expert(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights as most checkpoints name them: transformers has all experts in one tensor."""
    for name, one in tensors.items():
        room, _, kind = name.rpartition(".")
        if not room.endswith("experts") or kind not in ("gate_up_proj", "down_proj"):
            yield name, one
            continue
        for at, expert in enumerate(one):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, called in zip(parts, kinds, strict=True):
                yield f"{room}.{at}.{called}.weight", part


class Oracle:
    """The MTP layer in float64, over all tokens at once: transformers' layer, the rest plainly."""

    def __init__(self, mtp: Mtp) -> None:
        self.layer = deepcopy(mtp.layer).double()
        self.norms = [deepcopy(norm).double() for norm in mtp.norms]
        self.fc = mtp.fc.double()
        self.embed = mtp.model.get_input_embeddings().weight.double()
        self.lm_head = mtp.model.lm_head.weight.double()
        self.rotary = mtp.model.model.rotary_emb

    @torch.no_grad()
    def __call__(
        self, ids: Tensor, states: Tensor, positions: Tensor, sees: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits and the states after the last norm of T tokens; ``sees`` is [T, T]."""
        of_embeds, of_states, last = self.norms
        pair = [of_embeds(self.embed[ids]), of_states(states.double())]
        x = (torch.cat(pair, -1) @ self.fc.T)[None]
        mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
        places = positions[None]
        if "Qwen3_5" in type(self.rotary).__name__:  # of a text's and of an image's two axes
            places = places.expand(3, 1, -1)
        turned = self.rotary(x, places)
        x = self.layer(x, attention_mask=mask[None, None], position_embeddings=turned)
        x = last(x[0] if isinstance(x, torch.Tensor) else x[0][0])
        return x @ self.lm_head.T, x
