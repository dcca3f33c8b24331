"""EAGLE draft heads continue the target's hidden states with one layer.

EAGLE-1 (Li et al., 2024, arXiv:2401.15077) and EAGLE-2 (arXiv:2406.16858) share one head; EAGLE-3
(arXiv:2503.01840) reads three of the target's layers and may predict a smaller vocabulary. Module
names are those of the published checkpoints; `specattn.models.load_draft` builds the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)

from specattn.models.hf import refuse_rescaling
from specattn.speculative.model import DraftOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from specattn.config import AttnConfig
    from specattn.models.hf import FeatureSpec
    from specattn.speculative.model import Attend

Rope = tuple[Tensor, Tensor]  # cosines and sines, [T, D] each


class DraftAttention(nn.Module):
    """The projections and the position embedding around ``attend``."""

    def __init__(self, config: LlamaConfig, layer: int, input_size: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def query(self, x: Tensor) -> Tensor:
        """Return queries ``[T, Hq, D]``, not rotated."""
        heads: Tensor = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return heads

    def key(self, x: Tensor) -> Tensor:
        """Return keys ``[T, Hkv, D]``, not rotated."""
        heads: Tensor = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        return heads

    def value(self, x: Tensor) -> Tensor:
        """Return values ``[T, Hkv, D]``."""
        heads: Tensor = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return heads

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Map ``[T, input_size]`` to ``[T, H]``."""
        q, k = apply_rotary_pos_emb(self.query(x), self.key(x), *rope, unsqueeze_dim=1)
        out: Tensor = self.o_proj(attend(self.layer, q, k, self.value(x)).flatten(-2))
        return out


class NormedAttention(DraftAttention):
    """Attention as in Qwen3, which norms every query and key."""

    def __init__(self, config: LlamaConfig, layer: int, input_size: int) -> None:
        super().__init__(config, layer, input_size)
        self.q_norm = rms_norm(config, config.head_dim)
        self.k_norm = rms_norm(config, config.head_dim)

    def query(self, x: Tensor) -> Tensor:
        """Return queries ``[T, Hq, D]``, normed and not rotated."""
        normed: Tensor = self.q_norm(super().query(x))
        return normed

    def key(self, x: Tensor) -> Tensor:
        """Return keys ``[T, Hkv, D]``, normed and not rotated."""
        normed: Tensor = self.k_norm(super().key(x))
        return normed


class EagleLayer(nn.Module):
    """A Llama decoder layer; a head's first lacks the input norm."""

    def __init__(
        self, config: LlamaConfig, layer: int, *, input_norm: bool, head_norms: bool = False
    ) -> None:
        super().__init__()
        size, attention = config.hidden_size, NormedAttention if head_norms else DraftAttention
        self.input_layernorm = rms_norm(config) if input_norm else nn.Identity()
        self.self_attn = attention(config, layer, size)
        self.post_attention_layernorm = rms_norm(config)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, rope: Rope, attend: Attend, rows: Tensor | None) -> Tensor:
        """Map ``[T, H]`` to ``[R, H]``."""
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return _feed_forward(self, x, rows)


class Eagle3Layer(nn.Module):
    """The decoder layer of EAGLE-3, over embedding and hidden state.

    Its residual stream begins with the hidden state, or with its norm (``norm_before_residual``).
    """

    def __init__(
        self, config: LlamaConfig, *, norm_before_residual: bool, head_norms: bool
    ) -> None:
        super().__init__()
        attention = NormedAttention if head_norms else DraftAttention
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = rms_norm(config)
        self.hidden_norm = rms_norm(config)
        self.self_attn = attention(config, 0, 2 * config.hidden_size)
        self.post_attention_layernorm = rms_norm(config)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embeds: Tensor, x: Tensor, rope: Rope, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """Map ``embeds`` and the stream ``x``, ``[T, H]`` each, to ``[R, H]``."""
        normed = self.hidden_norm(x)
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        stream = normed if self.norm_before_residual else x
        return _feed_forward(self, stream + self.self_attn(both, rope, attend), rows)


