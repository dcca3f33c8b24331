"""DFlash heads with everything between the matrix products fused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specattn.kernels.fused import add_rms_norm, embed_rms_norm
from specattn.models.fused.block import (
    Block,
    RotaryTable,
    product,
    project,
    refuse_unless_fused,
)

if TYPE_CHECKING:
    from specattn.config import AttnConfig
    from specattn.models.dflash import DFlashHead
    from specattn.models.hf import FeatureSpec
    from specattn.speculative.block import BlockShape, ContextStore
    from specattn.speculative.model import Attend


@dataclass(frozen=True, eq=False)
class FusedDFlash:
    """A draft of few kernel launches, which goes wherever a `DFlashHead` goes.

    `from_head` makes one of a loaded head.

    Parameters
    ----------
    block : BlockShape
        What the head fills in one forward.
    blocks : tuple of Block
        The weights of every layer.
    embed_tokens, lm_head : Tensor
        ``[V, H]`` and ``[Vd, H]``, the input embedding and the output projection.
    fc : Tensor
        ``[H, F]``, the projection that mixes the target's features.
    hidden_norm, norm : Tensor
        ``[H]``: weights of the norms of the context and before ``lm_head``.
    features : FeatureSpec
        The hidden states that the target must give.
    layers : tuple of AttnConfig
        The attention geometry of every layer.
    target_ids : Tensor or None
        ``[Vd]`` int64, the target token id of each draft token id; None if both are the same.
    """

    block: BlockShape
    blocks: tuple[Block, ...]
    embed_tokens: Tensor
    lm_head: Tensor
    fc: Tensor
    hidden_norm: Tensor
    norm: Tensor
    features: FeatureSpec
    layers: tuple[AttnConfig, ...]
    target_ids: Tensor | None = None

    @classmethod
    def from_head(cls, head: DFlashHead, max_context_len: int) -> Self:
        """Fuse a loaded head; the two share one copy of the weights.

        Parameters
        ----------
        head : DFlashHead
            A head of `load_dflash`.
        max_context_len : int
            The longest context: the target's, for the head's own may be shorter.

        Raises
        ------
        ModelError
            If the fused path does not compute this head.
        """
        weights, config = head.weights, head.rope.config
        ends = ("lm_head", head.lm_head), ("embed_tokens", head.embed_tokens)
        refuse_unless_fused("draft", config, [*weights.named_modules(), *ends])
        rotary = RotaryTable(head.rope, max_context_len)
        blocks = tuple(
            Block.of_layer(layer, rotary, geometry, config.rms_norm_eps)
            for layer, geometry in zip(weights.layers, head.layers, strict=True)
        )
        return cls(
            head.block,
            blocks,
            head.embed_tokens.weight,
            head.lm_head.weight,
            weights.fc.weight,
            weights.hidden_norm.weight,
            weights.norm.weight,
            head.features,
            head.layers,
            head.target_ids,
        )

    def for_context(self, max_context_len: int) -> Self:
        """Return a draft of the same weights that rotates ``max_context_len`` positions."""
        rotary = self.blocks[0].rotary.of_length(max_context_len)
        if rotary is self.blocks[0].rotary:
            return self
        return replace(self, blocks=tuple(replace(one, rotary=rotary) for one in self.blocks))

    @property
    def vocab_size(self) -> int:
        """Vd, the width of the logits."""
        return self.lm_head.shape[0]

    @property
    def feature_size(self) -> int:
        """F, the width of the features."""
        return self.fc.shape[1]

    @cached_property
    def _nothing(self) -> Tensor:
        """A residual stream ``[1, H]`` of zeros, which rows share."""
        return torch.zeros_like(self.norm)[None]

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Mix the target's features ``[T, F]`` into the draft's context ``[T, H]``."""
        parts = project(hidden_states.to(self.norm.dtype), self.fc)
        stream = self._nothing.expand(len(hidden_states), -1)
        mixed, _ = add_rms_norm(parts, stream, self.hidden_norm, self.blocks[0].eps)
        return mixed

    @torch.no_grad()
    def write_context(self, states: Tensor, positions: Tensor, store: ContextStore) -> None:
        """Store every layer's keys and values; see `BlockDraftModel.write_context`."""
        for layer, block in enumerate(self.blocks):
            parts, rotation = block.keys_values(states)
            store.packed(layer, parts, positions, rotation)

    @torch.no_grad()
    def forward_block(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Run the draft over blocks; see `BlockDraftModel.forward_block`."""
        blocks, eps = self.blocks, self.blocks[0].eps
        last = len(blocks) - 1
        x, stream = embed_rms_norm(input_ids, self.embed_tokens, blocks[0].input_norm, eps)
        for layer, block in enumerate(blocks):
            wanted = rows if layer == last else None
            x, stream = block.attend(x, stream, layer, positions, attend, wanted)
            norm = self.norm if layer == last else blocks[layer + 1].input_norm
            x, stream = add_rms_norm(block.feed(x), stream, norm, eps)
        return product(x.to(self.lm_head.dtype), self.lm_head)

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map draft token ids, int64 of any shape, to target token ids."""
        return token_ids if self.target_ids is None else self.target_ids[token_ids]
