"""Plans: the tensors that describe one forward to a backend.

An `AttnPlan` describes decode, draft, verify and draft extend: a prefix read through
``req_to_token``, and a tail of explicit slots whose visibility is one bit per key. A `CsrPlan`
describes a draft step by index lists. An `ExtendPlan` describes ragged prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specattn.batch import RowLayout
from specattn.buffers import BufferSet, buf
from specattn.checks import expect, require_rows
from specattn.kernels.indices import KeySlots, fill_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.config import SpecConfig


def mask_words(keys: int) -> int:
    """Return how many int64 ancestor words cover ``keys`` tail keys."""
    return -(-keys // 64)


def words_of(sets: Sequence[int], keys: int) -> Tensor:
    """Return bit sets, one Python int each, as ancestor words.

    Parameters
    ----------
    sets : sequence of int
        Bit j is tail key j.
    keys : int
        Tail keys that the words cover.

    Returns
    -------
    Tensor
        ``[len(sets), ceil(keys / 64)]`` int64 on the host.
    """
    count = mask_words(keys)
    # bytes put bit 63 where the sign of an int64 is
    raw = bytearray(b"".join(bits.to_bytes(8 * count, "little") for bits in sets))
    return torch.from_numpy(np.frombuffer(raw, np.int64).reshape(len(sets), count))


def causal_words(layout: RowLayout) -> Tensor:
    """Return words by which query i sees the queries up to itself.

    The query tokens are the last ``q_len`` keys of the tail; earlier tail keys are not seen.

    Parameters
    ----------
    layout : RowLayout
        Query tokens and tail length.

    Returns
    -------
    Tensor
        ``[q_len, ceil(tail / 64)]`` int64 on the host.
    """
    first = layout.tail - layout.q_len
    return words_of([(2 << row) - 1 << first for row in range(layout.q_len)], layout.tail)


@dataclass(frozen=True)
class AttnInputs(BufferSet):
    """The per-request tensors of an `AttnPlan`, sized by a `RowLayout`.

    A padding row has causal words, so that no softmax row is empty.

    Parameters
    ----------
    req_pool_indices, seq_lens, positions, tail_slots, tail_words : Tensor
        As in `AttnPlan`.
    """

    req_pool_indices: Tensor = buf(lambda _: (), torch.int64)
    seq_lens: Tensor = buf(lambda _: (), torch.int32)
    positions: Tensor = buf(lambda d: (d.q_len,), torch.int64)
    tail_slots: Tensor = buf(lambda d: (d.tail,), torch.int32)
    tail_words: Tensor = buf(lambda d: (d.q_len, mask_words(d.tail)), torch.int64, causal_words)


@dataclass(frozen=True)
class AttnPlan:
    """One decode, draft, verify or draft extend forward over a bucket.

    Parameters
    ----------
    layout : RowLayout
        Query tokens and tail length.
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32, slot of every prefix token.
    req_pool_indices, seq_lens : Tensor
        ``[B]`` int64 and int32: each request's table row, and its prefix length.
    positions : Tensor
        ``[B, q_len]`` int64, position of every query token; views may have a row stride.
    tail_slots, tail_positions : Tensor
        ``[B, tail]`` int32 and int64: slot and position of every tail key.
    tail_words : Tensor
        ``[B, q_len, ceil(tail / 64)]`` int64; bit j of row i is set iff query i sees tail key j.
    """

    layout: RowLayout
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    positions: Tensor
    tail_slots: Tensor
    tail_positions: Tensor
    tail_words: Tensor

    @property
    def batch(self) -> int:
        """Requests in the bucket, padding included."""
        return len(self.req_pool_indices)

    @property
    def grows(self) -> bool:
        """Whether the tail holds earlier nodes, whose words are known late."""
        return self.layout.tail > self.layout.q_len

    @property
    def out_slots(self) -> Tensor:
        """``[B, q_len]`` int32 view of the tail: the slots this forward writes."""
        return self.tail_slots[:, self.layout.tail - self.layout.q_len :]

    @property
    def key_slots(self) -> KeySlots:
        """The slots of prefix and tail, as kernels take them."""
        return KeySlots(self.req_to_token, self.req_pool_indices, self.seq_lens, self.tail_slots)

    @classmethod
    def over(cls, layout: RowLayout, req_to_token: Tensor, inputs: AttnInputs) -> AttnPlan:
        """Plan a forward whose tail is its own query tokens.

        Parameters
        ----------
        layout : RowLayout
            Query tokens; its ``tail`` must be its ``q_len``.
        req_to_token : Tensor
            ``[rows, max_context_len]`` int32.
        inputs : AttnInputs
            The other tensors; tail keys have the positions of the query tokens.
        """
        assert layout.tail == layout.q_len
        return cls(
            layout=layout,
            req_to_token=req_to_token,
            req_pool_indices=inputs.req_pool_indices,
            seq_lens=inputs.seq_lens,
            positions=inputs.positions,
            tail_slots=inputs.tail_slots,
            tail_positions=inputs.positions,
            tail_words=inputs.tail_words,
        )

    def fill(self) -> None:
        """Read the tail's slots from the table columns after the prefix."""
        fill_window(self.key_slots)