class HeadWeights(nn.Module):
    """The embedding and output projection of heads with their own.

    Other heads share those of the target.

    Parameters
    ----------
    config : LlamaConfig
        The draft's configuration, with the target's ``vocab_size``.
    names : set of str
        The names of the checkpoint's tensors, which tell the optional parts that it has.
    draft_vocab_size : int
        Vd, the number of tokens that the draft predicts.
    """

    def __init__(self, config: LlamaConfig, names: set[str], draft_vocab_size: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        if "embed_tokens.weight" in names:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if "lm_head.weight" in names:
            self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)


class EagleWeights(HeadWeights):
    """The weights of an EAGLE-1 or EAGLE-2 checkpoint, under its names."""

    def __init__(self, config: LlamaConfig, names: set[str]) -> None:
        super().__init__(config, names, config.vocab_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            EagleLayer(config, i, input_norm=f"layers.{i}.input_layernorm.weight" in names)
            for i in range(config.num_hidden_layers)
        )


#: Settings of vLLM's speculators for norms that the paper's EAGLE-3 head has not: the norm of the
#: hidden state before the residual stream begins, of all features side by side or of each one
#: before they are mixed, and of the hidden state that the next draft step continues.
EAGLE3_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle3Weights(HeadWeights):
    """The weights of an EAGLE-3 checkpoint, under its names.

    Parameters
    ----------
    config, names, draft_vocab_size
        See `HeadWeights`.
    features : sequence of int
        The widths of the hidden states that are mixed, which add up to F.
    norms : set of str
        The norms of `EAGLE3_NORMS` that the head has.
    """

    def __init__(
        self,
        config: LlamaConfig,
        names: set[str],
        draft_vocab_size: int,
        features: Sequence[int],
        norms: set[str],
    ) -> None:
        super().__init__(config, names, draft_vocab_size)
        size, feature_size = config.hidden_size, sum(features)
        self.input_norm = rms_norm(config, feature_size) if "norm_before_fc" in norms else None
        self.fc_norm: nn.ModuleList | None = None
        if "fc_norm" in norms:
            self.fc_norm = nn.ModuleList(rms_norm(config, width) for width in features)
        # A head that reads one hidden state of its own size has nothing to mix.
        mixes = "fc.weight" in names or feature_size != size
        self.fc = nn.Linear(feature_size, size, bias=False) if mixes else nn.Identity()
        self.midlayer = Eagle3Layer(
            config,
            norm_before_residual="norm_before_residual" in norms,
            head_norms="midlayer.self_attn.q_norm.weight" in names,
        )
        self.norm = rms_norm(config)
        self.norm_output = "norm_output" in norms

    def norm_features(self, states: Tensor) -> Tensor:
        """Apply the head's norms, if any, to the features ``[T, F]``."""
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            pairs = zip(self.fc_norm, parts, strict=True)
            return torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return states if self.input_norm is None else self.input_norm(states)


