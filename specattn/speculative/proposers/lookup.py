"""Prompt lookup: the text itself drafts, alone or before a model.

A text repeats itself: the last tokens may go on as they did earlier (Saxena, 2023). Answers that
repeat their prompts often do, in summaries, edits and code. Two launches search the text, on the
device; one more appends what was accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from specattn.batch import Linked
from specattn.buffers import send
from specattn.checks import whole_number
from specattn.kernels.lookup import MAX_MATCHES, MAX_NGRAM, append_text, lookup_tree
from specattn.speculative.proposers.drafts import draft_of
from specattn.speculative.proposers.host import HostProposer
from specattn.speculative.proposers.proposer import (
    BoundPrompt,
    BoundProposer,
    Proposer,
    bind,
    binds_prompts,
)
from specattn.speculative.states import StateField

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from specattn.batch import AcceptResult
    from specattn.buffers import Fingerprint
    from specattn.config import SpecConfig
    from specattn.speculative.model import ModelSlot
    from specattn.speculative.prompts.buffers import ChunkViews
    from specattn.speculative.proposers.drafts import Draft
    from specattn.speculative.proposers.proposer import PromptChunk
    from specattn.speculative.step.buffers import StepViews

# the state that holds a request's tokens by position
TEXT = "text"
# what lookup in front of a proposer leaves to it
_OTHERS = (
    *("slot", "feature_size", "dtype", "vocab_size", "read_ahead"),
    *("to_target", "num_positions", "check"),
)


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
        """Return the search of so many requests, and the append."""
        _check_drawing(step.config)
        return BoundLookup(self, step)

    def prompt(self, chunk: PromptChunk) -> Mapping[str, Tensor]:
        """Return the texts of prompts that end, with their first tokens."""
        device = chunk.last.device
        width = self.state_fields(chunk.config)[TEXT].width
        pairs = zip(chunk.prompts, chunk.spans, strict=True)
        ended = [prompt for prompt, (_, stop) in pairs if stop == len(prompt)]
        text = torch.zeros(len(ended), width, dtype=torch.int32)
        for row, prompt in zip(text, ended, strict=True):
            row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        text = send(text, device)
        lens = send(torch.tensor([len(prompt) for prompt in ended], dtype=torch.int64), device)
        # -1 marks logits that were not finite; the request ends
        text.scatter_(1, lens[:, None], chunk.bonus_tokens.clamp(min=0).int()[:, None])
        return {TEXT: text}

    def bind_prompt(self, chunk: ChunkViews) -> BoundPrompt:
        """Return what appends chunks to the texts."""
        return _BoundTexts(self, chunk)


class _BoundTexts(BoundPrompt):
    def cached(self, row: int, tokens: Sequence[int]) -> None:
        """Write the text of a prefix that others have run."""
        text = self.chunk.states.drafting[TEXT]
        shared = send(torch.tensor(tokens, dtype=torch.int32), text.device)
        text[row, : len(tokens)] = shared

    def read(self, features: Tensor | None) -> Mapping[str, Tensor]:
        """Write the chunk to its texts, first tokens behind it."""
        text, tokens, pieces = (
            self.chunk.states.drafting[TEXT],
            self.chunk.tokens,
            self.chunk.pieces,
        )
        # padding writes what is there
        new = torch.where(tokens.rows != 0, tokens.tokens.to(text.dtype), text[0, 0])
        text.index_put_((tokens.rows, tokens.positions), new)
        first = self.chunk.bonus[:, None]
        append_text(text, pieces.ended, pieces.before, first, torch.ones_like(pieces.before))
        return {}


class BoundLookup(BoundProposer):
    """The search of a step, and the append.

    Attributes
    ----------
    tokens, parents : Tensor
        ``[B, n]`` int64, the proposed nodes.
    ngrams : Tensor
        ``[B]`` int32, the tokens of each request's best match; 0 without one.
    """

    proposer: LookupProposer

    def __init__(self, proposer: LookupProposer, step: StepViews) -> None:
        super().__init__(proposer, step)
        nodes = torch.zeros(step.config.num_draft_tokens, dtype=torch.int64)
        self.tokens = step.buffer("matched_tokens", nodes)
        self.parents = step.buffer("matched_parents", nodes)
        self.ngrams = step.buffer("matched_ngrams", torch.zeros((), dtype=torch.int32))

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


class LookupFirst(Proposer):
    """Lookup in front of another draft.

    Every step, each request whose last tokens matched verifies what followed them, each other one
    what the draft proposes. The draft runs for all of them: what is gained are longer paths.

    Parameters
    ----------
    lookup : LookupProposer
        How to search. Its ``min_ngram`` says how long a match must be to go before the draft.
    draft : DraftModel, BlockDraftModel or ProposerFactory
        The other draft, as `Engine` takes it.

    Raises
    ------
    ValueError
        If the other is a `HostProposer`; by an engine, if it keeps a field ``text`` that is not
        lookup's.
    """

    def __init__(self, lookup: LookupProposer, draft: Draft) -> None:
        if isinstance(draft, HostProposer):
            raise ValueError(f"a HostProposer drafts alone, got {type(draft).__name__} behind")
        self.lookup, self.draft = lookup, draft
        # a proposer, or what has yet to make one
        self.other: Any = draft_of(draft)
        if isinstance(self.other, Proposer):
            vars(self).update((name, getattr(self.other, name)) for name in _OTHERS)

    def draft_len(self, config: SpecConfig) -> int:
        """Return the columns that the other writes at most."""
        columns: int = self.other.draft_len(config)
        return columns

    def make(self, slot: Callable[[Any], ModelSlot[Any]]) -> Self:
        """Return the same with the other as it is made."""
        return type(self)(self.lookup, self.other.make(slot))

    def at_rest(self, nothing: Proposer) -> Proposer | None:
        """Return lookup, which must know the text, if the other may rest."""
        return None if self.other.at_rest(nothing) is None else self.lookup

    def state_fields(self, config: SpecConfig) -> Mapping[str, StateField]:
        """Return the fields of both; lookup behind lookup shares the text."""
        own, others = self.lookup.state_fields(config), self.other.state_fields(config)
        if own[TEXT] != others.get(TEXT, own[TEXT]):
            raise ValueError(
                f"state field {TEXT!r} must be {own[TEXT]}, as of lookup, got {others[TEXT]} of "
                f"{type(self.other).__name__}"
            )
        return {**own, **others}

    def bind(self, step: StepViews) -> BoundLookupFirst:
        """Return what both do."""
        return BoundLookupFirst(self, step)

    def prompt(self, chunk: PromptChunk) -> Mapping[str, Tensor]:
        """Let both read the prompts."""
        return {**self.lookup.prompt(chunk), **self.other.prompt(chunk)}

    def bind_prompt(self, chunk: ChunkViews) -> BoundPrompt | None:
        """Return what both do with chunks, if the other can."""
        other = self.other.bind_prompt(chunk) if binds_prompts(self.other) else None
        return None if other is None else _BoundBoth(self, chunk, other)


class _BoundBoth(BoundPrompt):
    def __init__(self, proposer: LookupFirst, chunk: ChunkViews, other: BoundPrompt) -> None:
        super().__init__(proposer, chunk)
        self.lookup, self.other = _BoundTexts(proposer.lookup, chunk), other
        self.attending = other.attending

    def cached(self, row: int, tokens: Sequence[int]) -> None:
        """Let both take in a prefix."""
        self.lookup.cached(row, tokens)
        self.other.cached(row, tokens)

    def read(self, features: Tensor | None) -> Mapping[str, Tensor]:
        """Let both read the chunk."""
        return {**self.lookup.read(features), **self.other.read(features)}


class BoundLookupFirst(BoundProposer):
    """The search of a step, and what another proposes in it."""

    def __init__(self, proposer: LookupFirst, step: StepViews) -> None:
        super().__init__(proposer, step)
        self.lookup = proposer.lookup.bind(step)
        self.other = bind(proposer.other, step)
        self.gathers, self.positions = self.other.gathers, self.other.positions
        self.seq_lens = self.other.seq_lens
        self.proposing, self.absorbing = self.other.proposing, self.other.absorbing

    def begin(self) -> None:
        """Begin as the other does."""
        self.other.begin()

    def propose(self) -> Linked:
        """Propose what matched, and what the other has for the rest."""
        fallback, found = self.other.propose(), self.lookup.propose()
        return Linked(found.tokens, found.parents, self.lookup.ngrams, fallback)

    def absorb(self, accepted: AcceptResult) -> Mapping[str, Tensor]:
        """Let both take in what was kept."""
        return {**self.lookup.absorb(accepted), **self.other.absorb(accepted)}

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers of both."""
        return self.lookup.fingerprint() + self.other.fingerprint()


def _check_drawing(config: SpecConfig) -> None:
    if config.draft_sampling:
        raise ValueError("draft_sampling must be off with lookup: text has no distribution to draw")
