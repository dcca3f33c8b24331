"""Fused models of random weights, whose products keep the variance."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specattn.config import AttnConfig
from specattn.models import (
    DFlashHead,
    Eagle3Head,
    FusedTarget,
    HFTarget,
    MtpHead,
)
from specattn.models.fused.block import Block, GatedFeed, RotaryTable
from specattn.models.fused.projection import Projection
from specattn.models.fused.scaled import quantise

if TYPE_CHECKING:
    from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

    from specattn.speculative.proposers.block import BlockShape


class _Weights:
    """Draws weights of one dtype on one device."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, seed: int, quantization: str | None
    ) -> None:
        self.dtype, self.device, self.quantization = dtype, device, quantization
        self.generator = torch.Generator(device).manual_seed(seed)

    def linear(self, rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return weight.normal_(std=columns**-0.5, generator=self.generator)

    def projection(
        self, rows: int, columns: int, bias: Tensor | None = None, *, factor: float = 1.0
    ) -> Projection:
        plain = Projection(self.linear(rows, columns).mul_(factor), bias)
        return plain if self.quantization is None else quantise(plain, self.quantization)

    def bias(self, size: int) -> Tensor:
        bias = torch.empty(size, dtype=self.dtype, device=self.device)
        return bias.normal_(generator=self.generator)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def like(self, other: Projection) -> Projection:
        return self.projection(other.out_features, other.in_features)

    def fill(self, model: nn.Module) -> None:
        """Draw a module's matrices; a convolution's are rows of its width.

        Gates let states last for some tokens, as trained ones do.
        """
        for name, one in model.named_parameters():
            if name.endswith("dt_bias"):
                one.fill_(-3)
            elif one.dim() > 1:
                std = 1.0 if "embed_tokens" in name else one[0].numel() ** -0.5
                one.normal_(std=std, generator=self.generator)

    def rotary(self, config: LlamaConfig | Qwen3Config, length: int) -> RotaryTable:
        return RotaryTable(LlamaRotaryEmbedding(config).to(self.device), length)

    def block(
        self, config: LlamaConfig | Qwen3Config, rotary: RotaryTable, input_size: int
    ) -> Block:
        size, dim = config.hidden_size, config.head_dim
        geometry = AttnConfig(
            config.num_attention_heads, config.num_key_value_heads, dim, dtype=self.dtype
        )
        heads = geometry.num_qo_heads + 2 * geometry.num_kv_heads
        block = Block(
            geometry=geometry,
            rotary=rotary,
            head_norms=(self.ones(dim),) * 2 if config.model_type == "qwen3" else None,
            eps=config.rms_norm_eps,
            input_norm=self.ones(size),
            post_norm=self.ones(size),
            qkv=self.projection(
                heads * dim,
                input_size,
                self.bias(heads * dim) if config.model_type == "qwen2" else None,
            ),
            o=self.projection(size, geometry.num_qo_heads * dim),
            feed=GatedFeed(
                gate_up=self.projection(2 * config.intermediate_size, size),
                down=self.projection(size, config.intermediate_size),
            ),
        )
        block.prepare()
        return block


def random_target(
    config: LlamaConfig | Qwen3Config | PretrainedConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    seed: int = 0,
    quantization: str | None = None,
) -> FusedTarget:
    """Make a target; ``max_position_embeddings`` of the config is the longest context.

    One with layers of states is a model of transformers, fused; it is drawn where it lies.
    """
    weights = _Weights(dtype, torch.device(device), seed, quantization)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        assert quantization is None, "hybrids are not quantised here"
        return _hybrid(config, weights)
    size, vocab, length = config.hidden_size, config.vocab_size, config.max_position_embeddings
    rotary = weights.rotary(config, length)
    blocks = tuple(weights.block(config, rotary, size) for _ in range(config.num_hidden_layers))
    embed = nn.Embedding(vocab, size, _weight=weights.linear(vocab, size) * size**0.5)
    tied = config.tie_word_embeddings
    head = Projection(embed.weight if tied else weights.linear(vocab, size))
    head.prepare()
    eos = config.eos_token_id
    return FusedTarget(
        embed_tokens=embed.requires_grad_(False),
        lm_head=head,
        blocks=blocks,
        norm=weights.ones(size),
        max_context_len=length,
        eos_token_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
    )


@torch.no_grad()
def _hybrid(config: Any, weights: _Weights) -> FusedTarget:
    with weights.device:
        model = AutoModelForCausalLM.from_config(config, dtype=weights.dtype)
    weights.fill(model)
    return FusedTarget.from_target(HFTarget.from_model(model))


def random_eagle3(
    config: LlamaConfig,
    target: FusedTarget,
    draft_vocab_size: int,
    *,
    seed: int = 0,
    quantization: str | None = None,
    sharper: float = 1.0,
) -> Eagle3Head:
    """Make a head that reads three layers of ``target`` and shares its embedding.

    Its logits are ``sharper`` times as far apart as they would be.
    """
    weights = _Weights(target.dtype, target.device, seed, quantization)
    size, depth = target.hidden_size, len(target.layers)
    block = weights.block(config, weights.rotary(config, target.max_context_len), 2 * size)
    entering = (min(2, depth - 1), depth // 2, max(depth - 3, 0))
    return Eagle3Head(
        embed_tokens=target.embed_tokens,
        lm_head=weights.projection(draft_vocab_size, size, factor=sharper),
        blocks=(block,),
        fc=weights.projection(size, 3 * size),
        features=entering,
        feature_size=3 * size,
        target_ids=torch.arange(draft_vocab_size, device=target.device),
        hidden_norm=block.input_norm,
        norm=block.input_norm,
    )


def random_dflash(
    config: Qwen3Config,
    target: FusedTarget,
    block: BlockShape,
    features: tuple[int, ...],
    *,
    seed: int = 0,
) -> DFlashHead:
    """Make a head that shares both ends of ``target``."""
    weights = _Weights(target.dtype, target.device, seed, None)
    size = target.hidden_size
    rotary = weights.rotary(config, target.max_context_len)
    blocks = tuple(weights.block(config, rotary, size) for _ in range(config.num_hidden_layers))
    return DFlashHead(
        embed_tokens=target.embed_tokens,
        lm_head=target.lm_head,
        blocks=blocks,
        fc=Projection(weights.linear(size, size * len(features))),
        features=features,
        feature_size=size * len(features),
        block=block,
        hidden_norm=blocks[0].input_norm,
        norm=blocks[0].input_norm,
    )


def random_mtp(
    target: FusedTarget,
    *,
    seed: int = 0,
    quantization: str | None = None,
    sharper: float = 1.0,
) -> MtpHead:
    """Make an MTP layer over a target, of the shape of its first layer that attends.

    It shares both ends of the target. Its logits are ``sharper`` times as far apart as they would
    be.
    """
    weights = _Weights(target.dtype, target.device, seed, quantization)
    like = next(one for one in target.blocks if isinstance(one, Block))
    feed = GatedFeed(gate_up=weights.like(like.feed.gate_up), down=weights.like(like.feed.down))
    block = replace(like, qkv=weights.like(like.qkv), o=weights.like(like.o), feed=feed)
    block.prepare()
    size = target.hidden_size
    return MtpHead(
        embed_tokens=target.embed_tokens,
        lm_head=target.lm_head,
        blocks=(block,),
        fc=weights.projection(size, 2 * size),
        features=(len(target.layers),),
        feature_size=size,
        embed_norm=weights.ones(size),
        hidden_norm=weights.ones(size),
        # the output matrix is the target's, so what sharpens it stands before it
        norm=weights.ones(size) * sharper,
    )
