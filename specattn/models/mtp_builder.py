"""Makes a head of a target's first MTP layer."""

from __future__ import annotations

import logging
import sys
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specattn.config import AttnConfig
from specattn.models.builder import HeadBuilder
from specattn.models.fused.block import Block, GatedFeed, ModuleFeed, RotaryTable
from specattn.models.fused.latent import LatentBlock
from specattn.models.fused.projection import Projection
from specattn.models.hf import rescaling_length
from specattn.models.mtp import MtpHead
from specattn.models.mtp_checkpoint import FEED, LAYER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from specattn.models.builder import Shapes
    from specattn.models.fused.block import Feed
    from specattn.models.mtp_checkpoint import MtpCheckpoint, MtpFamily

log = logging.getLogger(__name__)

# of the norms inside latent attention, whatever the configuration says
_LATENT_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class MtpBuilder(HeadBuilder):
    """Reads an MTP layer's weights and makes its parts."""

    checkpoint: MtpCheckpoint

    @cached_property
    def config(self) -> Any:
        """The configuration of the target's text part."""
        return self.checkpoint.config

    @cached_property
    def family(self) -> MtpFamily:
        """What the layer is."""
        assert self.checkpoint.family is not None
        return self.checkpoint.family

    def head(self) -> MtpHead:
        """Return the head."""
        checkpoint, size = self.checkpoint, self.config.hidden_size
        if checkpoint.depth > 1:
            log.warning(
                "%s has %d MTP layers: the first one drafts every token, applied again",
                checkpoint.name,
                checkpoint.depth,
            )
        shapes: Shapes = {f"{key}.weight": (size,) for key in ("embed_norm", "hidden_norm", "norm")}
        shapes |= {"fc.weight": (size, 2 * size)}
        weights = self.read(shapes | self.layer_shapes(LAYER, size, head_norms=True))
        norm = self.family.layers.norm
        return MtpHead(
            **self.parts(weights, [LAYER], (len(self.target.layers),)),
            embed_norm=norm(weights["embed_norm.weight"]),
            hidden_norm=norm(weights["hidden_norm.weight"]),
            norm=norm(weights["norm.weight"]),
        )

    def layer_shapes(
        self, layer: str, width: int, *, head_norms: bool = False, input_norm: bool = True
    ) -> Shapes:
        """Return the shapes of the layer's weights."""
        norms = {"head_norms": head_norms, "input_norm": input_norm}
        shapes = super().layer_shapes(layer, width, **norms)
        attention = f"{layer}self_attn."
        if self.family.latent:
            shapes = {key: one for key, one in shapes.items() if not key.startswith(attention)}
            shapes |= {f"{attention}{key}": one for key, one in self._latent_shapes().items()}
        elif self.family.layers.gated:
            heads, size = shapes[f"{attention}q_proj.weight"]
            shapes[f"{attention}q_proj.weight"] = (2 * heads, size)
        if self._experts is not None:
            shapes = {key: one for key, one in shapes.items() if not key.startswith(FEED)}
            shapes |= {
                f"{FEED}{key}": tuple(one.shape) for key, one in self._experts.state_dict().items()
            }
        return shapes

    def _latent_shapes(self) -> Shapes:
        config, size = self.config, self.config.hidden_size
        heads, rank, low = config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        shapes: Shapes = {
            "kv_a_proj_with_mqa.weight": (rank + rope, size),
            "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (heads * (nope + value), rank),
            "o_proj.weight": (size, heads * value),
        }
        if low is None:
            return shapes | {"q_proj.weight": (heads * (nope + rope), size)}
        return shapes | {
            "q_a_proj.weight": (low, size),
            "q_a_layernorm.weight": (low,),
            "q_b_proj.weight": (heads * (nope + rope), low),
        }

    @cached_property
    def _model(self) -> Any:
        """Transformers' class of the target."""
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]

    @cached_property
    def _experts(self) -> Any:
        """Transformers' module of experts, without numbers; None of a dense layer."""
        if f"{FEED}gate_proj.weight" in self.checkpoint.tensors or not self.family.experts:
            return None
        with torch.device("meta"):
            made = getattr(sys.modules[self._model.__module__], self.family.experts)(self.config)
        return made.eval().requires_grad_(False)

    def _dtype(self, key: str) -> torch.dtype:
        kept = getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()
        return torch.float32 if any(part in key for part in kept) else self.dtype

    def _blocks(
        self, weights: dict[str, Tensor], layers: Sequence[str], windows: Sequence[int]
    ) -> tuple[Block, ...]:
        (layer,) = layers
        own = {k.removeprefix(layer): one for k, one in weights.items() if k.startswith(layer)}
        block = self._latent(own) if self.family.latent else self._heads(own)
        block.prepare()
        return (block,)

    def _heads(self, own: dict[str, Tensor]) -> Block:
        """Pack a layer of attention with keys and values of its own."""
        config, (rotary, _), projections = self.config, self._rotary(), self._projections(own)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        geometry = AttnConfig(heads, kv_heads, config.head_dim, dtype=self.dtype)
        feed = self._feed(own, projections)
        return Block.of_weights(projections, own, rotary, geometry, feed, self.family.layers)

    def _feed(self, own: dict[str, Tensor], projections: Mapping[str, Projection]) -> Feed:
        module = self._experts
        if module is None:
            return GatedFeed.of_weights(projections, self.config)
        inside = {key: one for key, one in own.items() if key.startswith("mlp.")}
        module.load_state_dict(
            {key.removeprefix("mlp."): one for key, one in inside.items()}, assign=True
        )
        return ModuleFeed(module)

    def _latent(self, own: dict[str, Tensor]) -> LatentBlock:
        """Pack a layer of latent attention; rotated dimensions come in halves."""
        config = deepcopy(self.config)
        heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
        nope, compressed = config.qk_nope_head_dim, config.q_lora_rank is not None
        order = torch.arange(rope, device=self.device)
        if config.rope_interleave:
            order = torch.cat([order[::2], order[1::2]])
        asks = f"self_attn.{'q_b_proj' if compressed else 'q_proj'}.weight"
        q = own[asks].unflatten(0, (heads, nope + rope))
        own[asks] = torch.cat([q[:, :nope], q[:, nope:][:, order]], 1).flatten(0, 1)
        kv = own.pop("self_attn.kv_a_proj_with_mqa.weight")
        own["self_attn.kv_a_proj.weight"] = torch.cat([kv[:rank], kv[rank:][order]])
        both = own.pop("self_attn.kv_b_proj.weight").unflatten(0, (heads, -1))
        projections = self._projections(own)
        first = projections["self_attn.q_a_proj" if compressed else "self_attn.q_proj"]
        length = min(self.target.max_context_len, rescaling_length(config)[0])
        expanded = next(one for one in self.target.layers if isinstance(one, AttnConfig))
        config.head_dim = rope
        return LatentBlock(
            geometry=AttnConfig(
                heads,
                1,
                rank + rope,
                v_head_dim=rank,
                dtype=self.dtype,
                sm_scale=expanded.sm_scale,
                latent=True,
            ),
            rotary=RotaryTable(LlamaRotaryEmbedding(config).to(self.device), length, "draft"),
            eps=config.rms_norm_eps,
            input_norm=own["input_layernorm.weight"],
            post_norm=own["post_attention_layernorm.weight"],
            qkv=Projection.stacked([first, projections["self_attn.kv_a_proj"]]),
            o=projections["self_attn.o_proj"],
            feed=self._feed(own, projections),
            queries=projections["self_attn.q_b_proj"] if compressed else None,
            query_norm=own.get("self_attn.q_a_layernorm.weight"),
            latent_norm=own["self_attn.kv_a_layernorm.weight"],
            latent_eps=_LATENT_EPS,
            keys=both[:, :nope].contiguous(),
            values=both[:, nope:].contiguous(),
        )