@dataclass(frozen=True)
class CsrPlan:
    """One draft step as index lists; a branch sees its whole list.

    Parameters
    ----------
    layout : RowLayout
        The layout of the step; the lists include its tail.
    kv_indptr : Tensor
        ``[B * topk + 1]`` int32, offsets into ``kv_indices``; the first is 0.
    kv_indices : Tensor
        ``[width]`` int32 slots: the request's prefix, then the branch's ancestors and itself.
    out_slots : Tensor
        ``[B, topk]`` int32, the slots this forward writes.
    """

    layout: RowLayout
    kv_indptr: Tensor
    kv_indices: Tensor
    out_slots: Tensor


@dataclass(frozen=True)
class ExtendPlan:
    """New tokens of ragged prompts over cached prefixes; eager and causal.

    Parameters
    ----------
    req_to_token : Tensor
        ``[rows, max_context_len]`` int32; holds the slots of the new tokens too.
    req_pool_indices, seq_lens : Tensor
        ``[B]`` int64 and int32: table rows, and cached tokens before the new ones.
    qo_indptr : Tensor
        ``[B + 1]`` int32, offsets of each request's new tokens.
    out_slots : Tensor
        ``[1, T]`` int32, slots of the new tokens.
    max_q_len, max_seq_len : int
        Most new tokens of a request, and its longest prefix plus new tokens.
    page_size : int
        As in `specattn.batch.RowLayout`, for prefix and new tokens.
    states : tuple of Tensor, optional
        ``[P]`` int64 rows and ``[P + 1]`` int32 offsets of what layers with states read, if that is
        not all new tokens; row 0 has what they leave.
    """

    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor
    out_slots: Tensor
    max_q_len: int
    max_seq_len: int
    page_size: int = 1
    states: tuple[Tensor, Tensor] | None = None


Plan = AttnPlan | CsrPlan | ExtendPlan


def check_plan(plan: Plan, device: torch.device) -> None:
    """Raise a ValueError that names a plan's first wrong tensor.

    The check reads shapes, dtypes, devices and strides, but no element.
    """
    for name, (shape, dtype) in _expected(plan).items():
        expect(name, getattr(plan, name), shape, dtype, device)
    if not isinstance(plan, CsrPlan):
        require_rows(req_to_token=plan.req_to_token)


def _expected(plan: Plan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype that a plan's tensors must have."""
    if isinstance(plan, CsrPlan):
        batch, topk = len(plan.out_slots), plan.layout.q_len
        return {
            "kv_indptr": ((batch * topk + 1,), torch.int32),
            "kv_indices": ((plan.kv_indices.numel(),), torch.int32),
            "out_slots": ((batch, topk), torch.int32),
        }
    batch, table = len(plan.req_pool_indices), plan.req_to_token
    by_row: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "req_to_token": ((len(table), table.shape[-1]), torch.int32),
        "req_pool_indices": ((batch,), torch.int64),
        "seq_lens": ((batch,), torch.int32),
    }
    if isinstance(plan, ExtendPlan):
        return by_row | {
            "qo_indptr": ((batch + 1,), torch.int32),
            "out_slots": ((1, plan.out_slots.numel()), torch.int32),
        }
    n, tail = plan.layout.q_len, plan.layout.tail
    return by_row | {
        "positions": ((batch, n), torch.int64),
        "tail_slots": ((batch, tail), torch.int32),
        "tail_positions": ((batch, tail), torch.int64),
        "tail_words": ((batch, n, mask_words(tail)), torch.int64),
    }


@dataclass(frozen=True)
class MultiStepDims:
    """The dimensions of `MultiStepInputs`: forwards, branches, and slots of a page."""

    steps: int
    topk: int
    page_size: int = 1

    @classmethod
    def of(cls, config: SpecConfig) -> MultiStepDims:
        """Return those of a config's draft decode forwards."""
        return cls(config.num_draft_forwards, config.topk, config.page_size)

    @property
    def words(self) -> int:
        """Ancestor words per draft node."""
        return mask_words(self.steps * self.topk)


def _own_bits(dims: MultiStepDims) -> Tensor:
    nodes = dims.steps * dims.topk
    return words_of([1 << node for node in range(nodes)], nodes).view(
        dims.steps, dims.topk, dims.words
    )


@dataclass(frozen=True)
class MultiStepInputs(BufferSet):
    """Inputs that all draft steps share; step s reads branches of 0..s."""

    req_pool_indices: Tensor = buf(lambda _: (), torch.int64)
    seq_lens: Tensor = buf(lambda _: (), torch.int32)
    branch_slots: Tensor = buf(lambda d: (d.steps, d.topk), torch.int32)
    positions: Tensor = buf(lambda d: (d.steps, d.topk), torch.int64)
    words: Tensor = buf(lambda d: (d.steps, d.topk, d.words), torch.int64, _own_bits)

    def step(self, index: int, dims: MultiStepDims, req_to_token: Tensor) -> AttnPlan:
        """Return the plan of step ``index``: views, nothing is copied."""
        layout = RowLayout.of_branches(dims.topk, index, dims.page_size)
        return AttnPlan(
            layout=layout,
            req_to_token=req_to_token,
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            positions=self.positions[:, index],
            tail_slots=self.branch_slots.flatten(1)[:, : layout.tail],
            tail_positions=self.positions.flatten(1)[:, : layout.tail],
            tail_words=self.words[:, index, :, : mask_words(layout.tail)],
        )
