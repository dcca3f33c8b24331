"""The values that flow through one step.

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
    """The purpose of a forward; `SpecConfig.layout` and the graph keys read it."""

    # members compare by identity; Enum's own hash takes a call in Python
    __hash__ = object.__hash__

    DECODE = "decode"
    DRAFT_DECODE = "draft_decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"


class Phase(enum.Enum):
    """The kind of forward that composite backends route on."""

    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT = "draft"
    VERIFY = "verify"


@dataclass(frozen=True)
class RowLayout:
    """The shape of a forward; a backend learns nothing else.

    Parameters
    ----------
    q_len : int
        Query tokens per request.
    tail : int
        Slots after the prefix; ancestor words say which of them a query token sees. The last
        ``q_len`` are the query tokens' own, which this forward writes.
    phase : Phase
        What composite backends route on.
    causal : bool
        Whether the words are causal: query i sees the tail up to itself. A backend may then use a
        causal kernel instead of a mask.
    page_size : int
        KV slots of a page. The keys of positions ``[i * page_size, (i + 1) * page_size)`` lie in
        one page, in order. This holds for the prefix and, if ``causal``, for the tail that
        continues it. 1 promises nothing.
    """

    q_len: int
    tail: int
    phase: Phase
    causal: bool = False
    page_size: int = 1

    @classmethod
    def of_branches(cls, topk: int, step: int, page_size: int = 1) -> RowLayout:
        """Return the layout of draft forward ``step``, over all branches so far."""
        return cls(topk, topk * (step + 1), Phase.DRAFT, topk == 1, page_size)


@dataclass(frozen=True)
class DraftState:
    """The result of a draft extend, from which the next draft starts.

    Parameters
    ----------
    topk_probs : Tensor
        ``[B, K]`` float32, probabilities of the depth-1 tokens, descending.
    topk_tokens : Tensor
        ``[B, K]`` int64, those tokens, in the target's vocabulary.
    hidden_states : Tensor
        ``[B, H]``, the draft model's hidden state at the last committed position.
    draft_probs : Tensor
        ``[B, Vd]`` float32, probabilities that a sampled token was drawn from; ``[B, 0]`` unless
        ``SpecConfig.draft_sampling``.
    """

    topk_probs: Tensor
    topk_tokens: Tensor
    hidden_states: Tensor
    draft_probs: Tensor


@dataclass(frozen=True)
class Candidates:
    """Every token that the draft proposed.

    Flat indices 0..K-1 are the tokens at depth 1. Groups of K children follow: group g >= 1 holds
    the children of beam entry g - 1.

    Parameters
    ----------
    scores : Tensor
        ``[B, C]`` float32, probability of the path down to the token.
    tokens : Tensor
        ``[B, C]`` int64.
    parents : Tensor
        ``[B, (N - 1) K + 1]`` int64, flat index of the parent of group g; -1 for the root.
    draft_probs : Tensor
        ``[B, N, Vd]`` float32, probabilities that a sampled chain was drawn from; ``[B, N, 0]``
        unless ``SpecConfig.draft_sampling``.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor
    draft_probs: Tensor


@dataclass(frozen=True)
class Linked:
    """A tree as nodes and their parents, as `link_tree` takes them.

    Parameters
    ----------
    tokens, parents : Tensor
        ``[B, n]`` int64; node 0 is the root. A node is padding if its parent is no node before it.
    chosen : Tensor, optional
        ``[B]`` int32: requests with a 0 take the tree of ``fallback``.
    fallback : Candidates, Marginals or Linked, optional
        What is proposed for these; given iff ``chosen`` is.
    """

    tokens: Tensor
    parents: Tensor
    chosen: Tensor | None = None
    fallback: Candidates | Marginals | Linked | None = None


@dataclass(frozen=True)
class Marginals:
    """The most probable tokens of every depth, each by itself.

    Parameters
    ----------
    log_probs : Tensor
        ``[B, N, K]`` float32, descending.
    tokens : Tensor
        ``[B, N, K]`` int64, in the target's vocabulary.
    draft_probs : Tensor
        As in `Candidates`; each depth's one token was drawn from its own row.
    """

    log_probs: Tensor
    tokens: Tensor
    draft_probs: Tensor


@dataclass(frozen=True)
class DraftTree:
    """The nodes sent to verification; node 0 is the bonus token.

    Parameters
    ----------
    tokens, positions : Tensor
        ``[B, n]`` int64; a position is ``seq_lens + depth``.
    words : Tensor
        ``[B, n, W]`` int64; bit j of row i is set iff node j is i or an ancestor of i.
    retrieve_next_token, retrieve_next_sibling : Tensor
        ``[B, n]`` int64, local index of the first child / next sibling, -1 for none.
    draft_probs : Tensor
        As in `Candidates`.
    """

    tokens: Tensor
    positions: Tensor
    words: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    draft_probs: Tensor


@dataclass(frozen=True)
class AcceptResult:
    """The path that verification kept.

    Parameters
    ----------
    accept_index : Tensor
        ``[B, N + 1]`` int32, the nodes of the accepted path from the root, -1 past its end.
    accept_tokens : Tensor
        ``[B, N + 1]`` int64; entry i is the token after node ``accept_index[i]``. Entry
        ``accept_lens - 1`` is the bonus token; entries past it are 0.
    accept_lens : Tensor
        ``[B]`` int32, tokens gained, at least 1: the bonus token counts.
    bonus_tokens : Tensor
        ``[B]`` int64, the last token gained; -1 where the target's logits are not finite, and then
        ``accept_tokens`` holds token 0 in its place.
    probs : Tensor, optional
        ``[B, n, V]`` float32, contiguous: what tokens were drawn from after each node; None where
        no distribution was computed.
    """

    accept_index: Tensor
    accept_tokens: Tensor
    accept_lens: Tensor
    bonus_tokens: Tensor
    probs: Tensor | None = None


def halves(batch: int) -> tuple[slice, slice]:
    """Return the requests of both halves of a batch, for two-batch overlap.

    The split is that of SGLang's ``TboAttnBackend``: at a request boundary, whatever of the batch
    is padding, so that nothing is read on the host to find it.
    """
    return slice(0, batch // 2), slice(batch // 2, batch)
