"""Draft trees of candidates, or of nodes and their parents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_dense, require_rows, require_shape, whole_number
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import launch_options, power_of_2
from specattn.kernels.sampling import score_key
from specattn.kernels.words import node_bits

if TYPE_CHECKING:
    from specattn.batch import Candidates, DraftTree, Linked

launch = TritonModule("specattn.kernels.tree.triton_build")

# candidates that one program holds in registers; wider tables are sorted by torch
MAX_CANDIDATES = 16384
# nodes, positions and ranks that a byte can number
MAX_NODES = 256


def build_tree(
    candidates: Candidates,
    bonus_tokens: Tensor,
    seq_lens: Tensor,
    *,
    topk: int,
    out: DraftTree,
) -> None:
    """Build each request's tree: the root and its best candidates.

    This is the reranking of EAGLE-2 (arXiv:2406.16858), exact at ties and NaN. A candidate ranks
    by the lowest score on its path, equals go to the lower flat index, and NaN ranks last, so
    every node's parent is kept too. Nodes are numbered in ascending flat index after the root.

    A candidate whose parent entry does not point to a shallower step is an orphan: it ranks last,
    and hangs below the root if it is needed to fill the tree.

    Parameters
    ----------
    candidates : Candidates
        What the draft proposed; rows may have a stride. C = 0 for plain decoding.
    bonus_tokens, seq_lens : Tensor
        ``[B]`` int64 and int32: the root's token and position.
    topk : int
        Children per group.
    out : DraftTree
        ``tokens``, ``positions``, ``words`` and links are written; dense.

    Raises
    ------
    ValueError
        If the candidates are fewer than the nodes, or scores and parents disagree, or an output
        is not dense.
    """
    scores, parents = candidates.scores, candidates.parents
    nodes = out.tokens.shape[1]
    steps = _tree_steps(scores, parents, topk, nodes)
    require_dense(**written(out))
    batch, count = scores.shape
    if not batch:
        return
    if count <= MAX_CANDIDATES and on_triton(scores):
        groups = parents.shape[1]
        launch.build_tree_kernel[(batch,)](
            scores,
            candidates.tokens,
            parents,
            bonus_tokens,
            seq_lens,
            tuple(written(out).values()),
            count,
            groups,
            max(steps - 2, 0).bit_length(),
            steps.bit_length(),
            scores.stride(0),
            candidates.tokens.stride(0),
            parents.stride(0),
            **node_sizes(out),
            TOPK=topk,
            BLOCK_C=power_of_2(count),
            BLOCK_G=power_of_2(groups),
            BLOCK_S=min(power_of_2(nodes), 64),
            num_warps=_warps(count, nodes),
            **launch_options(scores.device),
        )
        return
    parent = torch.full((batch, nodes), -1, device=scores.device)  # [B, n]
    out.tokens[:, 0] = bonus_tokens
    if nodes > 1:
        upper, orphan = _parent_candidates(parents, topk)
        kept = _keep_best(scores, upper, orphan, steps, nodes - 1)  # [B, n - 1]
        out.tokens[:, 1:] = candidates.tokens.gather(1, kept)
        number = torch.arange(1, nodes, device=scores.device).expand_as(kept)
        node_of = torch.zeros_like(upper).scatter_(1, kept, number)  # [B, C + 1], root beyond C
        parent[:, 1:] = node_of.gather(1, upper.gather(1, kept))
    write_links(out, parent, seq_lens, steps)


def link_tree(linked: Linked, seq_lens: Tensor, *, out: DraftTree) -> None:
    """Make draft trees of nodes and their parents.

    Node 0 is the root. A node whose parent is not a node before it is padding, which has no
    children: it is as deep as the root, sees itself alone, and no link leads to it. Children are
    linked in ascending order.

    One launch, which can be recorded in a CUDA graph.

    Parameters
    ----------
    linked : Linked
        Every node's token, and its parent, n of 1 to 256; may have a row stride. The outputs of
        requests that are not ``chosen`` stay as they are.
    seq_lens : Tensor
        ``[B]`` int32, the position of each request's root.
    out : DraftTree
        ``tokens``, ``positions``, ``words`` and links are written; dense. Its tokens may be those
        of ``linked``.

    Raises
    ------
    ValueError
        If the trees have more than 256 nodes, or a tensor is of another shape, dtype or layout.
    """
    tokens, parents, chosen = linked.tokens, linked.parents, linked.chosen
    shape = tuple(tokens.shape)
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_NODES:
        raise ValueError(f"tokens must be [B, 1..{MAX_NODES}], got {list(shape)}")
    given, outs = {"tokens": tokens, "parents": parents}, written(out)
    words = outs.pop("out.words")
    require_shape(shape, torch.int64, **given, **outs)
    if words.shape[:2] != shape or words.shape[2] * 64 < shape[1]:
        raise ValueError(
            f"out.words must be {[*shape, -(-shape[1] // 64)]}, got {list(words.shape)}"
        )
    require_rows(**given)
    require_dense(**outs, words=words, seq_lens=seq_lens, chosen=chosen)
    if not len(tokens):
        return
    if on_triton(tokens):
        batch, nodes = shape
        launch.link_tree_kernel[(batch,)](
            tokens,
            parents,
            seq_lens,
            chosen,
            tuple(written(out).values()),
            (nodes - 1).bit_length(),
            tokens.stride(0),
            parents.stride(0),
            **node_sizes(out),
            BLOCK_S=min(power_of_2(nodes), 64),
            num_warps=1 if nodes <= 64 else 4,
            **launch_options(out.words.device),
        )
        return
    node = torch.arange(shape[1], device=parents.device)
    known = (parents >= 0) & (parents < node)
    seen, depth = _ancestors(torch.where(known, parents, -1), words.shape[2], shape[1] - 1)
    seen = torch.where(known[:, :, None], seen, node_bits(node, words.shape[2]))
    depth = torch.where(known, depth, 0)
    # no two nodes of padding are siblings
    links = child_links(torch.where(known, parents, -1 - node))
    made = (tokens, seq_lens[:, None] + depth, seen, *links)
    for new, old in zip(made, written(out).values(), strict=True):
        if chosen is not None:
            taken = (chosen != 0).view(-1, *(1,) * (old.dim() - 1))
            new = torch.where(taken, new, old)
        old.copy_(new)


def written(out: DraftTree) -> dict[str, Tensor]:
    """Return what building a tree writes, by name; see `DraftTree`."""
    return {
        "out.tokens": out.tokens,
        "out.positions": out.positions,
        "out.words": out.words,
        "out.retrieve_next_token": out.retrieve_next_token,
        "out.retrieve_next_sibling": out.retrieve_next_sibling,
    }


def node_sizes(out: DraftTree) -> dict[str, int]:
    """Return how many nodes and words trees have, as kernels' constants."""
    nodes, words = out.words.shape[1:]
    return {"N": nodes, "W": words, "BLOCK_N": power_of_2(nodes), "BLOCK_W": power_of_2(words)}


