"""The buffers that all phases of a step share, and what the host is told of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specattn.buffers import BufferSet, buf


@dataclass(frozen=True)
class StepOutput:
    """What the host is told of a step.

    Parameters
    ----------
    packed : Tensor
        ``[B, N + 2]`` int64: tokens gained, then those tokens and zeros. A row that did not take
        part (padding, or a request without slots for a step) gained 0.
    """

    packed: Tensor


@dataclass(frozen=True)
class StepInputs(BufferSet):
    """What all phases of a step share; the dimensions are its `SpecConfig`.

    ``window`` holds the slots after the committed context: the first ones are the tail of every
    phase, for all of them start from the same length.
    """

    req_pool_indices: Tensor = buf(lambda _: (), torch.int64)
    seq_lens: Tensor = buf(lambda _: (), torch.int32)
    window: Tensor = buf(lambda c: (c.reserve_len,), torch.int32)
    positions: Tensor = buf(lambda c: (c.num_steps + 1,), torch.int64)
    roots: Tensor = buf(lambda _: (), torch.int64)
    temperature: Tensor = buf(lambda _: (), torch.float32)
    top_k: Tensor = buf(lambda _: (), torch.int32)
    top_p: Tensor = buf(lambda _: (), torch.float32, lambda _: torch.ones(()))
    seeds: Tensor = buf(lambda _: (), torch.int64)


@dataclass(frozen=True)
class StepLinks(BufferSet):
    """The part of a `DraftTree` that the target does not read; -1 is no node."""

    next_token: Tensor = buf(
        lambda c: (c.num_draft_tokens,),
        torch.int64,
        lambda c: torch.full((c.num_draft_tokens,), -1),
    )
    next_sibling: Tensor = buf(
        lambda c: (c.num_draft_tokens,),
        torch.int64,
        lambda c: torch.full((c.num_draft_tokens,), -1),
    )


@dataclass(frozen=True)
class StepAccepted(BufferSet):
    """An `AcceptResult`, and what the host is told."""

    accept_index: Tensor = buf(lambda c: (c.num_steps + 1,), torch.int32)
    accept_tokens: Tensor = buf(lambda c: (c.num_steps + 1,), torch.int64)
    accept_lens: Tensor = buf(lambda _: (), torch.int32)
    bonus_tokens: Tensor = buf(lambda _: (), torch.int64)
    packed: Tensor = buf(lambda c: (c.num_steps + 2,), torch.int64)
