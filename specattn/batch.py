"""The values that flow through one step: each stage returns one, nobody writes to another's.

Shapes: B requests, n = num_draft_tokens, N = num_steps, K = topk,
C = K + (N - 1) K² candidates, W = ceil(n / 64) ancestor words.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ForwardMode(enum.Enum):
    """Why a model runs. Read by ``SpecConfig.layout`` and used as a graph key; nothing else."""

    # as members compare; that of their names takes a call in Python
    __hash__ = object.__hash__

    DECODE = "decode"
    DRAFT_DECODE = "draft_decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    EXTEND = "extend"


class Phase(enum.Enum):
    """What composites route on."""

    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT = "draft"
    VERIFY = "verify"


@dataclass(frozen=True)
class RowLayout:
    """The numbers of a forward: all a backend is told about its mode.

    Parameters
    ----------
    q_len : int
        Query tokens per request.
    tail : int
        Slots after the prefix that a query token may see, by its ancestor words. The last
        ``q_len`` of them are the query tokens' own, written by this forward.
    phase : Phase
        For composites to route on.
    causal : bool
        Whether the words are causal by construction: query i sees the tail up to itself. A
        backend may then use a causal kernel instead of a mask.
    page_size : int
        KV slots of a page. The keys of positions ``[i * page_size, (i + 1) * page_size)`` lie in
        one page, in order: those of the prefix and, if ``causal``, of the tail, which continues
        it. 1 says nothing.
    """

    q_len: int
    tail: int
    phase: Phase
    causal: bool = False
    page_size: int = 1


@dataclass(frozen=True)
class SpecBatch:
    """The requests of a step.

    Parameters
    ----------
    req_pool_indices : Tensor
        ``[B]`` int64, rows of ``req_to_token``.
    seq_lens : Tensor
        ``[B]`` int32, committed KV: neither the bonus token nor any draft token counts.
    seq_lens_cpu : Tensor
        ``[B]`` int32 on the host, the same numbers; read by ``schedule`` alone.
    bonus_tokens : Tensor
        ``[B]`` int64, each request's newest token, not yet in the KV.
    """

    req_pool_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    bonus_tokens: Tensor

    def __len__(self) -> int:
        return len(self.req_pool_indices)


@dataclass(frozen=True)
class DraftState:
    """What a draft extend leaves for the next proposal.

    Parameters
    ----------
    topk_probs : Tensor
        ``[B, K]`` float32, probabilities of the depth-1 tokens, descending.
    topk_tokens : Tensor
        ``[B, K]`` int64, those tokens, in the target's vocabulary.
    hidden_states : Tensor
        ``[B, H]``, the draft model's hidden state at the last committed position.
    draft_probs : Tensor
        ``[B, Vd]`` float32, the law a sampled token was drawn from; ``[B, 0]`` unless
        ``SpecConfig.draft_sampling``.
    """

    topk_probs: Tensor
    topk_tokens: Tensor
    hidden_states: Tensor
    draft_probs: Tensor


@dataclass(frozen=True)
class Candidates:
    """Every token the drafter looked at.

    The flat index is 0..K-1 at depth 1, then groups of K children: group g >= 1 holds the
    children of beam entry g - 1.

    Parameters
    ----------
    scores : Tensor
        ``[B, C]`` float32, probability of the path down to the token.
    tokens : Tensor
        ``[B, C]`` int64.
    parents : Tensor
        ``[B, (N - 1) K + 1]`` int64, flat index of the parent of group g; -1 for the root.
    draft_probs : Tensor
        ``[B, N, Vd]`` float32, the laws a sampled chain was drawn from; ``[B, N, 0]`` unless
        ``SpecConfig.draft_sampling``.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor
    draft_probs: Tensor


@dataclass(frozen=True)
class DraftTree:
    """The nodes sent to verification, node 0 being the bonus token.

    Parameters
    ----------
    tokens, positions : Tensor
        ``[B, n]`` int64; a position is ``seq_lens + depth``.
    words : Tensor
        ``[B, n, W]`` int64; bit j of row i is set iff node j is i or an ancestor of i.
    retrieve_index : Tensor
        ``[B, n]`` int64, the node's flat row ``b * n + j``.
    retrieve_next_token, retrieve_next_sibling : Tensor
        ``[B, n]`` int64, local index of the first child / next sibling, -1 for none.
    draft_probs : Tensor
        As in `Candidates`.
    """

    tokens: Tensor
    positions: Tensor
    words: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    draft_probs: Tensor


@dataclass(frozen=True)
class AcceptResult:
    """What verification kept.

    Parameters
    ----------
    accept_index : Tensor
        ``[B, N + 1]`` int32, local node ids of the path from the root, -1 past its end.
    accept_tokens : Tensor
        ``[B, N + 1]`` int64; entry i follows node ``accept_index[i]``; the entry at
        ``accept_lens - 1`` is the bonus token. 0 past the end.
    accept_lens : Tensor
        ``[B]`` int32, tokens gained, bonus included (so at least 1).
    bonus_tokens : Tensor
        ``[B]`` int64.
    """

    accept_index: Tensor
    accept_tokens: Tensor
    accept_lens: Tensor
    bonus_tokens: Tensor
