"""Pick beams, build draft trees, and accept paths of them."""

from __future__ import annotations

from specattn.kernels.tree.accept import accept_greedy, accept_rejection, accept_sampled
from specattn.kernels.tree.beams import Beams, grow_words, select_beams
from specattn.kernels.tree.best_first import best_first_tree
from specattn.kernels.tree.build import build_tree, link_tree

__all__ = [
    "Beams",
    "accept_greedy",
    "accept_rejection",
    "accept_sampled",
    "best_first_tree",
    "build_tree",
    "grow_words",
    "link_tree",
    "select_beams",
]
