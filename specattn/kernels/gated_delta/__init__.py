"""Gated DeltaNet over trees and prompts, without a state per node.

Per value head a token takes its state from ``S`` to ``e^g S + u k'``, where
``u = beta (v - e^g S k)``, and gives ``S q``. Queries and keys are normalised, and queries scaled
by ``K ** -0.5``. With G the sum of g from the root to a node, the nodes of a tree solve one system
over the committed state::

    u_i + beta_i sum_{j above i} e^(G_i - G_j) (k_i k_j) u_j = beta_i (v_i - e^(G_i) S k_i)
    o_i = e^(G_i) S q_i + sum_{j above i, or i} e^(G_i - G_j) (q_i k_j) u_j

A difference of two nodes on a path is at most 0, and others are masked before ``exp``: nothing
overflows. The commit is the recurrence over the accepted nodes, so that a state has the bits of
plain decoding. Prompts are chains of 64 tokens at a time.
"""

from __future__ import annotations

from specattn.kernels.gated_delta.commit import commit_nodes
from specattn.kernels.gated_delta.convolve import convolve_nodes, convolve_pieces
from specattn.kernels.gated_delta.pieces import read_pieces
from specattn.kernels.gated_delta.tokens import MAX_NODES, LayerParts, LayerWeights, Nodes, Tokens
from specattn.kernels.gated_delta.verify import verify_nodes

__all__ = [
    "MAX_NODES",
    "LayerParts",
    "LayerWeights",
    "Nodes",
    "Tokens",
    "commit_nodes",
    "convolve_nodes",
    "convolve_pieces",
    "read_pieces",
    "verify_nodes",
]
