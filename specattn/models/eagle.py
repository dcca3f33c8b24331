"""EAGLE draft heads continue the target's hidden states with one layer.

EAGLE-1 (Li et al., 2024, arXiv:2401.15077) and EAGLE-2 (arXiv:2406.16858) share one head; EAGLE-3
(arXiv:2503.01840) reads three of the target's layers and may predict a smaller vocabulary.
`specattn.models.load_draft` builds the heads, of the same fused layers as a `FusedTarget`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from specattn.kernels.fused import add_rms_norm, embed_norm_pair
from specattn.models.fused.block import product
from specattn.models.shards import is_sharded
from specattn.speculative.model import DraftOutput

if TYPE_CHECKING:
    from specattn.config import AttnConfig
    from specattn.models.fused.block import Block
    from specattn.speculative.model import Attend

#: Settings of vLLM's speculators for norms that the paper's EAGLE-3 head has not: the norm of the
#: hidden state before the residual stream begins, of all features side by side or of each one
#: before they are mixed, and of the hidden state that the next draft step continues.
EAGLE3_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftHead:
    """The parts that the heads of EAGLE and DFlash have.

    Parameters
    ----------
    embed_tokens : nn.Embedding
        ``[V, H]``, over target token ids; the target's own unless the checkpoint has one.
    lm_head : nn.Linear
        ``[Vd, H]``; the target's own unless the checkpoint has one.
    blocks : tuple of Block
        The weights of every layer.
    fc : Tensor or None
        ``[H, F]``, the projection of what the head reads; None if it reads one state of its width.
    fc_bias : Tensor or None
        ``[H]``.
    features : tuple of int
        The hidden states that the target must give: pass it to `HFTarget.with_features`.
    feature_size : int
        F, the width of the features.
    target_ids : Tensor or None
        ``[Vd]`` int64, the target token id of each draft token id; None if both are the same.
    """

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    blocks: tuple[Block, ...]
    fc: Tensor | None
    features: tuple[int, ...]
    feature_size: int
    fc_bias: Tensor | None = None
    target_ids: Tensor | None = None

    @property
    def layers(self) -> tuple[AttnConfig, ...]:
        """The attention geometry of every layer."""
        return tuple(block.geometry for block in self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and hidden states."""
        return self.blocks[0].geometry.dtype

    @property
    def hidden_size(self) -> int:
        """H, the width of the states between draft steps."""
        return self.lm_head.in_features

    @property
    def vocab_size(self) -> int:
        """Vd, the width of the logits."""
        return self.lm_head.out_features

    def for_context(self, max_context_len: int) -> Self:
        """Return a head of the same weights that rotates so many positions.

        Later ones count as the last. A head that was never asked has those of its target.

        Raises
        ------
        ModelError
            If its rope type rotates contexts of that length in another way.
        """
        rotary = self.blocks[0].rotary.of_length(max_context_len)
        if rotary is self.blocks[0].rotary:
            return self
        return replace(self, blocks=tuple(replace(one, rotary=rotary) for one in self.blocks))

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map draft token ids, int64 of any shape, to target token ids."""
        return token_ids if self.target_ids is None else self.target_ids[token_ids]

    def _embedding(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids ``[T]`` and the table of embeddings whose rows they are."""
        if _is_plain(self.embed_tokens, nn.Embedding):
            return input_ids, self.embed_tokens.weight
        # one that scales, or a shard
        embeds: Tensor = self.embed_tokens(input_ids)
        return torch.arange(len(embeds), device=embeds.device), embeds.to(self.dtype)

    def _logits(self, x: Tensor) -> Tensor:
        x = x.to(self.lm_head.weight.dtype)
        if _is_plain(self.lm_head, nn.Linear):
            return product(x, self.lm_head.weight, self.lm_head.bias)
        logits: Tensor = self.lm_head(x)
        return logits


@dataclass(frozen=True, eq=False, kw_only=True)
class EagleHead(DraftHead):
    """The draft of EAGLE-1 and EAGLE-2, over the target's last state.

    Parameters
    ----------
    normed : tuple of bool
        Whether each layer norms its input; the other parts are those of `DraftHead`.
    """

    normed: tuple[bool, ...]

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Return the target's last hidden states ``[T, H]``, in the draft's dtype."""
        return hidden_states.to(self.dtype)

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
        assert self.fc is not None
        ids, table = self._embedding(input_ids)
        if sources is not None:
            hidden_states = hidden_states[sources]
        both = torch.cat([table[ids].to(self.dtype), hidden_states], dim=-1)
        stream = product(both, self.fc, self.fc_bias)
        last = len(self.blocks) - 1
        for layer, (block, normed) in enumerate(zip(self.blocks, self.normed, strict=True)):
            weight = block.input_norm
            x = rms_norm(stream, weight.shape, weight, block.eps) if normed else stream
            wanted = rows if layer == last else None
            x, stream = block.attend(x, stream, layer, positions, attend, wanted)
            stream = (stream + block.feed(x).sum(0)).to(self.dtype)
        # There is no norm: the head learns to continue states that the target has normalised.
        return DraftOutput(self._logits(stream), stream)


@dataclass(frozen=True, eq=False, kw_only=True)
class Eagle3Head(DraftHead):
    """The draft of EAGLE-3, over a mix of several target layers.

    The input norm of its one layer is that of the embeddings.

    Parameters
    ----------
    hidden_norm, norm : Tensor
        ``[H]``: weights of the norms of hidden states before attention and before ``lm_head``.
    feature_norms : tuple of Tensor
        Weights of norms of the features before they are mixed: ``[F]``, or one per hidden state;
        the other parts are those of `DraftHead`.
    norm_before_residual : bool
        Whether the residual stream begins with the norm of the hidden state.
    norm_output : bool
        Whether the next draft step continues the normed hidden state.
    """

    hidden_norm: Tensor
    norm: Tensor
    feature_norms: tuple[Tensor, ...] = ()
    norm_before_residual: bool = False
    norm_output: bool = False

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Mix the target's features ``[T, F]`` into draft hidden states ``[T, H]``."""
        states, eps = hidden_states.to(self.dtype), self.blocks[0].eps
        if self.feature_norms:
            parts = states.split([len(weight) for weight in self.feature_norms], dim=-1)
            pairs = zip(parts, self.feature_norms, strict=True)
            states = torch.cat([rms_norm(x, w.shape, w, eps) for x, w in pairs], dim=-1)
        return states if self.fc is None else product(states, self.fc, self.fc_bias)

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
        (block,) = self.blocks
        both, stream = embed_norm_pair(
            *self._embedding(input_ids),
            hidden_states,
            block.input_norm,
            self.hidden_norm,
            block.eps,
            rows=sources,
        )
        if self.norm_before_residual:
            stream = both[:, self.hidden_size :]
        x, stream = block.attend(both, stream, 0, positions, attend, rows)
        # The next step continues the stream; in the paper only the logits see the norm.
        x, stream = add_rms_norm(block.feed(x), stream, self.norm, block.eps)
        return DraftOutput(self._logits(x), x if self.norm_output else stream)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module computes nothing but what its whole weights say."""
    return type(module) is kind and not is_sharded(module, recurse=False)
