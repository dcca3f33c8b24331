"""Draft trees of the most probable prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import require_dense, require_shape, whole_number
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import launch_options
from specattn.kernels.tree.build import MAX_NODES, node_sizes, write_links, written

if TYPE_CHECKING:
    from specattn.batch import DraftTree, Marginals

launch = TritonModule("specattn.kernels.tree.triton_best_first")


def best_first_tree(
    marginals: Marginals,
    bonus_tokens: Tensor,
    seq_lens: Tensor,
    *,
    out: DraftTree,
) -> None:
    """Build each request's tree of most probable prefixes, by a block's marginals.

    A draft that writes a whole block in one forward gives a distribution per position. If the
    positions are taken as independent, a prefix has the product of its tokens' probabilities. The
    tree holds the root and the n - 1 prefixes of the highest products, best first, as in DDTree.
    So the first m nodes are the best tree of m nodes.

    Among equal products the shorter prefix comes first, then the one whose parent comes first,
    then the one of the lower rank. Log-probabilities are added up in float32 from the root down.
    A number above 0 counts as 0, and NaN and what is below -1e30 as -1e30.

    One launch, which can be recorded in a CUDA graph.

    Parameters
    ----------
    marginals : Marginals
        The K most probable tokens at each of L positions; requests may have a stride.
    bonus_tokens, seq_lens : Tensor
        ``[B]`` int64 and int32: the root's token and position.
    out : DraftTree
        Of n of 1 to 256 nodes; ``tokens``, ``positions``, ``words`` and links are written; dense.

    Raises
    ------
    ValueError
        If the block has fewer prefixes than the tree nodes, or more than 255 positions or ranks;
        or if a tensor of the block is of another shape or dtype, or one is not dense.
    """
    log_probs, tokens, nodes = marginals.log_probs, marginals.tokens, out.tokens.shape[1]
    _check_marginals(log_probs, tokens, nodes)
    require_dense(1, log_probs=log_probs, tokens=tokens)
    require_dense(**written(out))
    if not len(log_probs):
        return
    batch, length, ranks = log_probs.shape
    if on_triton(log_probs):
        launch.best_first_kernel[(batch,)](
            log_probs,
            tokens,
            bonus_tokens,
            seq_lens,
            tuple(written(out).values()),
            length.bit_length(),
            log_probs.stride(0),
            tokens.stride(0),
            **node_sizes(out),
            L=length,
            K=ranks,
            # nodes are found one by one, and between warps every reduction would wait for a barrier
            num_warps=1,
            **launch_options(log_probs.device),
        )
        return
    device = log_probs.device
    log_probs = log_probs.nan_to_num(nan=-1e30).clamp(-1e30, 0)
    score = log_probs.new_zeros(batch, 1)
    first, width = 0, 1  # of the prefixes one shorter
    scores, parents, drafted = [score], [torch.full((batch, 1), -1, device=device)], []
    for position in range(length):
        # prefixes of a length, in the order of their parents and ranks: the sort keeps it
        longer = (score[:, :, None] + log_probs[:, position, None]).flatten(1)
        score, order = longer.sort(dim=1, descending=True, stable=True)
        score, order = score[:, : nodes - 1], order[:, : nodes - 1]
        scores.append(score)
        parents.append(first + order // ranks)
        drafted.append(tokens[:, position].gather(1, order % ranks))
        first, width = first + width, order.shape[1]
    # shorter prefixes come first among equals
    order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True).indices
    order = order[:, :nodes]  # the empty prefix, the root, is best
    number = torch.zeros(batch, first + width, dtype=torch.long, device=device)
    number.scatter_(1, order, torch.arange(nodes, device=device).expand_as(order))
    parent = number.gather(1, torch.cat(parents, 1).gather(1, order).clamp(min=0))
    parent[:, 0] = -1

    out.tokens.copy_(torch.cat([bonus_tokens[:, None], *drafted], 1).gather(1, order))
    write_links(out, parent, seq_lens, length)


def _check_marginals(log_probs: Tensor, tokens: Tensor, nodes: int) -> None:
    """Raise ValueError unless they give so many nodes."""
    batch, length, ranks = log_probs.shape
    require_shape((batch, length, ranks), torch.float32, log_probs=log_probs)
    require_shape((batch, length, ranks), torch.int64, tokens=tokens)
    whole_number("positions", length, 0, MAX_NODES - 1)
    whole_number("ranks", ranks, 0, MAX_NODES - 1)
    prefixes = 0
    for depth in range(1, length + 1):
        prefixes = min(prefixes + ranks**depth, MAX_NODES)
    whole_number("nodes", nodes, 1, min(prefixes + 1, MAX_NODES))
