"""MTP layers predict the token after the next one.

They read the target's last state. Multi-token prediction (DeepSeek-V3, arXiv:2412.19437) leaves
such layers in a target's own checkpoint; `specattn.models.load_draft` reads the first one, under
the name ``mtp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.autocast import without_autocast
from specattn.kernels.fused import add_rms_norm
from specattn.models.eagle import DraftHead
from specattn.models.fused.block import add_norm_for, embed_norm_pair_for
from specattn.speculative.model import DraftOutput

if TYPE_CHECKING:
    from specattn.speculative.model import Attend


@dataclass(frozen=True, eq=False, kw_only=True)
class MtpHead(DraftHead):
    """A target's first MTP layer, applied again for every further token.

    It reads the target's last state after the final norm, and then its own: what its logits come
    from.

    Parameters
    ----------
    embed_norm, hidden_norm, norm : Tensor
        ``[H]``: weights of the norms of embeddings and of states before they are mixed, and before
        ``lm_head``; the other parts are those of `DraftHead`.
    """

    embed_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor

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
        (block,) = self.blocks
        both, _ = embed_norm_pair_for(
            self.fc.rows_format,
            *self._embedding(input_ids),
            hidden_states,
            self.embed_norm,
            self.hidden_norm,
            block.eps,
            rows=sources,
            dtype=self.dtype,
        )
        x, stream = add_norm_for(
            block.qkv.rows_format,
            self.fc.parts(both),
            None,
            block.input_norm,
            block.eps,
            dtype=self.dtype,
        )
        x, stream = block.attend(x, stream, 0, positions, attend, rows)
        x, _ = add_rms_norm(block.feed(x), stream, self.norm, block.eps)
        return DraftOutput(self._logits(x), x)
