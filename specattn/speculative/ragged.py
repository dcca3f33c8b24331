"""A verify length per request: a batch's rows, shared among its trees.

A batch of B requests has ``R = B * verify_len`` rows, whatever the trees hold, so that one graph
serves every share. The first nodes of a best-first tree are the best tree of so many nodes, so a
request that is given fewer verifies a smaller tree. Attention reads a prefix once per request,
however many rows it has (`specattn.plan.RaggedRows`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from specattn.buffers import BufferSet, buf
from specattn.kernels.ragged import PackedRows, pack_rows, share_rows
from specattn.plan import RaggedRows

if TYPE_CHECKING:
    from specattn.batch import DraftTree
    from specattn.config import SpecConfig
    from specattn.plan import AttnPlan
    from specattn.speculative.step_buffers import StepBuffers


class VerifyPolicy(Protocol):
    """What nodes are worth verifying."""

    def __call__(self, probs: Tensor, rows: Tensor) -> Tensor:
        """Return each node's worth: no sync, capturable.

        Parameters
        ----------
        probs : Tensor
            ``[B, n]`` float32: the probability with which the draft expects the path down to each
            node to be kept, 1 at the root, falling from node to node. Summed over what is verified,
            it is the expected number of tokens.
        rows : Tensor
            ``[B]`` int64: each request's row of the table, 0 for padding.

        Returns
        -------
        Tensor
            ``[B, n]`` float32. A node counts for no more than the one before it, by chunks.
        """


def steps_saved(probs: Tensor, rows: Tensor) -> Tensor:
    """Divide by what the request's whole tree would gain; see `VerifyPolicy`.

    A token saves its request the part of a step that this step's tokens share. So where the draft
    is sure and steps gain much, another token saves less.
    """
    return probs / probs.sum(1, keepdim=True)


@dataclass(frozen=True)
class VerifyBuffers(BufferSet):
    """What is verified of a batch.

    Parameters
    ----------
    probs : Tensor
        ``[B, n]`` float32, the probability of the path down to each node.
    lens : Tensor
        ``[B]`` int32, nodes that each request verifies.
    index, tail_slots : Tensor
        ``[B, n]`` int64 and int32, as in `PackedRows`.
    tokens, positions, slots, requests : Tensor
        ``[B, verify_len]``: the rows of `PackedRows`, whosever they are.
    """

    probs: Tensor = buf(lambda c: (c.num_draft_tokens,), torch.float32)
    lens: Tensor = buf(lambda _: (), torch.int32)
    index: Tensor = buf(lambda c: (c.num_draft_tokens,), torch.int64)
    tail_slots: Tensor = buf(lambda c: (c.num_draft_tokens,), torch.int32)
    tokens: Tensor = buf(lambda c: (c.verify_len,), torch.int64)
    positions: Tensor = buf(lambda c: (c.verify_len,), torch.int64)
    slots: Tensor = buf(lambda c: (c.verify_len,), torch.int32)
    requests: Tensor = buf(lambda c: (c.verify_len,), torch.int64)


class VerifyRows:
    """Shares a batch's rows among its trees, over static buffers.

    Parameters
    ----------
    config : SpecConfig
        Its ``verify_len`` is above 0.
    buffers : VerifyBuffers
        Of B requests.
    qo_indptr : Tensor
        ``[B + 1]`` int32.
    policy : VerifyPolicy
        What nodes are worth.

    Attributes
    ----------
    rows : PackedRows
        What the target reads.
    """

    def __init__(
        self,
        config: SpecConfig,
        buffers: VerifyBuffers,
        qo_indptr: Tensor,
        policy: VerifyPolicy,
    ) -> None:
        self.config, self.buffers, self.policy = config, buffers, policy
        flat = (buffers.tokens, buffers.positions, buffers.slots, buffers.requests)
        tokens, positions, slots, requests = (one.flatten() for one in flat)
        tail, index = buffers.tail_slots, buffers.index
        self.rows = PackedRows(qo_indptr, tokens, positions, slots, requests, tail, index)

    @classmethod
    def alloc(
        cls, batch: int, config: SpecConfig, policy: VerifyPolicy, device: torch.device
    ) -> Self:
        """Allocate buffers for ``batch`` requests."""
        buffers = VerifyBuffers.alloc(batch, config, device)
        qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * config.verify_len
        return cls(config, buffers, qo_indptr, policy)

    def first(self, batch: int) -> VerifyRows:
        """Return the same for fewer requests, over the same buffers."""
        buffers, qo_indptr = self.buffers.bind(batch), self.rows.qo_indptr[: batch + 1]
        return VerifyRows(self.config, buffers, qo_indptr, self.policy)

    def plan(self, whole: AttnPlan) -> AttnPlan:
        """Return the plan of a target forward, from that over whole trees."""
        rows = self.rows
        ragged = RaggedRows(rows.qo_indptr, rows.slots[None])
        # the slots of nodes that are cut continue no prefix
        layout = replace(whole.layout, causal=False)
        return replace(whole, layout=layout, tail_slots=rows.tail_slots, ragged=ragged)

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
        worth = self.policy(buffers.probs, rows)
        chunk = self.config.verify_chunk
        share_rows(
            worth,
            rows,
            chunk=chunk,
            chunks=len(self.rows.tokens) // chunk,
            lens_out=buffers.lens,
        )
        pack_rows(
            buffers.lens,
            step.seq_lens,
            step.window,
            tree.tokens,
            tree.positions,
            tree.words,
            tree.retrieve_next_token,
            tree.retrieve_next_sibling,
            out=self.rows,
        )

    def pad(self) -> None:
        """Let all rows write to the slot of padding."""
        self.rows.slots.zero_()
        self.rows.tail_slots.zero_()
