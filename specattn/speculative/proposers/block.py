"""Drafts that write whole blocks: their interface and attention.

A block is the bonus token and mask tokens behind it, at the positions after the committed ones. All
its tokens see the prefix. Which of the block they see, is the layer's: all of it, or what comes
before. The prefix holds no keys and values of a draft's own tokens: they are projections of the
target's features (DFlash, arXiv:2602.06036).

Shapes: B requests, n tokens of a block, T tokens of all requests, H the draft's hidden size, F the
width of the target's features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specattn.batch import Phase, RowLayout
from specattn.plan import AttnInputs, AttnPlan, causal_words, words_of
from specattn.speculative.model import AnyDraftModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.attention.bound import BoundLayers
    from specattn.attention.layers import LayeredBackend
    from specattn.cache.kv_pool import KVPool
    from specattn.speculative.model import Attend


@dataclass(frozen=True)
class BlockView:
    """The visibility of a block's tokens in a layer.

    Parameters
    ----------
    causal : bool
        Whether a token sees the block up to itself; else it sees all of it.
    anchored : bool
        Whether a window is that of the block's first token for all its tokens, as speculators
        trains it; else each token has its own, which goes with ``causal`` only.
    """

    causal: bool
    anchored: bool

    def words(self, size: int) -> Tensor:
        """Return ancestor words ``[n, ceil(n / 64)]`` int64, on the host."""
        if self.causal:
            return causal_words(RowLayout(size, size, Phase.DRAFT))
        return words_of([(1 << size) - 1] * size, size)


@dataclass(frozen=True)
class BlockShape:
    """A draft's block, and who sees what of it.

    Parameters
    ----------
    size : int
        n, the bonus token included.
    mask_token_id : int
        The token at the places that are to be filled.
    first_draft : int
        The place whose logits are the first drafted token's: 0 or 1.
    views : tuple of BlockView
        One per layer.
    """

    size: int
    mask_token_id: int
    first_draft: int
    views: tuple[BlockView, ...]


@runtime_checkable
class BlockDraftModel(AnyDraftModel, Protocol):
    """A model that proposes a block of tokens in one forward."""

    @property
    def block(self) -> BlockShape:
        """The block that it fills in one forward."""

    def write_context(self, states: Tensor, positions: Tensor, pool: KVPool, slots: Tensor) -> None:
        """Store every layer's keys and values of committed tokens.

        Parameters
        ----------
        states : Tensor
            ``[T, H]``, from `combine`.
        positions : Tensor
            ``[T]`` int64.
        pool : KVPool
            The draft's, where each layer's go, position embedding applied.
        slots : Tensor
            ``[B, q]`` int32 with B q = T; may have a row stride.
        """

    def forward_block(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Run the draft over blocks; return logits ``[R, Vd]``.

        Parameters
        ----------
        input_ids, positions : Tensor
            ``[B * n]`` int64: each request's bonus token and masks.
        attend : Attend
            Called once per layer.
        rows : Tensor, optional
            ``[R]`` int64 indices of the tokens whose logits are wanted; all if None.
        """


def bind_block(  # noqa: PLR0913 - as its docstring says
    backend: LayeredBackend,
    views: Sequence[BlockView],
    req_to_token: Tensor,
    *,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    anchors: Tensor,
    slots: Tensor,
    page_size: int = 1,
) -> BoundLayers:
    """Bind a draft's layers to a bucket's forward, a plan per view.

    Parameters
    ----------
    backend : LayeredBackend
        The draft's attention, over its own pool's layers.
    views : sequence of BlockView
        One per layer.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32.
    req_pool_indices, seq_lens : Tensor
        ``[B]`` int64 and int32.
    positions, anchors : Tensor
        ``[B, n]`` int64, of the block's tokens, and of the block's first token for each of them;
        may have a row stride. Read under windows only.
    slots : Tensor
        ``[B, n]`` int32, where the block's keys and values go; may have a row stride.
    page_size : int
        As in `RowLayout`.

    Raises
    ------
    ValueError
        If a view that is not causal has windows of its own: no backend looks ahead by position.
    """
    if any(not (view.causal or view.anchored) for view in views):
        raise ValueError("a view must be causal or anchored: no window looks ahead")
    windowed = any(layer.backend.config.window_left >= 0 for layer in backend.attends)
    distinct, (batch, size), plans = list(dict.fromkeys(views)), positions.shape, []
    for view in distinct:
        # causal kernels have windows of their own
        causal = view.causal and not (view.anchored and windowed)
        layout = RowLayout(size, size, Phase.DRAFT, causal, page_size)
        words = view.words(size).to(positions.device).repeat(batch, 1, 1)
        seen = anchors if view.anchored else positions
        inputs = AttnInputs(req_pool_indices, seq_lens, seen, slots, words)
        plans.append(AttnPlan.over(layout, req_to_token, inputs))
    return backend.bind(*plans, views=[distinct.index(view) for view in views])
