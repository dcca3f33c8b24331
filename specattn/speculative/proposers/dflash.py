"""Blocks of tokens, drafted in one forward (DFlash, arXiv:2602.06036).

The draft fills the places behind the bonus token, each by itself, so that it gives the step a
distribution per place: a chain follows the most probable tokens, a tree several of every place.
What it keeps of a text are projections of the target's features, which `BoundDFlash.absorb` writes
for accepted tokens. The block's own keys and values lie behind the committed length, and are
written again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.batch import Marginals
from specattn.speculative.proposers.block import bind_block
from specattn.speculative.proposers.draft import choose_tokens
from specattn.speculative.proposers.proposer import BoundPrompt, BoundProposer, ModelProposer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from specattn.batch import AcceptResult
    from specattn.config import SpecConfig
    from specattn.speculative.prompts.buffers import ChunkViews
    from specattn.speculative.proposers.block import BlockDraftModel
    from specattn.speculative.proposers.proposer import PromptChunk, Proposer
    from specattn.speculative.step.buffers import StepViews


class DFlashProposer(ModelProposer):
    """Proposes what a draft fills a block with.

    Parameters
    ----------
    draft : ModelSlot or BlockDraftModel
        As in `ModelProposer`.
    """

    model: BlockDraftModel

    def at_rest(self, nothing: Proposer) -> Proposer:
        """Return nothing: what it proposes follows from its states, whatever they are."""
        return nothing

    def draft_len(self, config: SpecConfig) -> int:
        """Return the block's columns, or the accepted path's."""
        return max(self.num_positions(config), config.num_steps + 1)

    def num_positions(self, config: SpecConfig) -> int:
        """Return the block's positions."""
        return self.model.block.size if config.num_steps else 0

    def check(self, config: SpecConfig) -> None:
        """Refuse trees that are deeper than a block, or too wide."""
        block = self.model.block
        most = block.size - block.first_draft
        if config.num_steps > most:
            raise ValueError(
                f"num_steps must be at most {most}, the tokens that a block of {block.size} "
                f"drafts, got {config.num_steps}"
            )
        super().check(config)

    def bind(self, step: StepViews) -> BoundDFlash:
        """Return the block forward of so many requests."""
        return BoundDFlash(self, step)

    def prompt(self, chunk: PromptChunk) -> Mapping[str, Tensor]:
        """Write the prompts' context; nothing else is kept."""
        assert chunk.features is not None
        states, slots = self.model.combine(chunk.features), chunk.plan.out_slots
        self.model.write_context(states, chunk.positions, self.slot.backend.kv, slots)
        return {}

    def bind_prompt(self, chunk: ChunkViews) -> BoundPrompt:
        """Return the writer of chunks' context."""
        return _BoundContext(self, chunk)


class _BoundContext(BoundPrompt):
    proposer: DFlashProposer

    def read(self, features: Tensor | None) -> Mapping[str, Tensor]:
        """Write the context; slots of padding are skipped."""
        assert features is not None
        model, chunk = self.proposer.model, self.chunk
        pool, slots = self.proposer.slot.backend.kv, chunk.plan.out_slots
        model.write_context(model.combine(features), chunk.tokens.positions, pool, slots)
        return {}


class BoundDFlash(BoundProposer):
    """The block forward of a step, and the writer of its context.

    Attributes
    ----------
    block_ids : Tensor
        ``[B, n]`` int64: bonus tokens, and masks behind them.
    """

    proposer: DFlashProposer

    def __init__(self, proposer: DFlashProposer, step: StepViews) -> None:
        super().__init__(proposer, step)
        model, config, buffers = proposer.model, step.config, step.buffers
        block, size = model.block, model.block.size
        masks = torch.full((size,), block.mask_token_id)
        self.block_ids = step.buffer("block_ids", masks)
        if not config.num_steps:
            return
        # the first launch writes the bonus token, and the length into every column of anchors
        self.gathers = {"bonus_tokens": self.block_ids[:, :1]}
        self.positions = anchors = step.buffer("anchors", torch.zeros_like(masks)[None])
        self._attend = bind_block(
            proposer.slot.backend,
            block.views,
            step.table.req_to_token,
            req_pool_indices=buffers.req_pool_indices,
            seq_lens=buffers.seq_lens,
            positions=buffers.positions[:, :size],
            anchors=anchors[:, 0],
            slots=buffers.window[:, :size],
            page_size=config.page_size,
        )
        self.proposing = (self._attend,)
        places = torch.arange(config.num_steps, device=step.device) + block.first_draft
        first = torch.arange(len(step), device=step.device)[:, None] * size
        self._rows = (first + places).flatten()

    def propose(self) -> Marginals:
        """Fill the block; return what each place may hold."""
        model, config, step = self.proposer.model, self.step.config, self.step
        buffers, size = step.buffers, self.block_ids.shape[1]
        positions = buffers.rotary(buffers.positions[:, :size]).flatten()
        logits = model.forward_block(self.block_ids.flatten(), positions, self._attend, self._rows)
        draws = buffers if config.draft_sampling else None
        # a coin belongs to the place of the token before it, as in other drafts
        places = buffers.positions[:, : config.num_steps]
        probs, *others = choose_tokens(model, logits, config.proposals, draws, places)
        return Marginals(*(one.unflatten(0, places.shape) for one in (probs.log_(), *others)))

    def absorb(self, accepted: AcceptResult) -> dict[str, Tensor]:
        """Write the context of the accepted path; nothing else is kept."""
        model, buffers = self.proposer.model, self.step.buffers
        width = buffers.features.shape[1]
        states = model.combine(buffers.features.flatten(0, 1))
        positions = buffers.rotary(buffers.positions[:, :width])
        pool, slots = self.proposer.slot.backend.kv, buffers.window[:, :width]
        model.write_context(states, positions.flatten(), pool, slots)
        return {}
