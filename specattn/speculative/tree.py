"""From candidates to the tree that is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.batch import Candidates, DraftTree, SpecBatch
from specattn.kernels import tree as tree_ops
from specattn.plan import mask_words

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import SpecConfig


def build_tree(candidates: Candidates, batch: SpecBatch, config: SpecConfig) -> DraftTree:
    """Keep the best candidates below the bonus token; link them.

    The dynamic tree of EAGLE-2 (arXiv:2406.16858): candidates are ranked by the probability of
    their path, ties going to the lower flat index and NaN ranking last; a kept node's ancestors
    are kept too. Children are linked in ascending node id.

    Parameters
    ----------
    candidates : Candidates
        What the drafter proposed.
    batch : SpecBatch
        Gives the roots (bonus tokens) and their positions.
    config : SpecConfig
        Tree width and depth.
    """
    size, nodes = len(batch), config.num_draft_tokens
    roots, device = batch.bonus_tokens, batch.seq_lens.device
    tree = DraftTree(
        tokens=roots.new_empty(size, nodes),
        positions=roots.new_empty(size, nodes),
        words=roots.new_empty(size, nodes, mask_words(nodes)),
        retrieve_index=torch.arange(size * nodes, device=device).view(size, nodes),
        retrieve_next_token=roots.new_empty(size, nodes),
        retrieve_next_sibling=roots.new_empty(size, nodes),
        draft_probs=candidates.draft_probs,
    )
    fill_tree(candidates, roots, batch.seq_lens, config, tree)
    return tree


def fill_tree(
    candidates: Candidates, roots: Tensor, seq_lens: Tensor, config: SpecConfig, tree: DraftTree
) -> None:
    """Write `build_tree`'s tree into given tensors; ``draft_probs`` stay.

    ``roots`` and ``seq_lens`` are ``[B]`` int64 and int32: bonus tokens and their positions.
    """
    tree_ops.build_tree(
        candidates.scores,
        candidates.tokens,
        candidates.parents,
        roots,
        seq_lens,
        topk=config.topk,
        num_draft_tokens=config.num_draft_tokens,
        tokens_out=tree.tokens,
        positions_out=tree.positions,
        words_out=tree.words,
        next_token_out=tree.retrieve_next_token,
        next_sibling_out=tree.retrieve_next_sibling,
    )


def root_tree(batch: SpecBatch) -> DraftTree:
    """Return the tree of plain decoding: the bonus token alone."""
    root = batch.bonus_tokens[:, None]
    none = torch.full_like(root, -1)
    return DraftTree(
        tokens=root,
        positions=batch.seq_lens.long()[:, None],
        words=torch.ones_like(root)[:, :, None],
        retrieve_index=torch.arange(len(root), device=root.device)[:, None],
        retrieve_next_token=none,
        retrieve_next_sibling=none,
        draft_probs=torch.empty(len(root), 0, 0, device=root.device),
    )
