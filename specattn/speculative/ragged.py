"""A verify length per request: a batch's rows, shared among its trees.

A batch of B requests has ``C = B * verify_len / verify_chunk`` chunks of m = ``verify_chunk`` rows,
whatever the trees hold, so that one graph serves every share. The first nodes of a best-first tree
are the best tree of so many nodes, so a request that is given fewer verifies a smaller tree. To
attention, a chunk is a request: its rows are some nodes of a tree, and the tail are all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from specattn.buffers import BufferSet, buf
from specattn.kernels.ragged import PackedRows, pack_rows, share_rows
from specattn.plan import AttnPlan, mask_words

if TYPE_CHECKING:
    from specattn.batch import DraftTree
    from specattn.config import SpecConfig
    from specattn.speculative.step_buffers import StepBuffers


class VerifyPolicy(Protocol):
    """What nodes are worth verifying."""

    def __call__(self, probs: Tensor, rows: Tensor) -> Tensor:
        """Return each node's worth: no sync, capturable.

        Parameters
        ----------
        probs : Tensor
            ``[B, n]`` float32: what the draft takes the path down to each node to be kept with, 1
            at the root, falling from node to node. Without a policy that is what they are worth:
            the sum over what is verified is the expected number of tokens, if the draft is right.
        rows : Tensor
            ``[B]`` int64: each request's row of the table, 0 for padding.

        Returns
        -------
        Tensor
            ``[B, n]`` float32. A node counts for no more than the one before it, by chunks.
        """


def _root(_: SpecConfig) -> Tensor:
    return torch.tensor(1)


@dataclass(frozen=True)
class VerifyBuffers(BufferSet):
    """What is verified of a batch, by chunks.

    Shapes: c = ``verify_len / verify_chunk`` chunks per request, m nodes of a chunk, n nodes of a
    tree, W ancestor words.

    Parameters
    ----------
    probs : Tensor
        ``[B, n]`` float32, the probability of the path down to each node.
    lens : Tensor
        ``[B]`` int32, nodes that each request verifies.
    index : Tensor
        ``[B, n]`` int64, the `DraftTree`'s ``retrieve_index``.
    rows, seq_lens, tokens, positions, words, slots, tail_slots, tail_positions, requests : Tensor
        The `PackedRows`, ``[B, c, ...]``.
    """

    probs: Tensor = buf(lambda c: (c.num_draft_tokens,), torch.float32)
    lens: Tensor = buf(lambda _: (), torch.int32)
    index: Tensor = buf(lambda c: (c.num_draft_tokens,), torch.int64)
    rows: Tensor = buf(lambda c: (_chunks(c),), torch.int64)
    seq_lens: Tensor = buf(lambda c: (_chunks(c),), torch.int32)
    tokens: Tensor = buf(lambda c: (_chunks(c), c.verify_chunk), torch.int64)
    positions: Tensor = buf(lambda c: (_chunks(c), c.verify_chunk), torch.int64)
    words: Tensor = buf(
        lambda c: (_chunks(c), c.verify_chunk, mask_words(c.num_draft_tokens)), torch.int64, _root
    )
    slots: Tensor = buf(lambda c: (_chunks(c), c.verify_chunk), torch.int32)
    tail_slots: Tensor = buf(lambda c: (_chunks(c), c.num_draft_tokens), torch.int32)
    tail_positions: Tensor = buf(lambda c: (_chunks(c), c.num_draft_tokens), torch.int64)
    requests: Tensor = buf(lambda c: (_chunks(c),), torch.int64)

    def packed(self) -> PackedRows:
        """Return the chunks of all requests, one after another."""
        return PackedRows(*(getattr(self, name).flatten(0, 1) for name in PackedRows._fields))


def _chunks(config: SpecConfig) -> int:
    return config.verify_len // config.verify_chunk


class VerifyRows:
    """Shares a batch's rows among its trees, over static buffers.

    Parameters
    ----------
    config : SpecConfig
        Its ``verify_len`` is above 0.
    buffers : VerifyBuffers
        Of B requests.
    policy : VerifyPolicy, optional
        What nodes are worth; their probabilities without one.

    Attributes
    ----------
    rows : PackedRows
        What the target reads.
    """

    def __init__(
        self, config: SpecConfig, buffers: VerifyBuffers, policy: VerifyPolicy | None
    ) -> None:
        self.config, self.buffers, self.policy = config, buffers, policy
        self.rows = buffers.packed()

    @classmethod
    def alloc(
        cls, batch: int, config: SpecConfig, policy: VerifyPolicy | None, device: torch.device
    ) -> Self:
        """Allocate buffers for ``batch`` requests."""
        return cls(config, VerifyBuffers.alloc(batch, config, device), policy)

    def first(self, batch: int) -> VerifyRows:
        """Return the same for fewer requests, over the same buffers."""
        return VerifyRows(self.config, self.buffers.bind(batch), self.policy)

    def plan(self, req_to_token: Tensor) -> AttnPlan:
        """Return the plan of a target forward, a chunk per row."""
        rows = self.rows
        return AttnPlan(
            self.config.verify_layout(),
            req_to_token,
            rows.rows,
            rows.seq_lens,
            rows.positions,
            rows.tail_slots,
            rows.tail_positions,
            rows.words,
            store_slots=rows.slots,
        )

    def choose(self, tree: DraftTree, step: StepBuffers) -> None:
        """Choose the lengths, cut the trees, pack what is left.

        No sync, capturable.

        Parameters
        ----------
        tree : DraftTree
            The trees, cut in place.
        step : StepBuffers
            Rows, lengths and the window of slots.
        """
        buffers, rows = self.buffers, step.req_pool_indices
        worth = buffers.probs if self.policy is None else self.policy(buffers.probs, rows)
        share_rows(
            worth,
            rows,
            chunk=self.config.verify_chunk,
            chunks=len(self.rows.rows),
            lens_out=buffers.lens,
        )
        pack_rows(
            buffers.lens,
            rows,
            step.seq_lens,
            step.window,
            tree.tokens,
            tree.positions,
            tree.words,
            tree.retrieve_next_token,
            tree.retrieve_next_sibling,
            index_out=tree.retrieve_index,
            out=self.rows,
        )

    def pad(self) -> None:
        """Turn all chunks into padding."""
        rows = self.rows
        for tensor in (rows.rows, rows.seq_lens, rows.slots, rows.tail_slots):
            tensor.zero_()
