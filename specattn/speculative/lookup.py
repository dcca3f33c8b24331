"""Prompt lookup: the text itself drafts, alone or before a model.

What the last tokens were followed by earlier in the text, they may be followed by again (Saxena,
2023). That is often so where an answer repeats its prompt: in summaries, edits and code. Nothing is
computed but a search, on the device, in two launches; one more appends what was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from specattn.batch import Linked
from specattn.checks import whole_number
from specattn.kernels.lookup import MAX_MATCHES, MAX_NGRAM, append_text, lookup_tree
from specattn.speculative.host_proposer import HostProposer
from specattn.speculative.proposer import BoundProposer, Proposer, draft_len_of, make_proposer
from specattn.speculative.states import StateField

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from specattn.batch import AcceptResult
    from specattn.buffers import Fingerprint
    from specattn.config import SpecConfig
    from specattn.speculative.block import BlockDraftModel
    from specattn.speculative.model import DraftModel, ModelSlot
    from specattn.speculative.proposer import PromptChunk, ProposerFactory, StepViews

# the state that holds a request's tokens by position
TEXT = "text"


class LookupProposer(Proposer):
    """Proposes what followed earlier matches of a request's last tokens.

    A chain follows the best match, a tree several: they are merged by what they have in common.
    How matches rank, `lookup_tree` says. A request without a match verifies its root alone.

    Parameters
    ----------
    min_ngram, max_ngram : int
        Fewest and most last tokens that a match has in common with the text's end, 1 to 64.
    matches : int, optional
        Most matches of a tree, 1 to 32; the config's ``topk`` if None, so that a chain has one.

    Raises
    ------
    ValueError
        If a number is of another kind or outside its range; by what a config is given to, if
        drafts are to be drawn: text has no distribution.
    """

    def __init__(self, min_ngram: int = 2, max_ngram: int = 5, matches: int | None = None) -> None:
        self.max_ngram = whole_number("max_ngram", max_ngram, 1, MAX_NGRAM)
        self.min_ngram = whole_number("min_ngram", min_ngram, 1, self.max_ngram)
        self.matches = matches
        if matches is not None:
            self.matches = whole_number("matches", matches, 1, MAX_MATCHES)

    def state_fields(self, config: SpecConfig) -> Mapping[str, StateField]:
        """Return the text's field."""
        _check_drawing(config)
        # a full context ends with a token that has no slot
        return {TEXT: StateField(config.max_context_len + 1, torch.int32)}

    def bind(self, step: StepViews) -> BoundLookup:
        """Allocate the tree's nodes."""
        config = step.config
        _check_drawing(config)
        shape = len(step), config.num_draft_tokens
        tokens = torch.zeros(shape, dtype=torch.int64, device=step.device)
        ngrams = torch.zeros(len(step), dtype=torch.int32, device=step.device)
        return BoundLookup(self, step, tokens, torch.zeros_like(tokens), ngrams)

    def prompt(self, chunk: PromptChunk) -> Mapping[str, Tensor]:
        """Return the texts of prompts that end, with their first tokens."""
        device = chunk.last.device
        width = self.state_fields(chunk.config)[TEXT].width
        pairs = zip(chunk.prompts, chunk.spans, strict=True)
        ended = [prompt for prompt, (_, stop) in pairs if stop == len(prompt)]
        text = torch.zeros(len(ended), width, dtype=torch.int32)
        for row, prompt in zip(text, ended, strict=True):
            row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        text = text.to(device)
        lens = torch.tensor([len(prompt) for prompt in ended], device=device, dtype=torch.int64)
        # -1 marks logits that were not finite; the request ends
        text.scatter_(1, lens[:, None], chunk.bonus_tokens.clamp(min=0).int()[:, None])
        return {TEXT: text}


class BoundLookup(BoundProposer):
    """The search of a step, and the append.

    Parameters
    ----------
    proposer : LookupProposer
        How to search.
    step : StepViews
        For B requests.
    tokens, parents : Tensor
        ``[B, n]`` int64, the proposed nodes.
    ngrams : Tensor
        ``[B]`` int32, the tokens of each request's best match; 0 without one.
    """

    def __init__(
        self,
        proposer: LookupProposer,
        step: StepViews,
        tokens: Tensor,
        parents: Tensor,
        ngrams: Tensor,
    ) -> None:
        self.proposer, self.step = proposer, step
        self.tokens, self.parents, self.ngrams = tokens, parents, ngrams

    def first(self, step: StepViews) -> BoundLookup:
        """Return the proposer for fewer requests, over the same buffers."""
        size = len(step)
        buffers = self.tokens[:size], self.parents[:size], self.ngrams[:size]
        return BoundLookup(self.proposer, step, *buffers)

    def propose(self) -> Linked:
        """Search each request's text."""
        proposer, config, buffers = self.proposer, self.step.config, self.step.buffers
        lookup_tree(
            self.step.states.drafting[TEXT],
            buffers.req_pool_indices,
            buffers.seq_lens,
            matches=proposer.matches or min(config.topk, MAX_MATCHES),
            min_ngram=proposer.min_ngram,
            max_ngram=proposer.max_ngram,
            num_steps=config.num_steps,
            tokens_out=self.tokens,
            parents_out=self.parents,
            ngrams_out=self.ngrams,
        )
        return Linked(self.tokens, self.parents)

    def absorb(self, accepted: AcceptResult) -> dict[str, Tensor]:
        """Append the accepted tokens, in place."""
        buffers = self.step.buffers
        append_text(
            self.step.states.drafting[TEXT],
            buffers.req_pool_indices,
            buffers.seq_lens,
            accepted.accept_tokens,
            accepted.accept_lens,
        )
        return {}


