"""Whole language models as drafts: any causal LM with the target's tokenizer.

Such a standalone draft (Leviathan et al., arXiv:2211.17192) reads no features of the target. It
keeps keys and values of its own, over every token of the text and, unlike the target, over the
bonus token, too: so it leads by one, and its first proposals come from the extend of the step
before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from specattn.buffers import send_parts
from specattn.errors import ModelError
from specattn.speculative.model import DraftOutput, for_context
from specattn.speculative.proposers.eagle import BoundEaglePrompt, EagleProposer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from specattn.config import LayerConfig, SpecConfig
    from specattn.plan import ExtendPlan
    from specattn.speculative.model import Attend, ModelSlot, TargetModel
    from specattn.speculative.prompts.buffers import ChunkViews
    from specattn.speculative.proposers.proposer import BoundPrompt, PromptChunk, Proposer


@dataclass(frozen=True, eq=False)
class LMDraft:
    """A causal LM that drafts for another one.

    The vocabularies may differ by what pads them: a token that the draft has not is read as its
    last one, and tokens that the target has not are never proposed.

    Parameters
    ----------
    model : TargetModel
        The language model.
    target_vocab_size : int
        V, the width of the target's logits.
    """

    model: TargetModel
    target_vocab_size: int
    #: A draft step leaves keys and values alone.
    hidden_size: ClassVar[int] = 0
    #: Nothing of the target is read.
    feature_size: ClassVar[int] = 0
    #: Draft and target share a vocabulary.
    target_ids: ClassVar[Tensor | None] = None

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """What every layer is."""
        return self.model.layers

    @property
    def vocab_size(self) -> int:
        """Vd, the tokens that both models have."""
        return min(self.model.vocab_size, self.target_vocab_size)

    def for_context(self, max_context_len: int) -> Self:
        """Return the draft for contexts of that length; see `ContextModel`."""
        try:
            model = for_context(self.model, max_context_len)
        except ModelError as error:
            raise ModelError("draft", str(error)) from error
        return self if model is self.model else replace(self, model=model)

    def draft_len(self, config: SpecConfig) -> int:
        """Return the columns past the committed length that it writes at most."""
        return StandaloneProposer(self).draft_len(config)

    def make(self, slot: Callable[[Any], ModelSlot[Any]]) -> Proposer:
        """Return its proposer; see `ProposerFactory`."""
        return StandaloneProposer(slot(self))

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Return the target's features ``[T, 0]``."""
        return hidden_states

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
        """Run the model over flattened tokens; see `DraftModel.forward`.

        Each token stands at its own position; the states, ``[T, 0]``, say nothing.
        """
        known = self.model.vocab_size
        if known < self.target_vocab_size:
            input_ids = input_ids.clamp(max=known - 1)
        logits = self.model.forward(input_ids, positions, attend, rows).logits
        states = logits.new_empty(len(logits), 0, dtype=self.layers[0].dtype)
        return DraftOutput(logits[:, : self.vocab_size], states)

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Return the ids themselves: the vocabulary is the target's."""
        return token_ids


class StandaloneProposer(EagleProposer):
    """Proposes the beams of a whole language model.

    Parameters
    ----------
    draft : ModelSlot or LMDraft
        As in `ModelProposer`.
    """

    read_ahead = 1

    def prompt(self, chunk: PromptChunk) -> Mapping[str, Tensor]:
        """Run the draft over prompts, and the bonus tokens after them.

        The slot of a bonus token is the one after its prompt's. A prompt that fills its context has
        none, and no step follows it.
        """
        plan, token_ids, positions, rows = _with_bonus(chunk)
        out = self.model.forward(
            token_ids, chunk.last[:0], positions, chunk.bind(self.slot.backend, plan), rows
        )
        return self.started(out, chunk)

    def bind_prompt(self, chunk: ChunkViews) -> BoundPrompt:
        """Return the model's forward over chunks of so many tokens."""
        return _BoundStandalonePrompt(self, chunk)


class _BoundStandalonePrompt(BoundEaglePrompt):
    def read(self, features: Tensor | None) -> Mapping[str, Tensor]:
        """Run the model over the chunk and the bonus tokens."""
        tokens, pieces = self.chunk.tokens, self.chunk.pieces
        behind = pieces.places - pieces.last
        # 0 in these places, until here
        ids = tokens.tokens.index_add(0, pieces.places, self.chunk.bonus * behind)
        model, none = self.proposer.model, pieces.last[:0]
        return self._started(
            model.forward(ids, none, tokens.positions, self._attend, pieces.places)
        )


def _with_bonus(chunk: PromptChunk) -> tuple[ExtendPlan, Tensor, Tensor, Tensor]:
    """Let bonus tokens follow the prompts that end in a chunk.

    Returns the plan, the tokens and their positions, and ``[E]`` where each prompt ends.
    """
    plan, context = chunk.plan, chunk.plan.req_to_token.shape[1]
    sizes = np.array([stop - start for start, stop in chunk.spans])
    stops = np.array([stop for _, stop in chunk.spans])
    ended = stops == np.array([len(text) for text in chunk.prompts])
    grows = ended & (stops < context)
    indptr = np.concatenate([[0], (sizes + grows).cumsum()])
    before = np.repeat(grows.cumsum() - grows, sizes)
    ends = indptr[1:] - 1
    # where the tokens of the prompts go, and the bonus tokens; the pieces that these follow,
    # their places among the bonus tokens, and those in their texts
    own, new, pieces, which, stops_of, offsets, last = send_parts(
        (
            np.arange(len(before)) + before,
            ends[grows],
            grows.nonzero()[0],
            grows[ended].nonzero()[0],
            stops[grows],
            indptr,
            ends[ended],
        ),
        chunk.last.device,
    )

    def joined(ours: Tensor, theirs: Tensor) -> Tensor:
        both = ours.new_empty(len(ours) + len(theirs))
        both[own], both[new] = ours, theirs.to(ours.dtype)
        return both

    bonus = chunk.bonus_tokens[which].clamp(min=0)
    slots = plan.req_to_token[plan.req_pool_indices[pieces], stops_of]
    plan = replace(
        plan,
        qo_indptr=offsets.to(torch.int32),
        out_slots=joined(plan.out_slots[0], slots)[None],
        max_q_len=int((sizes + grows).max()),
        max_seq_len=int((stops + grows).max()),
    )
    tokens, positions = joined(chunk.token_ids, bonus), joined(chunk.positions, stops_of)
    return plan, tokens, positions, last
