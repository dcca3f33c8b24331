"""EAGLE-3 heads with everything between the matrix products fused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from specattn.kernels.fused import add_rms_norm, embed_norm_pair
from specattn.models.fused.block import (
    Block,
    RotaryTable,
    product,
    refuse_unless_fused,
)
from specattn.speculative.model import DraftOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.config import AttnConfig
    from specattn.models.eagle import Eagle3Head
    from specattn.models.hf import FeatureSpec
    from specattn.speculative.model import Attend


@dataclass(frozen=True, eq=False)
class FusedEagle3:
    """A draft of few kernel launches, which goes wherever an `Eagle3Head` goes.

    `from_head` makes one of a loaded head.

    Parameters
    ----------
    block : Block
        The weights of the layer; its input norm is that of the embeddings.
    embed_tokens, lm_head : Tensor
        ``[V, H]`` and ``[Vd, H]``, the input embedding and the output projection.
    hidden_norm, norm : Tensor
        ``[H]``: weights of the norms of hidden states before attention and before ``lm_head``.
    fc : Tensor or None
        ``[H, F]``, the projection that mixes the target's features; None if there is one alone.
    target_ids : Tensor or None
        ``[Vd]`` int64, the target token id of each draft token id; None if both are the same.
    features : FeatureSpec
        The hidden states that the target must give: pass it to `FusedTarget.with_features`.
    feature_size : int
        F, the width of the features.
    norm_features : callable, optional
        The norm of the features before they are mixed.
    norm_before_residual : bool
        Whether the residual stream begins with the norm of the hidden state.
    norm_output : bool
        Whether the next draft step continues the normed hidden state.
    """

    block: Block
    embed_tokens: Tensor
    lm_head: Tensor
    hidden_norm: Tensor
    norm: Tensor
    fc: Tensor | None
    target_ids: Tensor | None
    features: FeatureSpec
    feature_size: int
    norm_features: Callable[[Tensor], Tensor] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False

    @classmethod
    def from_head(cls, head: Eagle3Head, max_context_len: int) -> Self:
        """Fuse a loaded head; the two share one copy of the weights.

        Parameters
        ----------
        head : Eagle3Head
            A head of `load_draft`.
        max_context_len : int
            The longest context: the target's, for the head's own may be shorter.

        Raises
        ------
        ModelError
            If the fused path does not compute this head.
        """
        weights = head.weights
        # These two may be the target's.
        ends = ("lm_head", head.lm_head), ("embed_tokens", head.embed_tokens)
        refuse_unless_fused("draft", head.rope.config, [*weights.named_modules(), *ends])
        layer = weights.midlayer
        rotary = RotaryTable(head.rope, max_context_len)
        # All norms of a head have the same epsilon.
        block = Block.of_layer(layer, rotary, head.layers[0], layer.hidden_norm.variance_epsilon)
        fc = weights.fc.weight if isinstance(weights.fc, nn.Linear) else None
        return cls(
            block,
            head.embed_tokens.weight,
            head.lm_head.weight,
            layer.hidden_norm.weight,
            weights.norm.weight,
            fc,
            head.target_ids,
            head.features,
            head.feature_size,
            weights.norm_features,
            layer.norm_before_residual,
            weights.norm_output,
        )

    def for_context(self, max_context_len: int) -> Self:
        """Return a draft of the same weights that rotates ``max_context_len`` positions."""
        rotary = self.block.rotary.of_length(max_context_len)
        if rotary is self.block.rotary:
            return self
        return replace(self, block=replace(self.block, rotary=rotary))

    @property
    def layers(self) -> tuple[AttnConfig, ...]:
        """The attention geometry of the one layer."""
        return (self.block.geometry,)

    @property
    def hidden_size(self) -> int:
        """H, the width of the states between draft steps."""
        return self.norm.shape[0]

    @property
    def vocab_size(self) -> int:
        """Vd, the width of the logits."""
        return self.lm_head.shape[0]

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Mix the target's features ``[T, F]`` into draft hidden states ``[T, H]``."""
        states = hidden_states.to(self.norm.dtype)
        if self.norm_features is not None:
            states = self.norm_features(states)
        return states if self.fc is None else product(states, self.fc)

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
        block = self.block
        both, stream = embed_norm_pair(
            input_ids,
            self.embed_tokens,
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
        logits = product(x.to(self.lm_head.dtype), self.lm_head)
        return DraftOutput(logits, x if self.norm_output else stream)

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map draft token ids, int64 of any shape, to target token ids."""
        return token_ids if self.target_ids is None else self.target_ids[token_ids]