@dataclass(frozen=True)
class LookupFirst:
    """Lookup in front of another draft, for an engine.

    Every step, each request whose last tokens matched verifies what followed them, each other one
    what the draft proposes. The draft runs for all of them: what is gained are longer paths.

    Parameters
    ----------
    lookup : LookupProposer
        How to search. Its ``min_ngram`` says how long a match must be to go before the draft.
    draft : DraftModel, BlockDraftModel, Proposer or ProposerFactory
        The other draft, as `Engine` takes it.
    """

    lookup: LookupProposer
    draft: DraftModel | BlockDraftModel | Proposer | ProposerFactory

    def draft_len(self, config: SpecConfig) -> int:
        """Return the columns that the other draft writes at most."""
        return draft_len_of(self.draft, config)

    def make(self, slot: Callable[[Any], ModelSlot[Any]]) -> FrontedProposer:
        """Return the proposer; see `ProposerFactory`."""
        return FrontedProposer(self.lookup, make_proposer(self.draft, slot))


class FrontedProposer(Proposer):
    """Proposes by lookup where it finds a match, and else by another.

    Parameters
    ----------
    lookup : LookupProposer
        How to search.
    behind : Proposer
        Whose model, states and attention these are.

    Raises
    ------
    ValueError
        If the other is a `HostProposer`.
    """

    def __init__(self, lookup: LookupProposer, behind: Proposer) -> None:
        if isinstance(behind, HostProposer):
            raise ValueError(f"a HostProposer drafts alone, got {type(behind).__name__} behind")
        self.lookup, self.behind, self.lead = lookup, behind, behind.lead

    @property
    def slot(self) -> ModelSlot[Any] | None:
        """The other's."""
        return self.behind.slot

    @property
    def feature_size(self) -> int:
        """The other's."""
        return self.behind.feature_size

    @property
    def dtype(self) -> torch.dtype:
        """The other's."""
        return self.behind.dtype

    @property
    def vocab_size(self) -> int:
        """The other's."""
        return self.behind.vocab_size

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map tokens of the other's vocabulary to the target's."""
        return self.behind.to_target(token_ids)

    def draft_len(self, config: SpecConfig) -> int:
        """Return the other's columns."""
        return self.behind.draft_len(config)

    def ahead(self, config: SpecConfig) -> int:
        """Return how many positions the other reads."""
        return self.behind.ahead(config)

    def check(self, config: SpecConfig) -> None:
        """Refuse what the other refuses."""
        self.behind.check(config)

    def state_fields(self, config: SpecConfig) -> Mapping[str, StateField]:
        """Return the fields of both."""
        return {**self.lookup.state_fields(config), **self.behind.state_fields(config)}

    def bind(self, step: StepViews) -> BoundFronted:
        """Allocate what both need."""
        return BoundFronted(self.lookup.bind(step), self.behind.bind(step))

    def prompt(self, chunk: PromptChunk) -> Mapping[str, Tensor]:
        """Let both read the prompts."""
        return {**self.lookup.prompt(chunk), **self.behind.prompt(chunk)}

    def for_context(self, max_context_len: int) -> Self:
        """Return the proposer for contexts of that length; see `ContextModel`."""
        return type(self)(self.lookup, self.behind.for_context(max_context_len))

    def with_own_workspace(self) -> Self:
        """Return the proposer with attention that may run beside this one's."""
        return type(self)(self.lookup, self.behind.with_own_workspace())


class BoundFronted(BoundProposer):
    """The search of a step, and what another proposes in it."""

    def __init__(self, lookup: BoundLookup, behind: BoundProposer) -> None:
        self.lookup, self.behind = lookup, behind
        self.gathers, self.positions = behind.gathers, behind.positions
        self.seq_lens = behind.seq_lens
        self.proposing, self.absorbing = behind.proposing, behind.absorbing

    def first(self, step: StepViews) -> BoundFronted:
        """Return the proposer for fewer requests, over the same buffers."""
        return BoundFronted(self.lookup.first(step), self.behind.first(step))

    def begin(self) -> None:
        """Begin as the other does."""
        self.behind.begin()

    def propose(self) -> Linked:
        """Propose what matched, and what the other has behind it."""
        behind, found = self.behind.propose(), self.lookup.propose()
        return Linked(found.tokens, found.parents, self.lookup.ngrams, behind)

    def absorb(self, accepted: AcceptResult) -> Mapping[str, Tensor]:
        """Let both take in what was kept."""
        return {**self.lookup.absorb(accepted), **self.behind.absorb(accepted)}

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers of both."""
        return self.lookup.fingerprint() + self.behind.fingerprint()


def _check_drawing(config: SpecConfig) -> None:
    if config.draft_sampling:
        raise ValueError("draft_sampling must be off with lookup: text has no distribution to draw")