@dataclass(frozen=True, eq=False)
class DraftHead:
    """The parts that the heads of EAGLE and DFlash have.

    Parameters
    ----------
    embed_tokens : nn.Embedding
        ``[V, H]``, over target token ids; the target's own unless the checkpoint has one.
    lm_head : nn.Linear
        ``[Vd, H]``; the target's own unless the checkpoint has one.
    rope : LlamaRotaryEmbedding
        The draft's position embedding.
    layers : tuple of AttnConfig
        The attention geometry of every layer.
    features : FeatureSpec
        The hidden states that the target must give: pass it to `HFTarget.with_features`.
    feature_size : int
        F, the width of the features.
    """

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    rope: LlamaRotaryEmbedding
    layers: tuple[AttnConfig, ...]
    features: FeatureSpec
    feature_size: int

    @property
    def hidden_size(self) -> int:
        """H, the width of the states between draft steps."""
        return self.lm_head.in_features

    @property
    def vocab_size(self) -> int:
        """Vd, the width of the logits."""
        return self.lm_head.out_features

    def for_context(self, max_context_len: int) -> Self:
        """Return the head itself if its rope type allows the length.

        Raises
        ------
        ModelError
            From `refuse_rescaling`.
        """
        refuse_rescaling("draft", "the draft head", self.rope.config, max_context_len)
        return self

    def _inputs(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rope]:
        """Return the embeddings ``[T, H]``, in the draft's dtype, and the rotations."""
        embeds = self.embed_tokens(input_ids).to(self.layers[0].dtype)
        return embeds, self._rotations(embeds, positions)

    def _rotations(self, states: Tensor, positions: Tensor) -> Rope:
        cos, sin = self.rope(states, positions[None])  # [1, T, D]
        return cos[0], sin[0]

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(x.to(self.lm_head.weight.dtype))
        return logits


@dataclass(frozen=True, eq=False)
class EagleHead(DraftHead):
    """The draft of EAGLE-1 and EAGLE-2, over the target's last state."""

    weights: EagleWeights

    @property
    def target_ids(self) -> None:
        """None: draft and target share a vocabulary."""
        return None

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Return the target's last hidden states ``[T, H]``, in the draft's dtype."""
        return hidden_states.to(self.layers[0].dtype)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        *,
        sources: Tensor | None = None,
    ) -> DraftOutput:
        """Run the draft over flattened tokens; see `DraftModel.forward`."""
        embeds, rope = self._inputs(input_ids, positions)
        if sources is not None:
            hidden_states = hidden_states[sources]
        x = self.weights.fc(torch.cat([embeds, hidden_states], dim=-1))
        *first, last = self.weights.layers
        for layer in first:
            x = layer(x, rope, attend, None)
        x = last(x, rope, attend, rows)
        # There is no norm: the head learns to continue states that the target has normalised.
        return DraftOutput(self._logits(x), x)

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Return the ids themselves: the vocabulary is the target's."""
        return token_ids


@dataclass(frozen=True, eq=False)
class Eagle3Head(DraftHead):
    """The draft of EAGLE-3, over a mix of several target layers.

    Parameters
    ----------
    weights : Eagle3Weights
        The checkpoint's weights; the other parts are those of `DraftHead`.
    target_ids : Tensor
        ``[Vd]`` int64, the target token id of each draft token id.
    """

    weights: Eagle3Weights
    target_ids: Tensor

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Mix the target's features ``[T, F]`` into draft hidden states ``[T, H]``."""
        states = hidden_states.to(self.layers[0].dtype)
        mixed: Tensor = self.weights.fc(self.weights.norm_features(states))
        return mixed

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        *,
        sources: Tensor | None = None,
    ) -> DraftOutput:
        """Run the draft over flattened tokens; see `DraftModel.forward`."""
        embeds, rope = self._inputs(input_ids, positions)
        if sources is not None:
            hidden_states = hidden_states[sources]
        x = self.weights.midlayer(embeds, hidden_states, rope, attend, rows)
        normed = self.weights.norm(x)
        # The next step continues the residual stream; in the paper only the logits see the norm.
        return DraftOutput(self._logits(normed), normed if self.weights.norm_output else x)

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map draft token ids, int64 of any shape, to target token ids."""
        return self.target_ids[token_ids]


def rms_norm(config: LlamaConfig, size: int | None = None) -> Any:
    """Return a head's norm, of its hidden size by default."""
    return LlamaRMSNorm(size or config.hidden_size, eps=config.rms_norm_eps)


def _feed_forward(layer: EagleLayer | Eagle3Layer, x: Tensor, rows: Tensor | None) -> Tensor:
    """Finish a layer for wanted rows: only attention needs the others."""
    if rows is not None:
        x = x[rows]
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out
