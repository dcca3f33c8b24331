"""Build the draft tree: select, number, link and mask its nodes in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from specattn.kernels.beam import score_key
from specattn.kernels.dense import require_dense
from specattn.kernels.reference import tree as twin

if TYPE_CHECKING:
    from torch import Tensor

# Candidates one program holds in registers; wider tables go through the twin's sort.
MAX_CANDIDATES = 16384


@triton.jit
def _parent_of(parents, flat, live, TOPK: tl.constexpr):
    """Return the flat index of each candidate's parent: -1 for the root, -2 for an orphan."""
    group = flat // TOPK
    parent = tl.load(parents + group, mask=live & (group > 0), other=-1)
    # A parent lies in a shallower step than its children: no cycle, no read outside the row.
    depth_start = TOPK + (group - 1) // TOPK * TOPK * TOPK
    known = (parent >= 0) & (parent < depth_start)
    return tl.where(group > 0, tl.where(known, parent, -2), -1)


@triton.jit
def _path_key(scores, parents, flat, live, num_steps, TOPK: tl.constexpr):
    """Return the key of the lowest score on each candidate's path; orphans rank last."""
    key = score_key(tl.load(scores + flat, mask=live, other=0))
    up = _parent_of(parents, flat, live, TOPK)
    for _ in range(num_steps - 1):
        above = tl.load(scores + up, mask=up >= 0, other=float("inf"))
        key = tl.minimum(key, score_key(above))
        key = tl.where(up == -2, -0x80000000, key)
        up = tl.where(up >= 0, _parent_of(parents, tl.maximum(up, 0), up >= 0, TOPK), up)
    return key


@triton.jit
def _keep_best(key, live, keep):
    """Mark the ``keep`` largest keys, the lower index first among equals."""
    wide = tl.where(live, key.to(tl.int64), -0x80000001)
    # Build the keep-th largest key bit by bit.
    threshold = tl.full([], -0x80000000, tl.int64)
    step = tl.full([], 0x80000000, tl.int64)
    for _ in range(32):
        trial = threshold + step
        enough = tl.sum((wide >= trial).to(tl.int32), 0) >= keep
        threshold = tl.where(enough, trial, threshold)
        step = step // 2
    above = wide > threshold
    tie = wide == threshold
    room = keep - tl.sum(above.to(tl.int32), 0)
    return above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))


