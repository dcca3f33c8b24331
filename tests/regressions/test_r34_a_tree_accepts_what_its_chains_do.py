"""R34: NVIDIA/TensorRT-LLM#10343, NVIDIA/TensorRT-LLM#8586.

A tree accepted less than the chain it contained: the walk, and a KV rewind of one integer per
request, assumed that nodes lie in path order.

The walk follows links and the commit follows the path: a tree accepts exactly as much as the best
of the chains in it.
"""

from __future__ import annotations

import random

import pytest
import torch

from specattn.batch import DraftTree
from specattn.config import SpecConfig
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.step.verify import accept
from specattn.trees import links_from_parents, words_from_parents
from tests.kernels.tree_oracle import DEVICE, random_tree

STEPS, NODES = 4, 9


def tree_from(parents: list[int], tokens: list[int]) -> DraftTree:
    nodes = torch.tensor([tokens], device=DEVICE)
    table = torch.tensor([parents], device=DEVICE)
    first, sibling = links_from_parents(table)
    return DraftTree(
        nodes,
        nodes,
        words_from_parents(table),
        first,
        sibling,
        torch.empty(1, 0, 0, device=DEVICE),
    )


def gained(parents: list[int], tokens: list[int], wanted: list[int]) -> int:
    """Tokens a target gains that wants ``wanted[node]`` after each node."""
    logits = torch.nn.functional.one_hot(torch.tensor([wanted]), NODES).float().to(DEVICE)
    setting = SpecConfig(STEPS, 2, len(tokens))
    sampling = SamplingBatch.of([SamplingParams()], torch.device(DEVICE))
    lens = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return int(accept(tree_from(parents, tokens), logits, lens, setting, sampling).accept_lens)


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_gains_what_its_best_chain_gains(seed):
    rng = random.Random(seed)
    tree = random_tree(rng, NODES, STEPS)
    # siblings differ, and the target often wants one of them
    tokens = [0] * NODES
    for parent in range(NODES):
        for token, child in enumerate(tree.children(parent)):
            tokens[child] = token
    wanted = [rng.randrange(2) for _ in range(NODES)]
    best = 0
    for leaf in range(1, NODES):
        path = tree.ancestors(leaf)[::-1]
        best = max(
            best,
            gained(
                list(range(-1, len(path) - 1)), [tokens[n] for n in path], [wanted[n] for n in path]
            ),
        )
    assert gained(tree.parent, tokens, wanted) == best
