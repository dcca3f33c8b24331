"""R19: sglang#7207, sglang#7231.

The coin that rejected the drafts also drew the final token: given a rejection it is no longer
uniform, and the emitted tokens were biased.

Acceptance and final draw have coins of their own; over many requests the first emitted token
follows the target's law, for trees and for chains.
"""

from __future__ import annotations

import pytest
import torch

from specattn.batch import DraftTree
from specattn.config import SpecConfig
from specattn.kernels.sampling import ACCEPT, DRAFT, FINAL, draw_tokens, uniform
from specattn.speculative.sampling.params import SamplingBatch
from specattn.speculative.step.verify import accept
from tests.distributions import pearson

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAWS = 100_000
PROBS = torch.tensor([0.35, 0.05, 0.3, 0.1, 0.2])
DRAFT_PROBS = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1])


def emitted(tree: dict[str, list[int]], tokens: torch.Tensor, *, chain: bool) -> torch.Tensor:
    """The first token that each of ``DRAWS`` requests gains."""
    nodes = tokens.shape[1]
    zeros = torch.zeros(DRAWS, dtype=torch.int64, device=DEVICE)
    links = {
        name: torch.tensor(row, device=DEVICE).expand(DRAWS, nodes).contiguous()
        for name, row in tree.items()
    }
    probs = DRAFT_PROBS.to(DEVICE).expand(DRAWS, 1, 5) if chain else zeros.new_empty(DRAWS, 1, 0)
    made = DraftTree(
        tokens=tokens,
        positions=zeros[:, None].expand(-1, nodes),
        words=tokens[:, :, None],
        draft_probs=probs.float().contiguous(),
        **links,
    )
    sampling = SamplingBatch(
        False, torch.ones(DRAWS, device=DEVICE), None, None, torch.arange(DRAWS, device=DEVICE)
    )
    setting = SpecConfig(1, 1 if chain else 2, nodes, draft_sampling=chain)
    logits = PROBS.log().to(DEVICE).expand(DRAWS, nodes, 5).contiguous()
    return accept(made, logits, zeros.int(), setting, sampling).accept_tokens[:, 0]


def p_value(tokens: torch.Tensor) -> float:
    return pearson(tokens.bincount(minlength=5).tolist(), PROBS.double().tolist())


def test_a_tree_emits_the_distribution_of_the_target():
    links = {"retrieve_next_token": [1, -1, -1], "retrieve_next_sibling": [-1, 2, -1]}
    tokens = torch.tensor([4, 1, 2], device=DEVICE).expand(DRAWS, 3).contiguous()
    assert p_value(emitted(links, tokens, chain=False)) > 1e-4


def test_a_chain_emits_the_distribution_of_the_target():
    links = {"retrieve_next_token": [1, -1], "retrieve_next_sibling": [-1, -1]}
    seeds = torch.arange(DRAWS, device=DEVICE)
    coins = uniform(seeds, torch.zeros_like(seeds), DRAFT)
    drawn = draw_tokens(DRAFT_PROBS.to(DEVICE).expand(DRAWS, 5).contiguous(), coins)
    tokens = torch.stack([torch.full_like(drawn, 4), drawn], 1)
    assert p_value(emitted(links, tokens, chain=True)) > 1e-4


@pytest.mark.parametrize(("one", "other"), [(ACCEPT, FINAL), (ACCEPT, DRAFT), (FINAL, DRAFT)])
def test_coins_of_one_position_are_unrelated(one, other):
    seeds = torch.arange(DRAWS, device=DEVICE)
    at = torch.zeros_like(seeds)
    pair = torch.stack([uniform(seeds, at, one), uniform(seeds, at, other)])
    assert abs(float(torch.corrcoef(pair.double())[0, 1])) < 5 * DRAWS**-0.5