@triton.jit
def _parent_node(
    next_token_out, parents, node, inner, N, TOPK: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Return each node's parent node, by looking its flat parent up among the kept ones."""
    flat = tl.load(next_token_out + node, mask=inner, other=0)
    up = _parent_of(parents, flat, inner, TOPK)                              # [BLOCK_N]
    parent = tl.where(inner, 0, -1).to(tl.int64)
    for first in range(1, N, BLOCK_S):
        other = first + tl.arange(0, BLOCK_S)                                # [BLOCK_S]
        other_flat = tl.load(next_token_out + other, mask=other < N, other=-3)
        hit = (up[:, None] == other_flat[None, :]) & inner[:, None]          # [BLOCK_N, BLOCK_S]
        parent += tl.sum(tl.where(hit, other[None, :], 0), 1)
    return parent


@triton.jit
def _ancestors(parent_of, node, num_steps, N, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return each node's ancestor words and depth, climbing all paths at once."""
    word = tl.arange(0, BLOCK_W)                                             # [BLOCK_W]
    one = tl.full([BLOCK_N, BLOCK_W], 1, tl.int64)
    words = tl.zeros([BLOCK_N, BLOCK_W], tl.int64)
    depth = tl.zeros([BLOCK_N], tl.int64)
    above = node
    for _ in range(num_steps + 1):
        held = (above >= 0)[:, None] & ((above // 64)[:, None] == word[None, :])
        words |= tl.where(held, one << (above % 64)[:, None], 0)
        above = tl.load(parent_of + above, mask=(above >= 0) & (above < N), other=-1)
        depth += (above >= 0).to(tl.int64)
    return words, depth


@triton.jit
def _child_links(parent_of, node, parent, N, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return each node's first child and next sibling, ascending; -1 for none."""
    first_child = tl.full([BLOCK_N], N, tl.int64)
    sibling = tl.full([BLOCK_N], N, tl.int64)
    for first in range(1, N, BLOCK_S):
        other = first + tl.arange(0, BLOCK_S).to(tl.int64)                   # [BLOCK_S]
        other_parent = tl.load(parent_of + other, mask=other < N, other=-2)
        child = other_parent[None, :] == node[:, None]                       # [BLOCK_N, BLOCK_S]
        first_child = tl.minimum(first_child, tl.min(tl.where(child, other[None, :], N), 1))
        later = (other_parent[None, :] == parent[:, None]) & (other[None, :] > node[:, None])
        sibling = tl.minimum(sibling, tl.min(tl.where(later, other[None, :], N), 1))
    return tl.where(first_child < N, first_child, -1), tl.where(sibling < N, sibling, -1)


@triton.jit
def _build_tree_kernel(
    scores,            # [B, C] float32
    tokens,            # [B, C] int64
    parents,           # [B, G] int64
    bonus_tokens,      # [B] int64
    seq_lens,          # [B] int32
    tokens_out,        # [B, N] int64, out
    positions_out,     # [B, N] int64, out
    words_out,         # [B, N, W] int64, out
    next_token_out,    # [B, N] int64, out; holds the nodes' flat indices on the way
    next_sibling_out,  # [B, N] int64, out; holds the nodes' parents on the way
    num_candidates, num_steps, stride_scores, stride_tokens, stride_parents,
    N: tl.constexpr, W: tl.constexpr, TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    parents += req * stride_parents
    tokens += req * stride_tokens
    tokens_out += req * N
    next_token_out += req * N
    next_sibling_out += req * N

    flat = tl.arange(0, BLOCK_C)                                             # [BLOCK_C]
    live = flat < num_candidates
    key = _path_key(scores + req * stride_scores, parents, flat, live, num_steps, TOPK)
    kept = _keep_best(key, live, N - 1)
    node_of = tl.cumsum(kept.to(tl.int32), 0)                                # [BLOCK_C]
    kept = kept & (node_of < N)
    tl.store(tokens_out + node_of, tl.load(tokens + flat, mask=kept, other=0), mask=kept)
    tl.store(tokens_out, tl.load(bonus_tokens + req))
    tl.store(next_token_out + node_of, flat.to(tl.int64), mask=kept)
    tl.debug_barrier()

    node = tl.arange(0, BLOCK_N).to(tl.int64)                                # [BLOCK_N]
    inner = (node > 0) & (node < N)
    parent = _parent_node(next_token_out, parents, node, inner, N, TOPK, BLOCK_S)
    tl.store(next_sibling_out + node, parent, mask=node < N)
    tl.debug_barrier()

    words, depth = _ancestors(next_sibling_out, node, num_steps, N, BLOCK_N, BLOCK_W)
    next_token, next_sibling = _child_links(next_sibling_out, node, parent, N, BLOCK_N, BLOCK_S)
    tl.debug_barrier()

    tl.store(next_token_out + node, next_token, mask=node < N)
    tl.store(next_sibling_out + node, next_sibling, mask=node < N)
    tl.store(positions_out + req * N + node, tl.load(seq_lens + req) + depth, mask=node < N)
    word = tl.arange(0, BLOCK_W)                                             # [BLOCK_W]
    cell = (req * N + node)[:, None] * W + word[None, :]
    tl.store(words_out + cell, words, mask=(node < N)[:, None] & (word < W)[None, :])


def build_tree(
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    bonus_tokens: Tensor,
    seq_lens: Tensor,
    *,
    topk: int,
    num_draft_tokens: int,
    tokens_out: Tensor,
    positions_out: Tensor,
    words_out: Tensor,
    next_token_out: Tensor,
    next_sibling_out: Tensor,
) -> None:
    """Keep the best ``num_draft_tokens - 1`` candidates of each request as the tree to verify.

    The reranking of EAGLE-2 (arXiv:2406.16858), made exact at ties and NaN: a candidate counts as
    much as the lowest score on its path, equals go to the lower flat index, and NaN ranks last, so
    every node's parent is kept too. Nodes are numbered in ascending flat index after the root.

    A candidate whose parent entry does not point to a shallower step is an orphan: it ranks last,
    and hangs below the root if it is needed to fill the tree.

    Parameters
    ----------
    scores, tokens, parents : Tensor
        The `specattn.batch.Candidates`; rows may have a stride. C = 0 for plain decoding.
    bonus_tokens, seq_lens : Tensor
        ``[B]`` int64 and int32: the root's token and position.
    topk, num_draft_tokens : int
        Children per group, and the nodes wanted, the root included.
    tokens_out, positions_out, next_token_out, next_sibling_out : Tensor
        ``[B, num_draft_tokens]`` int64, dense: the `specattn.batch.DraftTree`.
    words_out : Tensor
        ``[B, num_draft_tokens, W]`` int64, dense: its ancestor words.

    Raises
    ------
    ValueError
        If the candidates are fewer than the nodes, or scores and parents disagree.
    """
    steps = twin.tree_steps(scores, parents, topk, num_draft_tokens)
    batch, count = scores.shape
    num_words = words_out.shape[2]
    if not batch:
        return
    if count > MAX_CANDIDATES:
        twin.build_tree(
            scores, tokens, parents, bonus_tokens, seq_lens, topk=topk,
            num_draft_tokens=num_draft_tokens, tokens_out=tokens_out, positions_out=positions_out,
            words_out=words_out, next_token_out=next_token_out, next_sibling_out=next_sibling_out,
        )
        return
    require_dense(
        tokens_out=tokens_out, positions_out=positions_out, words_out=words_out,
        next_token_out=next_token_out, next_sibling_out=next_sibling_out,
    )
    _build_tree_kernel[(batch,)](
        scores, tokens, parents, bonus_tokens, seq_lens,
        tokens_out, positions_out, words_out, next_token_out, next_sibling_out,
        count, steps, scores.stride(0), tokens.stride(0), parents.stride(0),
        N=num_draft_tokens, W=num_words, TOPK=topk,
        BLOCK_C=triton.next_power_of_2(max(count, 1)),
        BLOCK_N=triton.next_power_of_2(num_draft_tokens), BLOCK_W=triton.next_power_of_2(num_words),
        BLOCK_S=16, num_warps=4 if count <= 2048 else 16,
    )