def write_links(out: DraftTree, parent: Tensor, seq_lens: Tensor, depth_limit: int) -> None:
    """Write all but the tokens of trees from parents ``[B, n]``.

    Node 0 is the root, of parent -1; no node is deeper than ``depth_limit``.
    """
    words, depth = _ancestors(parent, out.words.shape[2], depth_limit)
    next_token, next_sibling = child_links(parent)
    out.words.copy_(words)
    out.positions.copy_(seq_lens[:, None] + depth)
    out.retrieve_next_token.copy_(next_token)
    out.retrieve_next_sibling.copy_(next_sibling)


def _tree_steps(scores: Tensor, parents: Tensor, topk: int, nodes: int) -> int:
    """Return the tree's depth by its candidates' shapes; raise ValueError if unfit."""
    count, groups = scores.shape[1], parents.shape[1]
    if not count and nodes == 1:
        return 0
    if count != groups * topk or (groups - 1) % topk:
        raise ValueError(
            f"{count} scores and {groups} parents are not the candidates of topk {topk}: expected "
            "topk + (num_steps - 1) * topk² and (num_steps - 1) * topk + 1"
        )
    whole_number("nodes", nodes, 1, count + 1)
    return (groups - 1) // topk + 1


def _parent_candidates(parents: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return parents ``[B, C + 1]``, C for the root, and orphans."""
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


def _ancestors(parent: Tensor, num_words: int, depth_limit: int) -> tuple[Tensor, Tensor]:
    """Return ancestor words ``[B, n, W]`` and depths ``[B, n]`` of parents."""
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


def _warps(count: int, nodes: int) -> int:
    """Return warps per request: one avoids barriers, wide tables want more."""
    if count <= 128 and nodes <= 64:
        return 1
    return 4 if count <= 2048 else 16
