"""Proposers: sources of draft tokens, and their duties within a step.

A `Proposer` lives as long as its engine. It has a model with its pool and its attention, or none.
For every batch size that steps run at it binds a `BoundProposer`: what it does within a step, over
static buffers.

Five rules hold for every proposer.

- `BoundProposer.propose` and `BoundProposer.absorb` read no value on the host, so that a CUDA graph
  can record them, and what they allocate may lie in its memory.
- They write keys and values to the window's first `Proposer.draft_len` columns alone, and states by
  what they return. A field that is never returned is the proposer's to write, for its rows alone.
- What `BoundProposer.absorb` computes past ``accept_lens`` may be garbage: it lies behind the
  committed length and is written again.
- A prompt in chunks, a prompt behind a cached prefix, and steps over the same text leave the same
  keys, values and states.
- What is drafted for a request follows from its text: not from its place in the step, from others
  there, or from steps before.

Shapes: B requests, n nodes of a tree, N its depth, F the width of the target's features, V and Vd
the vocabularies of target and draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specattn.buffers import fingerprint
from specattn.checks import instance
from specattn.speculative.model import ModelSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from specattn.attention.bound import BoundLayers
    from specattn.attention.layers import LayeredBackend
    from specattn.batch import AcceptResult, Candidates, Linked, Marginals
    from specattn.buffers import Fingerprint
    from specattn.config import SpecConfig
    from specattn.plan import ExtendPlan
    from specattn.speculative.prompts.buffers import ChunkViews
    from specattn.speculative.sampling.params import SamplingBatch
    from specattn.speculative.states import StateField
    from specattn.speculative.step.buffers import StepViews

    Proposal = Candidates | Marginals | Linked


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of prompts that the target has just read.

    A piece is what the chunk has of one prompt: P pieces of T tokens, of which E end their prompts.

    Parameters
    ----------
    plan : ExtendPlan
        The pieces' rows, prefixes and slots.
    config : SpecConfig
        The config of the engine that needs most proposals to start from.
    prompts : tuple of sequence of int
        The whole prompt of each piece, cached tokens included.
    spans : tuple of (int, int)
        The tokens of each piece: its first, and the one after its last.
    positions : Tensor
        ``[T]`` int64.
    features : Tensor or None
        ``[T, F]``, the target's; None if it gives none.
    last : Tensor
        ``[E]`` int64 indices of the last tokens of prompts that end here.
    bonus_tokens : Tensor
        ``[E]`` int64, their first new tokens; -1 for logits that were not finite.
    sampling : SamplingBatch
        How these E requests draw.
    token_ids, following : Tensor
        ``[T]`` int64: the tokens, and each one's next of its prompt, 0 after the prompt's last.
    """

    plan: ExtendPlan
    config: SpecConfig
    prompts: tuple[Sequence[int], ...]
    spans: tuple[tuple[int, int], ...]
    positions: Tensor
    features: Tensor | None
    last: Tensor
    bonus_tokens: Tensor
    sampling: SamplingBatch
    token_ids: Tensor
    following: Tensor

    @cached_property
    def next_ids(self) -> Tensor:
        """Each token's next one, ``[T]`` int64; the bonus token comes last."""
        # -1 marks logits that were not finite; the request ends, whatever the draft reads
        return self.following.index_copy(0, self.last, self.bonus_tokens.clamp(min=0))

    def bind(self, backend: LayeredBackend, plan: ExtendPlan | None = None) -> BoundLayers:
        """Return attention over the pieces, ready to run.

        ``plan`` is another plan of the same pieces.
        """
        return backend.bind_prompts(plan or self.plan, [start for start, _ in self.spans])


