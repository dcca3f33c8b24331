"""The static buffers of a step, and what its proposer sees."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from specattn.batch import AcceptResult, ForwardMode
from specattn.buffers import BufferSet, buf
from specattn.plan import causal_words, mask_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.attention.multi_step import Indices
    from specattn.cache.external import RequestTable
    from specattn.config import SpecConfig
    from specattn.speculative.states import RequestStates

T = TypeVar("T")


@dataclass(frozen=True)
class StepWidths:
    """How wide a request's row of each buffer is.

    Parameters
    ----------
    config : SpecConfig
        Width and depth of the tree.
    positions : int
        Places after the committed tokens that a step needs.
    offsets : int
        0 or 1, whether positions have offsets.
    features : int
        F, the width of the target's features.
    dtype : torch.dtype
        The features' dtype.
    draft_vocab : int
        Vd where drafts draw, else 0.
    """

    config: SpecConfig
    positions: int
    offsets: int
    features: int
    dtype: torch.dtype
    draft_vocab: int


def _no_node(widths: StepWidths) -> Tensor:
    return torch.full((widths.config.num_draft_tokens,), -1)


def _tree_words(widths: StepWidths) -> Tensor:
    mode = ForwardMode.TARGET_VERIFY if widths.config.num_steps else ForwardMode.DECODE
    return causal_words(widths.config.layout(mode))


def _drawn_from(widths: StepWidths) -> tuple[int, int]:
    return (widths.config.num_steps if widths.draft_vocab else 0, widths.draft_vocab)


@dataclass(frozen=True)
class StepBuffers(BufferSet):
    """The tensors that a step's phases share, a row per request.

    `StepWidths` size them. Shapes: n nodes, N draft steps, K branches, W ancestor words. The
    first kernel of a step writes the first group from the `RequestStates`; every later group is
    written by one phase.

    Parameters
    ----------
    req_pool_indices, seq_lens : Tensor
        ``[B]`` int64 and int32: table rows (0 for padding) and committed lengths.
    window : Tensor
        ``[B, reserve_len]`` int32, the slots after the committed tokens. Every phase writes the
        first of them: all phases start from the same length.
    positions : Tensor
        ``[B, N + 1]`` int64, or as many as `Proposer.num_positions` asks for: the places after the
        committed tokens.
    roots : Tensor
        ``[B]`` int64, bonus tokens of the step before.
    temperature, top_k, top_p, seeds, position_offsets : Tensor
        ``[B]``, of offsets ``[B, 0 or 1]``, as in `RequestStates`.
    tokens, tree_positions, words, next_token, next_sibling, tree_probs : Tensor
        The `DraftTree`; -1 links to no node. ``tree_probs`` is ``[B, N, Vd]``.
    accept_index, accept_tokens, accept_lens, bonus_tokens : Tensor
        The `AcceptResult`.
    features, last_rows, after : Tensor
        ``[B, N + 1, F]`` target features along the accepted path, ``[B]`` int64 flat row of its
        last token, and ``[B]`` int64 the position after it.
    """

    req_pool_indices: Tensor = buf(lambda _: (), torch.int64)
    seq_lens: Tensor = buf(lambda _: (), torch.int32)
    window: Tensor = buf(lambda d: (d.config.reserve_len,), torch.int32)
    positions: Tensor = buf(lambda d: (d.positions,), torch.int64)
    roots: Tensor = buf(lambda _: (), torch.int64)
    temperature: Tensor = buf(lambda _: (), torch.float32)
    top_k: Tensor = buf(lambda _: (), torch.int32)
    top_p: Tensor = buf(lambda _: (), torch.float32, lambda _: torch.ones(()))
    seeds: Tensor = buf(lambda _: (), torch.int64)
    position_offsets: Tensor = buf(lambda d: (d.offsets,), torch.int64)

    tokens: Tensor = buf(lambda d: (d.config.num_draft_tokens,), torch.int64)
    tree_positions: Tensor = buf(lambda d: (d.config.num_draft_tokens,), torch.int64)
    words: Tensor = buf(
        lambda d: (d.config.num_draft_tokens, mask_words(d.config.num_draft_tokens)),
        torch.int64,
        _tree_words,
    )
    next_token: Tensor = buf(lambda d: (d.config.num_draft_tokens,), torch.int64, _no_node)
    next_sibling: Tensor = buf(lambda d: (d.config.num_draft_tokens,), torch.int64, _no_node)
    tree_probs: Tensor = buf(_drawn_from, torch.float32)

    accept_index: Tensor = buf(lambda d: (d.config.num_steps + 1,), torch.int32)
    accept_tokens: Tensor = buf(lambda d: (d.config.num_steps + 1,), torch.int64)
    accept_lens: Tensor = buf(lambda _: (), torch.int32)
    bonus_tokens: Tensor = buf(lambda _: (), torch.int64)

    features: Tensor = buf(lambda d: (d.config.num_steps + 1, d.features), lambda d: d.dtype)
    last_rows: Tensor = buf(lambda _: (), torch.int64)
    after: Tensor = buf(lambda _: (), torch.int64)

    def rotary(self, positions: Tensor) -> Tensor:
        """Return what models rotate tokens of these places by.

        Parameters
        ----------
        positions : Tensor
            ``[B, ...]`` int64. Each request's offset is added; without offsets, they are returned.
        """
        if not self.position_offsets.shape[1]:
            return positions
        return positions + self.position_offsets.view(-1, *[1] * (positions.dim() - 1))

    @property
    def accepted(self) -> AcceptResult:
        """The path that verification keeps."""
        return AcceptResult(
            self.accept_index, self.accept_tokens, self.accept_lens, self.bonus_tokens
        )


@dataclass(frozen=True)
class StepViews:
    """A step of B requests, as its proposer finds it.

    Parameters
    ----------
    config : SpecConfig
        Width and depth of the tree.
    table : RequestTable
        Rows and slots of the requests.
    states : RequestStates
        What steps leave for each other.
    buffers : StepBuffers
        The step's: rows, lengths, the window of slots, positions, roots, how requests draw, and,
        for `BoundProposer.absorb`, the target's features along the accepted path.
    indices : {"table", "csr"}
        What draft steps read; see `MultiStepDraftBackend`.
    arena : dict of str to object
        What steps of all batch sizes share; see `shared`.
    asked : Counter of str
        How often this batch size has asked for a name.
    """

    config: SpecConfig
    table: RequestTable
    states: RequestStates
    buffers: StepBuffers
    indices: Indices = "table"
    arena: dict[str, Any] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.buffers.seq_lens)

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self.table.req_to_token.device

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """Return what all batch sizes share, made by the first.

        A proposer asks while it is bound. A name that is asked for again, by one that is bound
        within another, is something else: all batch sizes ask in one order.
        """
        self.asked[name] += 1
        key = f"{name} {self.asked[name]}"
        if key not in self.arena:
            self.arena[key] = make()
        found: T = self.arena[key]
        return found

    def buffer(self, name: str, row: Tensor) -> Tensor:
        """Return a static buffer of the proposer's own.

        Those of all batch sizes lie in the memory of the largest. Ask for it in
        `BoundProposer.__init__`, not in every step; see `shared`.

        Parameters
        ----------
        name : str
            Unlike that of any other buffer of the proposer.
        row : Tensor
            What every row holds at first.

        Returns
        -------
        Tensor
            ``[B, *row.shape]`` on the step's device.
        """
        rows = (len(self), *[1] * row.dim())
        return self.shared(name, lambda: row.to(self.device).repeat(rows))[: len(self)]
