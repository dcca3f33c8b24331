"""Values for static buffers, as the first kernels of a step write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specattn.batch import DraftTree
from specattn.kernels.tree import build_tree
from specattn.plan import mask_words

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from specattn.batch import Candidates
    from specattn.buffers import BufferSet
    from specattn.config import SpecConfig


def built_tree(
    candidates: Candidates, roots: Tensor, seq_lens: Tensor, config: SpecConfig
) -> DraftTree:
    """Return the tree that a step builds of candidates."""
    size, nodes = len(roots), config.num_draft_tokens
    tokens, positions, first, sibling = roots.new_empty(4, size, nodes)
    words = roots.new_empty(size, nodes, mask_words(nodes))
    tree = DraftTree(tokens, positions, words, first, sibling, candidates.draft_probs)
    build_tree(candidates, roots, seq_lens, topk=config.topk, out=tree)
    return tree


def put(buffers: BufferSet, dims: Any, **values: Tensor) -> None:
    """Write values into the first rows, and padding into the rows after them."""
    tensors = buffers.tensors()
    (first, *_) = tensors.values()
    padding = type(buffers).alloc(len(first), dims, first.device)
    for name, value in values.items():
        tensors[name].copy_(getattr(padding, name))
        tensors[name][: len(value)] = value.to(tensors[name].device)
