"""R46: lablup/mlxcel#1212, lablup/mlxcel#1214.

A node's rotary position was its row index instead of its depth: right for chains, wrong for every
branch.

A tree's positions are lengths plus depths. A branching tree says at each node what that node's
path says alone, and would not with row indices for positions.
"""

from __future__ import annotations

import random

import pytest
import torch

from specattn.batch import Candidates, ForwardMode
from tests.filling import built_tree
from tests.kernels.tree_oracle import random_candidates
from tests.worlds import BACKENDS, CONFIG, DEVICE, tree_of, world

MODE, LENGTH = ForwardMode.TARGET_VERIFY, 37
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5, 6]


def logits(one, parents, tokens, positions=None):
    words, depths = tree_of(parents)
    one.poison([LENGTH])
    return one.run(
        MODE,
        [LENGTH],
        {
            "tokens": torch.tensor([tokens], device=DEVICE),
            "tree_positions": LENGTH + torch.tensor([positions or depths], device=DEVICE),
            "words": torch.tensor([words], device=DEVICE)[:, :, None],
        },
    )["logits"][0]


def test_the_builder_gives_depths():
    rng = random.Random(0)
    parts = zip(*(random_candidates(rng, 3, 4) for _ in range(2)), strict=True)
    made = Candidates(
        *(torch.tensor(part, device=DEVICE) for part in parts), torch.empty(2, 0, 0, device=DEVICE)
    )
    lens = torch.tensor([LENGTH, 0], dtype=torch.int32)
    bonus = torch.tensor([1, 2], device=DEVICE)
    tree = built_tree(made, bonus, lens.to(DEVICE), CONFIG)
    depths = [[int(word).bit_count() - 1 for word in words] for words in tree.words[:, :, 0]]
    assert (tree.positions.cpu() - lens[:, None]).tolist() == depths
    assert depths[0] != list(range(CONFIG.num_draft_tokens)), "a chain shows nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_node_of_a_tree_is_the_end_of_its_path(backend):
    one = world(backend, [1])
    nodes = CONFIG.num_draft_tokens
    tokens = [(5 * node + 2) % 61 for node in range(nodes)]
    whole = logits(one, PARENTS, tokens)
    by_row = logits(one, PARENTS, tokens, list(range(nodes)))
    shifted = 0
    for node in range(nodes):
        path = [node]
        while path[0]:
            path.insert(0, PARENTS[path[0]])
        # the path as a chain; the rest of the width hangs below the root
        spare = nodes - len(path)
        chain = [*range(-1, len(path) - 1), *[0] * spare]
        alone = logits(one, chain, [tokens[n] for n in path] + [0] * spare)
        torch.testing.assert_close(whole[node], alone[len(path) - 1], rtol=1e-4, atol=1e-4)
        shifted += not torch.allclose(by_row[node], whole[node], rtol=1e-3, atol=1e-3)
    assert shifted > 3, "positions make no difference: the test shows nothing"
