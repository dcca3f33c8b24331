"""EAGLE draft heads continue the target's hidden states with one layer.

EAGLE-1 (Li et al., 2024, arXiv:2401.15077) and EAGLE-2 (arXiv:2406.16858) share one head; EAGLE-3
(arXiv:2503.01840) reads three of the target's layers and may predict a smaller vocabulary.
`specattn.models.load_draft` builds the heads, of the same fused layers as a `FusedTarget`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from specattn.autocast import without_autocast
from specattn.models.fused.block import FusedModel, add_norm_for, embed_norm_pair_for
from specattn.speculative.model import DraftOutput

if TYPE_CHECKING:
    from specattn.models.fused.projection import Projection
    from specattn.speculative.model import Attend


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftHead(FusedModel):
    """The parts that the heads of EAGLE and DFlash have.

    Parameters
    ----------
    fc : Projection or None
        ``[H, F]``, of what the head reads; None if it reads one state of its width.
    feature_size : int
        F, the width of the features.
    target_ids : Tensor or None
        ``[Vd]`` int64, the target token id of each draft token id; None if both are the same.
    logit_scale : float
        What the logits are multiplied by. The other parts are those of `FusedModel`.
    """

    fc: Projection | None
    feature_size: int
    target_ids: Tensor | None = None
    logit_scale: float = 1.0

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map draft token ids, int64 of any shape, to target token ids."""
        return token_ids if self.target_ids is None else self.target_ids[token_ids]

    def _logits(self, x: Tensor) -> Tensor:
        logits = super()._logits(x)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale


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
    @without_autocast
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
        stream = self.fc.product(both)
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

    @without_autocast
    def combine(self, hidden_states: Tensor) -> Tensor:
        """Mix the target's features ``[T, F]`` into draft hidden states ``[T, H]``."""
        states, eps = hidden_states.to(self.dtype), self.blocks[0].eps
        if self.feature_norms:
            parts = states.split([len(weight) for weight in self.feature_norms], dim=-1)
            pairs = zip(parts, self.feature_norms, strict=True)
            states = torch.cat([rms_norm(x, w.shape, w, eps) for x, w in pairs], dim=-1)
        return states if self.fc is None else self.fc.product(states)

    @torch.no_grad()
    @without_autocast
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
        both, stream = embed_norm_pair_for(
            None if self.norm_before_residual else block.rows_format,
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
        how = None if self.norm_output else self.lm_head.rows_format
        x, stream = add_norm_for(how, block.feed(x), stream, self.norm, block.eps)
        return DraftOutput(self._logits(x), x if self.norm_output else stream)