class Proposer(ABC):
    """A source of draft tokens, which lives as long as an engine.

    Whatever a proposer does not define, it does not need.
    """

    #: Its model, pool and attention, if it has any.
    slot: ModelSlot[Any] | None = None
    #: F, the width of the target's features that it reads.
    feature_size: int = 0
    #: The dtype in which steps keep these.
    dtype: torch.dtype = torch.float32
    #: Vd, the width of what it draws from.
    vocab_size: int = 0
    #: Tokens beyond the committed ones that it has read when a step begins: 1 if it has read the
    #: bonus token, and the slot after a prompt is its own, too.
    read_ahead: int = 0

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map tokens of its vocabulary, int64 of any shape, to the target's."""
        return token_ids

    def draft_len(self, config: SpecConfig) -> int:
        """Return the columns past the committed length that it writes at most."""
        return 0

    def num_positions(self, config: SpecConfig) -> int:
        """Return how many of the step's positions it reads at least."""
        return 0

    # empty on purpose: few proposers need it
    def check(self, config: SpecConfig) -> None:  # noqa: B027
        """Raise a ValueError for trees that it cannot propose."""

    def state_fields(self, config: SpecConfig) -> Mapping[str, StateField]:
        """Return the fields of `RequestStates.drafting`, by name.

        Parameters
        ----------
        config : SpecConfig
            The config with most branches, if several share the states.
        """
        return {}

    @abstractmethod
    def bind(self, step: StepViews) -> BoundProposer:
        """Return what steps of so many requests do."""

    def prompt(self, chunk: PromptChunk) -> Mapping[str, Tensor]:
        """Read a chunk; return the states of prompts that end there.

        It runs eagerly, after the target.

        Parameters
        ----------
        chunk : PromptChunk
            What the target has read.

        Returns
        -------
        mapping of str to Tensor
            ``[E, width]`` for every field of `state_fields`.
        """
        return {}

    def bind_prompt(self, chunk: ChunkViews) -> BoundPrompt | None:
        """Return what chunks of prompts of so many tokens do.

        It does for static buffers what `prompt` does for lists of the host, so that a graph can
        record it. None says that prompts run by `prompt` alone: here, if a class has one.
        """
        return BoundPrompt(self, chunk) if type(self).prompt is Proposer.prompt else None

    def at_rest(self, nothing: Proposer) -> Proposer | None:
        """Return what still reads texts while its model rests; ``nothing`` reads none.

        Then it may be asked for proposals over texts that its model has not read. Such gain little,
        but must be proposals: rooted in the newest token, and of tokens that there are. None says
        that it must read every text: its model never rests.
        """
        return None

    def make(self, slot: Callable[[Any], ModelSlot[Any]]) -> Self:
        """Return the proposer over a slot for its model; see `ProposerFactory`."""
        return self


def binds_prompts(proposer: Proposer) -> bool:
    """Return whether a proposer's `bind_prompt` does what its `prompt` does.

    A class that has another `prompt`, and no `bind_prompt` with it, is asked by `prompt`.
    """
    line = type(proposer).__mro__
    by, of = (
        next(at for at, one in enumerate(line) if name in vars(one))
        for name in ("bind_prompt", "prompt")
    )
    return by <= of


