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
def _parent_of(parents, group, live, TOPK: tl.constexpr):
    """Return the flat index of each group's parent: -1 for the root, -2 for orphans."""
    parent = tl.load(parents + group, mask=live & (group > 0), other=-1)
    # A parent lies in a shallower step than its children: no cycle, no read outside the row.
    depth_start = TOPK + (group - 1) // TOPK * TOPK * TOPK
    known = (parent >= 0) & (parent < depth_start)
    return tl.where(group > 0, tl.where(known, parent, -2), -1).to(tl.int32)


@triton.jit
def _group_keys(scores, parents, group, live, num_steps, TOPK: tl.constexpr):
    """Return the key of the lowest score above each group's candidates; orphans rank last."""
    key = tl.full(group.shape, 0x7FFFFFFF, tl.int32)
    up = _parent_of(parents, group, live, TOPK)
    for _ in range(num_steps - 1):
        above = tl.load(scores + up, mask=up >= 0, other=float("inf"))
        key = tl.minimum(key, score_key(above))
        key = tl.where(up == -2, -0x80000000, key)
        further = _parent_of(parents, tl.maximum(up, 0) // TOPK, up >= 0, TOPK)
        up = tl.where(up >= 0, further, up)
    return key


@triton.jit
def _keep_best(key, live, keep):
    """Mark the ``keep`` largest keys, the lower index first among equals."""
    # Halve the range of the keep-th largest key; most often a cut between two keys ends it early.
    low = tl.min(tl.where(live, key, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(tl.where(live, key, -0x80000000), 0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = tl.sum((live & (key >= middle.to(tl.int32))).to(tl.int32), 0)
        high = tl.where(count < keep, middle - 1, tl.where(count == keep, middle, high))
        low = tl.where(count < keep, low, middle)
    threshold = low.to(tl.int32)
    above = live & (key > threshold)
    tie = live & (key == threshold)
    room = keep - tl.sum(above.to(tl.int32), 0)
    return above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))


@triton.jit
def _select(
    scores, parents, tokens, tokens_out, flat_out, num_candidates, num_steps, N: tl.constexpr,
    TOPK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Write the tokens and flat indices of the kept candidates to nodes 1 and on."""
    group = tl.arange(0, BLOCK_G)                                            # [BLOCK_G]
    live = group * TOPK < num_candidates
    above = _group_keys(scores, parents, group, live, num_steps, TOPK)
    child = tl.arange(0, BLOCK_K)                                            # [BLOCK_K]
    flat = group[:, None] * TOPK + child[None, :]                            # [BLOCK_G, BLOCK_K]
    live = live[:, None] & (child < TOPK)[None, :]
    own = score_key(tl.load(scores + flat, mask=live, other=0))
    # rows one after the other: in the order of the flat indices
    key = tl.reshape(tl.minimum(own, above[:, None]), [BLOCK_G * BLOCK_K])
    flat = tl.reshape(flat, [BLOCK_G * BLOCK_K])
    live = tl.reshape(live, [BLOCK_G * BLOCK_K])
    kept = _keep_best(key, live, N - 1)
    node = tl.cumsum(kept.to(tl.int32), 0)
    kept = kept & (node < N)
    tl.store(tokens_out + node, tl.load(tokens + flat, mask=kept, other=0), mask=kept)
    tl.store(flat_out + node, flat.to(tl.int64), mask=kept)


@triton.jit
def _ancestors(parents, parent, node, num_steps, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return each node's ancestor words and depth, climbing all paths at once."""
    word = tl.arange(0, BLOCK_W)                                             # [BLOCK_W]
    one = tl.full([BLOCK_N, BLOCK_W], 1, tl.int64)
    words = tl.where((node // 64)[:, None] == word[None, :], one << (node % 64)[:, None], 0)
    depth = tl.zeros([BLOCK_N], tl.int32)
    above = parent
    for _ in range(num_steps):
        held = (above >= 0)[:, None] & ((above // 64)[:, None] == word[None, :])
        words |= tl.where(held, one << (above % 64)[:, None], 0)
        depth += (above >= 0).to(tl.int32)
        above = tl.load(parents + above, mask=above >= 0, other=-1).to(tl.int32)
    return words, depth


@triton.jit
def _build_tree_kernel(
    scores,            # [B, C] float32
    tokens,            # [B, C] int64
    parents,           # [B, G] int64
    bonus_tokens,      # [B] int64
    seq_lens,          # [B] int32
    tokens_out,        # [B, N] int64, out
    positions_out,     # [B, N] int64, out; holds the nodes' parents on the way
    words_out,         # [B, N, W] int64, out
    next_token_out,    # [B, N] int64, out; holds the nodes' flat indices on the way
    next_sibling_out,  # [B, N] int64, out
    num_candidates, num_steps, stride_scores, stride_tokens, stride_parents,
    N: tl.constexpr, W: tl.constexpr, TOPK: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    parents += req * stride_parents
    tokens_out += req * N
    positions_out += req * N
    next_token_out += req * N
    next_sibling_out += req * N
    root_position = tl.load(seq_lens + req)
    tl.store(tokens_out, tl.load(bonus_tokens + req))

    node = tl.arange(0, BLOCK_N)                                             # [BLOCK_N]
    inner = (node > 0) & (node < N)
    parent = tl.full([BLOCK_N], -1, tl.int32)
    sibling = tl.zeros([BLOCK_N], tl.int32)
    if N > 1:
        _select(
            scores + req * stride_scores, parents, tokens + req * stride_tokens, tokens_out,
            next_token_out, num_candidates, num_steps, N, TOPK, BLOCK_G, BLOCK_K,
        )
        tl.debug_barrier()
        flat = tl.load(next_token_out + node, mask=inner, other=0).to(tl.int32)
        up = _parent_of(parents, flat // TOPK, inner, TOPK)
        # columns are nodes, so that maxima stay within threads
        hit = (flat[:, None] == up[None, :]) & inner[:, None]                # [BLOCK_N, BLOCK_N]
        parent = tl.where(inner, tl.max(tl.where(hit, node[:, None], 0), 0), -1)
        # the next older child of the same parent, 0 for none
        older = (parent[:, None] == parent[None, :]) & (node[:, None] < node[None, :])
        sibling = tl.max(tl.where(older, node[:, None], 0), 0)
        tl.store(positions_out + node, parent.to(tl.int64), mask=node < N)
        tl.debug_barrier()
    none = tl.full([BLOCK_N], -1, tl.int64)
    tl.store(next_token_out + node, none, mask=node < N)
    tl.store(next_sibling_out + node, none, mask=node < N)
    words, depth = _ancestors(positions_out, parent, node, num_steps, BLOCK_N, BLOCK_W)
    tl.debug_barrier()
    tl.store(positions_out + node, (root_position + depth).to(tl.int64), mask=node < N)
    word = tl.arange(0, BLOCK_W)                                             # [BLOCK_W]
    cell = (req * N + node)[:, None] * W + word[None, :]
    tl.store(words_out + cell, words, mask=(node < N)[:, None] & (word < W)[None, :])
    child = node.to(tl.int64)
    tl.store(next_sibling_out + sibling, child, mask=inner & (sibling > 0))
    tl.store(next_token_out + parent, child, mask=inner & (sibling == 0))


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
    block_g = triton.next_power_of_2(max(parents.shape[1], 1))
    block_k = triton.next_power_of_2(topk)
    block_n = triton.next_power_of_2(num_draft_tokens)
    if block_g * block_k > MAX_CANDIDATES:
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
        N=num_draft_tokens, W=num_words, TOPK=topk, BLOCK_G=block_g, BLOCK_K=block_k,
        BLOCK_N=block_n, BLOCK_W=triton.next_power_of_2(num_words),
        # a small tree is one warp's work: nothing to wait for
        num_warps=1 if block_n <= 16 else 4 if block_n <= 128 else 8,
    )
