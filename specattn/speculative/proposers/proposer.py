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

    @cached_property
    def token_ids(self) -> Tensor:
        """The tokens, ``[T]`` int64."""
        pairs = zip(self.prompts, self.spans, strict=True)
        return self._on_device([token for text, (a, b) in pairs for token in text[a:b]])

    @cached_property
    def next_ids(self) -> Tensor:
        """Each token's next one, ``[T]`` int64; the bonus token comes last."""
        ids: list[int] = []
        for text, (start, stop) in zip(self.prompts, self.spans, strict=True):
            ids += [*text[start + 1 : stop + 1], 0][: stop - start]
        tokens = self._on_device(ids)
        # -1 marks logits that were not finite; the request ends, whatever the draft reads
        tokens[self.last] = self.bonus_tokens.clamp(min=0)
        return tokens

    def bind(self, backend: LayeredBackend, plan: ExtendPlan | None = None) -> BoundLayers:
        """Return attention over the pieces, ready to run.

        ``plan`` is another plan of the same pieces.
        """
        return backend.bind_prompts(plan or self.plan, [start for start, _ in self.spans])

    def _on_device(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, device=self.last.device)


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

    def make(self, slot: Callable[[Any], ModelSlot[Any]]) -> Self:
        """Return the proposer over a slot for its model; see `ProposerFactory`."""
        return self


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
