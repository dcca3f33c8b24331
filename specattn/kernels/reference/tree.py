"""Twin of `specattn.kernels.tree`, and the shape checks of both."""

from __future__ import annotations

import torch
from torch import Tensor

from specattn.kernels.reference.beam import node_bits, score_key


def tree_steps(scores: Tensor, parents: Tensor, topk: int, num_draft_tokens: int) -> int:
    """Return the tree's depth below the root, as the candidates' shapes tell it.

    Raises
    ------
    ValueError
        If scores and parents do not describe the same steps, or the candidates are too few.
    """
    count, groups = scores.shape[1], parents.shape[1]
    if not count and num_draft_tokens == 1:
        return 0
    if count != groups * topk or (groups - 1) % topk:
        raise ValueError(
            f"{count} scores and {groups} parents are not the candidates of topk {topk}: expected "
            "topk + (num_steps - 1) * topk² and (num_steps - 1) * topk + 1"
        )
    if not 1 <= num_draft_tokens <= count + 1:
        raise ValueError(f"num_draft_tokens must be 1..{count + 1}, got {num_draft_tokens}")
    return (groups - 1) // topk + 1


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
    """See `specattn.kernels.tree.build_tree`."""
    steps = tree_steps(scores, parents, topk, num_draft_tokens)
    device = scores.device
    parent = torch.full((len(scores), num_draft_tokens), -1, device=device)  # [B, n]
    tokens_out[:, 0] = bonus_tokens
    if num_draft_tokens > 1:
        upper, orphan = _parent_candidates(parents, topk)
        kept = _keep_best(scores, upper, orphan, steps, num_draft_tokens - 1)  # [B, n - 1]
        tokens_out[:, 1:] = tokens.gather(1, kept)
        nodes = torch.arange(1, num_draft_tokens, device=device).expand_as(kept)
        node_of = torch.zeros_like(upper).scatter_(1, kept, nodes)  # [B, C + 1], root beyond C
        parent[:, 1:] = node_of.gather(1, upper.gather(1, kept))
    words, depth = ancestors(parent, words_out.shape[2], steps)
    words_out.copy_(words)
    positions_out.copy_(seq_lens[:, None] + depth)
    next_token, next_sibling = child_links(parent)
    next_token_out.copy_(next_token)
    next_sibling_out.copy_(next_sibling)


def _parent_candidates(parents: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return every candidate's parent ``[B, C + 1]``, C standing for the root, and the orphans."""
    batch, groups = parents.shape
    count = groups * topk
    group = torch.arange(groups, device=parents.device)
    # a parent lies in a shallower step than its children
    depth_start = torch.where(group > 0, topk + (group - 1) // topk * topk**2, 0)
    bad = ((parents < 0) | (parents >= depth_start)) & (group > 0)
    upper = torch.where(bad | (group == 0), count, parents).repeat_interleave(topk, dim=1)
    root = torch.full((batch, 1), count, device=parents.device)
    return torch.cat([upper, root], dim=1), bad.repeat_interleave(topk, dim=1)


def _keep_best(scores: Tensor, upper: Tensor, orphan: Tensor, steps: int, keep: int) -> Tensor:
    """Return ``[B, keep]`` ascending flat indices of an ancestor-closed best set."""
    keys = score_key(scores).masked_fill(orphan, -(2**31))
    keys = torch.cat([keys, torch.full_like(keys[:, :1], 2**31 - 1)], dim=1)  # [B, C + 1]
    jump = upper
    for _ in range(steps.bit_length()):
        keys = torch.minimum(keys, keys.gather(1, jump))
        jump = jump.gather(1, jump)
    order = keys[:, :-1].sort(dim=1, descending=True, stable=True).indices
    return order[:, :keep].sort(dim=1).values


def ancestors(parent: Tensor, num_words: int, depth_limit: int) -> tuple[Tensor, Tensor]:
    """Return ancestor words ``[B, n, W]`` and depths ``[B, n]`` of parent tables ``[B, n]``.

    Node 0 is the root, of parent -1; no node is deeper than ``depth_limit``.
    """
    nodes = torch.arange(parent.shape[1], device=parent.device)
    words = node_bits(nodes, num_words).expand(len(parent), -1, -1)
    depth = (nodes > 0).long().expand_as(parent)
    jump = parent.clamp(min=0)
    for _ in range(depth_limit.bit_length()):
        words = words | words.gather(1, jump[:, :, None].expand(-1, -1, num_words))
        depth = depth + depth.gather(1, jump)
        jump = jump.gather(1, jump)
    return words, depth


def child_links(parent: Tensor) -> tuple[Tensor, Tensor]:
    """Return first-child and next-sibling links ``[B, n]`` of parent tables, children ascending."""
    count = parent.shape[1]
    node = torch.arange(count, device=parent.device)
    child_of = parent[:, None, :] == node[:, None]  # [B, n, n]: column is a child of row
    later = (parent[:, None, :] == parent[:, :, None]) & (node > node[:, None])
    first = torch.where(child_of, node, count).amin(2)
    sibling = torch.where(later, node, count).amin(2)
    return first.masked_fill(first == count, -1), sibling.masked_fill(sibling == count, -1)
