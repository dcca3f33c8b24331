"""The static buffers of a chunk, and what its proposer sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.batch import AcceptResult
from specattn.buffers import BufferSet, buf
from specattn.kernels.prompts import PieceStart, TokenStart
from specattn.speculative.sampling.params import SamplingBatch

if TYPE_CHECKING:
    from specattn.cache.external import RequestTable
    from specattn.config import SpecConfig
    from specattn.plan import ExtendPlan
    from specattn.speculative.states import RequestStates


@dataclass(frozen=True)
class ChunkTokens(BufferSet):
    """A row per place of a chunk, see `TokenStart`."""

    tokens: Tensor = buf(lambda _: (), torch.int64)
    next_ids: Tensor = buf(lambda _: (), torch.int64)
    rows: Tensor = buf(lambda _: (), torch.int64)
    positions: Tensor = buf(lambda _: (), torch.int64)
    slots: Tensor = buf(lambda _: (), torch.int32, lambda _: torch.tensor(-1))

    @property
    def start(self) -> TokenStart:
        """What the first launch of a chunk writes."""
        return TokenStart(**self.tensors())


@dataclass(frozen=True)
class ChunkPieces(BufferSet):
    """A row per piece, see `PieceStart`, and its first token.

    Parameters
    ----------
    accept_index, accept_tokens, accept_lens, bonus_tokens : Tensor
        The `AcceptResult` of first tokens: paths of one token each.
    """

    rows: Tensor = buf(lambda _: (), torch.int64)
    seq_lens: Tensor = buf(lambda _: (), torch.int32)
    last: Tensor = buf(lambda _: (), torch.int64)
    places: Tensor = buf(lambda _: (), torch.int64)
    ended: Tensor = buf(lambda _: (), torch.int64)
    before: Tensor = buf(lambda _: (), torch.int32)
    temperature: Tensor = buf(lambda _: (), torch.float32)
    top_k: Tensor = buf(lambda _: (), torch.int32)
    top_p: Tensor = buf(lambda _: (), torch.float32, lambda _: torch.ones(()))
    seeds: Tensor = buf(lambda _: (), torch.int64)

    accept_index: Tensor = buf(lambda _: (1,), torch.int32)
    accept_tokens: Tensor = buf(lambda _: (1,), torch.int64)
    accept_lens: Tensor = buf(lambda _: (), torch.int32)
    bonus_tokens: Tensor = buf(lambda _: (), torch.int64)

    def start(self, qo_indptr: Tensor) -> PieceStart:
        """Return what the first launch of a chunk writes."""
        known = self.tensors() | {"qo_indptr": qo_indptr}
        return PieceStart(**{name: known[name] for name in PieceStart._fields})

    @property
    def accepted(self) -> AcceptResult:
        """The first tokens."""
        return AcceptResult(
            self.accept_index, self.accept_tokens, self.accept_lens, self.bonus_tokens
        )

    def sampling(self, *, sampled: bool, min_p: Tensor | None = None) -> SamplingBatch:
        """Return how the requests draw; greedily, unless ``sampled``."""
        return SamplingBatch(
            not sampled, self.temperature, self.top_k, self.top_p, self.seeds, min_p
        )


@dataclass(frozen=True)
class ChunkViews:
    """A chunk of T places, as its proposer finds it.

    Each of its P pieces is what it has of one prompt. Behind a prompt that ends, a proposer with a
    ``read_ahead`` of 1 has one more place, unless the prompt fills its context: there the target
    reads token 0, whose keys and values the next step writes again.

    Parameters
    ----------
    config : SpecConfig
        The config of the engine that needs most proposals to start from.
    table : RequestTable
        Rows and slots of the requests.
    states : RequestStates
        What steps leave for each other.
    tokens : ChunkTokens
        The places; those of no piece are padding, whose slots are below 0.
    pieces : ChunkPieces
        The pieces; those without places are padding. A prompt ends where ``ended`` is not 0.
    plan : ExtendPlan
        The pieces' rows, prefixes and slots.
    """

    config: SpecConfig
    table: RequestTable
    states: RequestStates
    tokens: ChunkTokens
    pieces: ChunkPieces
    plan: ExtendPlan

    @property
    def bonus(self) -> Tensor:
        """``[P]`` int64, first tokens where prompts end, else 0."""
        pieces = self.pieces
        # -1 marks logits that were not finite; the request ends, whatever the draft reads
        return torch.where(pieces.ended != 0, pieces.bonus_tokens.clamp(min=0), 0)