class ModelProposer(Proposer):
    """A proposer with one draft model, which reads the target's features.

    Parameters
    ----------
    draft : ModelSlot or AnyDraftModel
        The draft model, with its pool and attention; or the model alone, until `make`.
    """

    slot: ModelSlot[Any]

    def __init__(self, draft: Any) -> None:
        self.model = draft
        if isinstance(draft, ModelSlot):
            self.slot, self.model = draft, draft.model
        self.feature_size, self.vocab_size = self.model.feature_size, self.model.vocab_size
        self.dtype = self.model.layers[0].dtype

    def check(self, config: SpecConfig) -> None:
        """Refuse trees that are wider than the draft's vocabulary."""
        if config.proposals > self.vocab_size:
            width = "ranks" if config.tree == "best_first" else "topk"
            raise ValueError(
                f"{width} must be at most {self.vocab_size}, the draft's vocabulary, "
                f"got {config.proposals}"
            )

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map draft token ids, int64 of any shape, to target token ids."""
        mapped: Tensor = self.model.to_target(token_ids)
        return mapped

    def make(self, slot: Callable[[Any], ModelSlot[Any]]) -> Self:
        """Return the proposer with a slot for its model."""
        return type(self)(slot(self.model))


class BoundProposer(ABC):
    """A proposer within steps of one batch size.

    Parameters
    ----------
    proposer : Proposer
        Whose steps these are.
    step : StepViews
        For B requests.

    Attributes
    ----------
    reads_path : bool
        Whether it takes in what was kept; without, steps move nothing, so it must propose nothing.
    gathers : mapping of str to Tensor
        Fields of `Proposer.state_fields`, or of `RequestStates`, and ``[B, w]`` buffers of the
        same dtypes: the step's first launch copies each request's first columns there.
    positions : Tensor or None
        ``[B, S, K]`` int64, dense last axis; the same launch writes length + read_ahead + s.
    seq_lens : Tensor or None
        ``[B]`` int32; the same launch writes length + read_ahead, 0 for padding.
    proposing, absorbing : tuple of BoundLayers
        The attention of `propose` and `absorb`, which the step schedules and fills.
    """

    reads_path: bool = True
    gathers: Mapping[str, Tensor] = {}
    positions: Tensor | None = None
    seq_lens: Tensor | None = None
    proposing: tuple[BoundLayers, ...] = ()
    absorbing: tuple[BoundLayers, ...] = ()

    def __init__(self, proposer: Any, step: StepViews) -> None:
        self.proposer, self.step = proposer, step

    # empty on purpose: few proposers need it
    def begin(self) -> None:  # noqa: B027
        """Derive what the attention's ``fill`` reads, after the first launch."""

    @abstractmethod
    def propose(self) -> Proposal:
        """Propose tokens: no sync, capturable."""

    def absorb(self, accepted: AcceptResult) -> Mapping[str, Tensor]:
        """Take in what the target kept: no sync, capturable.

        It runs after the commit; the step's ``features [B, N + 1, F]``, ``last_rows`` and ``after``
        are those of the accepted path then.

        Parameters
        ----------
        accepted : AcceptResult
            What is kept.

        Returns
        -------
        mapping of str to Tensor
            ``[B, w]``: new states, for the fields that the step's last launch is to write.
        """
        return {}

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers, for the guard of a capture."""
        return fingerprint(positions=self.positions, seq_lens=self.seq_lens, **self.gathers)


class BoundPrompt:
    """A proposer's part of chunks of so many tokens: by default nothing.

    Parameters
    ----------
    proposer : Proposer
        Whose chunks these are.
    chunk : ChunkViews
        Of T places and P pieces.

    Attributes
    ----------
    attending : tuple of BoundLayers
        The attention of `read`, which the chunk fills before it.
    """

    attending: tuple[BoundLayers, ...] = ()

    def __init__(self, proposer: Any, chunk: ChunkViews) -> None:
        self.proposer, self.chunk = proposer, chunk

    # empty on purpose: few proposers need it
    def cached(self, row: int, tokens: Sequence[int]) -> None:
        """Take in tokens of a prompt that others have run.

        No chunk has them. It comes before the chunk is launched, and waits for nothing.

        Parameters
        ----------
        row : int
            The request's row of the table.
        tokens : sequence of int
            The prompt's first tokens.
        """

    def read(self, features: Tensor | None) -> Mapping[str, Tensor]:
        """Read the chunk, after the target: no sync, capturable.

        Parameters
        ----------
        features : Tensor or None
            ``[T, F]``, the target's; None if it gives none.

        Returns
        -------
        mapping of str to Tensor
            ``[P, w]``: new states of the prompts that end, for the fields of `state_fields` that
            the chunk's last launch is to write.
        """
        return {}


def bind(proposer: Proposer, step: StepViews) -> BoundProposer:
    """Bind a proposer to a step.

    Raises
    ------
    ValueError
        If `Proposer.bind` returns something else than a `BoundProposer`.
    """
    bound = proposer.bind(step)
    instance(
        f"what {type(proposer).__name__}.bind returns", bound, BoundProposer, "a BoundProposer"
    )
    return bound


@runtime_checkable
class ProposerFactory(Protocol):
    """Makes a proposer over an engine's pools."""

    def draft_len(self, config: SpecConfig) -> int:
        """Return `Proposer.draft_len` of what it makes."""
        ...

    def make(self, slot: Callable[[Any], ModelSlot[Any]]) -> Proposer:
        """Return the proposer.

        Parameters
        ----------
        slot : callable
            Gives a model a pool with the engine's slots, and the engine's attention over it; for
            one model at most.
        """
        ...
