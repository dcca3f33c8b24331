"""Drafts and their proposers, or nothing at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specattn.checks import instance
from specattn.speculative.model import DraftModel, ModelSlot, check_model
from specattn.speculative.proposers.block import BlockDraftModel
from specattn.speculative.proposers.dflash import DFlashProposer
from specattn.speculative.proposers.eagle import EagleProposer
from specattn.speculative.proposers.proposer import BoundProposer, Proposer, ProposerFactory

if TYPE_CHECKING:
    from specattn.config import SpecConfig
    from specattn.speculative.proposers.proposer import Proposal
    from specattn.speculative.step.buffers import StepViews

#: What an engine takes to draft: a model, or what makes a proposer.
Draft = DraftModel | BlockDraftModel | ProposerFactory


class NoProposer(Proposer):
    """Proposes nothing: of plain decoding without a draft."""

    def check(self, config: SpecConfig) -> None:
        """Refuse all but plain decoding."""
        if config.num_steps:
            raise ValueError(
                "num_steps must be 0 (plain decoding, with num_draft_tokens 1) without a draft, "
                f"got {config.num_steps}"
            )

    def bind(self, step: StepViews) -> BoundProposer:
        """Return what does nothing."""
        return _BoundNothing(self, step)


class _BoundNothing(BoundProposer):
    reads_path = False

    def propose(self) -> Proposal:
        raise NotImplementedError("plain decoding drafts nothing")


def draft_of(draft: Draft | None) -> ProposerFactory:
    """Return what makes the proposer of a draft; None is plain decoding.

    Raises
    ------
    ValueError
        If it is neither a model nor a proposer.
    """
    if draft is None:
        return NoProposer()
    # a class has what its instances have
    if isinstance(draft, ProposerFactory) and not isinstance(draft, type):
        return draft
    wanted = "what load_draft, load_dflash or load_lm_draft returns, or a proposer"
    check_model("draft", draft, wanted, has="feature_size")
    return (DFlashProposer if isinstance(draft, BlockDraftModel) else EagleProposer)(draft)


def as_proposer(draft: ModelSlot[Any] | Proposer | None) -> Proposer:
    """Return the proposer of a draft model, or what is one.

    Raises
    ------
    ValueError
        If it is neither, or the slot of a model that does not draft.
    """
    if isinstance(draft, ModelSlot):
        return draft_of(draft.model).make(lambda _: draft)
    if draft is None:
        return NoProposer()
    instance("draft", draft, Proposer, "a ModelSlot, a Proposer or None")
    return draft
