"""R18: sglang#35771, sglang#35798.

Acceptance compared ``coin <= p``: a coin of exactly 0 accepted a token of probability 0, and a
coin on a boundary of the distribution function chose the token before it.

Intervals are half-open: accept iff ``p > 0`` and ``coin < p``.
"""

from __future__ import annotations

import torch

from specattn.kernels.sampling import draw_tokens
from tests.kernels.tree.test_accept import call
from tests.kernels.tree_oracle import DEVICE

# a root with the children 1 and 2, of tokens 0 and 1; 2 is what is left
LINKS = ([[9, 0, 1]], [[1, -1, -1]], [[-1, 2, -1]])


def walk(probs: list[float], coin: float, final: float = 0.5) -> tuple[list[int], int]:
    """The path, and the token after it."""
    target = torch.tensor(probs).expand(1, 3, 3).contiguous()
    coins = torch.tensor([[coin, coin]]), torch.tensor([[final, final]])
    path, _, _, bonus = call("accept_sampled", *map(torch.tensor, LINKS), target, *coins, steps=1)
    return path[0], bonus[0]


def test_a_coin_of_zero_takes_no_token_of_probability_zero(implementation):
    assert walk([0.0, 0.25, 0.75], 0.0)[0] == [0, 2]
    assert walk([0.0, 0.0, 1.0], 0.0, 0.0) == ([0, -1], 2)


def test_a_coin_on_a_boundary_belongs_to_the_next_token(implementation):
    assert walk([0.25, 0.25, 0.5], 0.25 - 2.0**-24)[0] == [0, 1]
    assert walk([0.25, 0.25, 0.5], 0.25)[0] == [0, 2]
    assert walk([0.25, 0.25, 0.5], 0.5)[0] == [0, -1]
    assert walk([0.5, 0.5, 0.0], 1 - 2.0**-24)[0] == [0, 2]


def test_the_final_draw_is_half_open_too():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(4, 5).to(DEVICE)
    coins = torch.tensor([0.0, 0.25 - 2.0**-24, 0.25, 1 - 2.0**-24], device=DEVICE)
    assert draw_tokens(weights, coins).tolist() == [1, 1, 3, 3]
